// The layers for registers of GLEANRL_WIDTH floats. layers.cc includes this file once for each width, in a separate
// namespace, with compiler options for processors that have such registers.

constexpr size_t kWidth = GLEANRL_WIDTH;
using Lanes = float __attribute__((vector_size(4 * GLEANRL_WIDTH)));
using Ints = std::int32_t __attribute__((vector_size(4 * GLEANRL_WIDTH)));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(Lanes lanes, float* to) { std::memcpy(to, &lanes, sizeof lanes); }

inline Lanes all(float value) { return Lanes{} + value; }

inline void pack(const float* weight, size_t in, size_t out, float* packed) {
  for (size_t panel = 0; panel < out; panel += kPanel) {
    const size_t count = out - panel < kPanel ? out - panel : kPanel;
    for (size_t i = 0; i < in; ++i) {
      for (size_t k = 0; k < count; ++k) packed[k] = weight[(panel + k) * in + i];
      for (size_t k = count; k < kPanel; ++k) packed[k] = 0.0f;
      packed += kPanel;
    }
  }
}

// Registers of outputs that a block computes together. Eight independent sums hide the latency of additions.
constexpr size_t kSums = 8;
constexpr size_t kPerPanel = kPanel / kWidth;

struct Dense {
  const float *packed, *bias;
  size_t in, out;
  const float* x;
  size_t x_stride;
  float* y;
  size_t y_stride, rows;
};

// Computes blocks of `panels` panels from output `at` on, as long as the last panel of a block has outputs; returns the
// first output that remains. It is inlined into calls with a constant, so that all sums of a block are in registers.
// These functions aren't templates, because GCC compiles instances of templates without the options for wide registers.
__attribute__((always_inline)) inline size_t dense_blocks(const size_t panels, const Dense& layer, size_t at) {
  while (layer.out > at + (panels - 1) * kPanel) {
    const size_t valid = layer.out - at < panels * kPanel ? layer.out - at : panels * kPanel;
    const float *const packed = layer.packed + at * layer.in, *const bias = layer.bias + at, *x = layer.x;
    float* y = layer.y + at;
    for (size_t row = 0; row < layer.rows; ++row, x += layer.x_stride, y += layer.y_stride) {
      Lanes sum[kSums];
      for (size_t k = 0; k < panels * kPerPanel; ++k) sum[k] = load(bias + k * kWidth);
      for (size_t i = 0; i < layer.in; ++i) {
        const Lanes value = all(x[i]);
        for (size_t panel = 0; panel < panels; ++panel) {
          const float* const weight = packed + (panel * layer.in + i) * kPanel;
          for (size_t k = 0; k < kPerPanel; ++k) sum[panel * kPerPanel + k] += load(weight + k * kWidth) * value;
        }
      }
      std::memcpy(y, sum, valid * sizeof(float));
    }
    at += valid;
  }
  return at;
}

inline void dense(const float* packed, const float* bias, size_t in, size_t out, const float* x, size_t x_stride,
                  float* y, size_t y_stride, size_t rows) {
  const Dense layer{packed, bias, in, out, x, x_stride, y, y_stride, rows};
  size_t at = 0;
  if constexpr (8 * kPerPanel <= kSums) at = dense_blocks(8, layer, at);
  if constexpr (4 * kPerPanel <= kSums) at = dense_blocks(4, layer, at);
  at = dense_blocks(2, layer, at);
  dense_blocks(1, layer, at);
}

// e^x. The relative error is below 2^-22. Results below 2^-126 are 0.
inline Lanes exp_of(Lanes x) {
  constexpr float kRound = 0x1.8p23f;  // adding it puts the nearest integer into the low bits
  const Lanes high = all(88.72283f), low = all(-87.33654f);
  Lanes y = x < high ? x : high;
  y = y > low ? y : low;
  const Lanes shifted = y * 1.44269504f + kRound;
  const Lanes whole = shifted - kRound;
  const Lanes r = (y - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two parts, so that r is accurate
  Lanes series = r * 1.9875691500e-4f + 1.3981999507e-3f;
  for (const float term : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) series = series * r + term;
  series = series * (r * r) + r + 1.0f;
  const auto found = reinterpret_cast<Lanes>(reinterpret_cast<Ints>(series) + (reinterpret_cast<Ints>(shifted) << 23));
  const Lanes zero{}, infinite = all(__builtin_inff());
  Lanes result = x < low ? zero : found;
  result = x > high ? infinite : result;
  return x == x ? result : x;
}

inline Lanes abs_of(Lanes x) { return reinterpret_cast<Lanes>(reinterpret_cast<Ints>(x) & 0x7fffffff); }

inline Lanes with_sign_of(Lanes magnitude, Lanes sign) {
  return reinterpret_cast<Lanes>(reinterpret_cast<Ints>(magnitude) |
                                 (reinterpret_cast<Ints>(sign) & static_cast<std::int32_t>(0x80000000)));
}

inline Lanes tanh_of(Lanes x) {
  const Lanes size = abs_of(x), z = x * x;
  Lanes series = z * -5.70498872745e-3f + 2.06390887954e-2f;
  for (const float term : {-5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) series = series * z + term;
  const Lanes near_zero = series * z * x + x;  // the other formula cancels there
  const Lanes far = with_sign_of(1.0f - 2.0f / (exp_of(size + size) + 1.0f), x);
  return size < 0.625f ? near_zero : far;
}

// e^x - 1, accurate near 0.
inline Lanes expm1_of(Lanes x) {
  const Lanes half = tanh_of(x * 0.5f), near_zero = (half + half) / (1.0f - half);
  return abs_of(x) < 1.0f ? near_zero : exp_of(x) - 1.0f;
}

// The functions that are computed register by register.
__attribute__((always_inline)) inline Lanes lanes_of(Unary kind, float a, Lanes v) {
  switch (kind) {
    case Unary::kTanh:
      return tanh_of(v);
    case Unary::kRelu:
      return v < 0.0f ? Lanes{} : v;
    case Unary::kLeakyRelu:
      return v > 0.0f ? v : v * a;
    case Unary::kElu:
      return v > 0.0f ? v : expm1_of(v) * a;
    case Unary::kSilu:
      return v / (1.0f + exp_of(-v));
    case Unary::kGeluTanh:
      return 0.5f * v * (1.0f + tanh_of(0.7978845608f * (v + 0.044715f * (v * v * v))));
    case Unary::kSigmoid:
      return 1.0f / (1.0f + exp_of(-v));
    case Unary::kExp:
      return exp_of(v);
    case Unary::kAbs:
      return abs_of(v);
    case Unary::kNegate:
      return -v;
    case Unary::kAtLeast:
      return v < a ? all(a) : v;
    case Unary::kAtMost:
      return v > a ? all(a) : v;
    case Unary::kAdd:
      return v + a;
    case Unary::kMultiply:
      return v * a;
    case Unary::kDivide:
      return v / a;
    case Unary::kSubtractFrom:
      return a - v;
    case Unary::kDivideInto:
      return a / v;
    default:
      return v;
  }
}

// The functions of the C library, in double precision.
inline double number_of(Unary kind, double a, double b, double v) {
  switch (kind) {
    case Unary::kGelu:
      // The product is rounded to a float, and may overflow, as in torch.
      return 0.5 * static_cast<double>(static_cast<float>(v * (1.0 + std::erf(v * 0.7071067811865476))));
    case Unary::kSoftplus:
      // Infinite where the exponential is too large for a float, as in torch.
      return v * a > b ? v : std::log1p(static_cast<double>(static_cast<float>(std::exp(v * a)))) / a;
    case Unary::kLog:
      return std::log(v);
    default:
      return std::sqrt(v);
  }
}

inline void unary(Unary kind, float a, float b, const float* x, size_t n, float* y) {
  if (kind == Unary::kGelu || kind == Unary::kSoftplus || kind == Unary::kLog || kind == Unary::kSqrt) {
    for (size_t i = 0; i < n; ++i) y[i] = static_cast<float>(number_of(kind, a, b, x[i]));
    return;
  }
  size_t at = 0;
  for (; n - at >= kWidth; at += kWidth) store(lanes_of(kind, a, load(x + at)), y + at);
  if (at == n) return;
  Lanes last{};
  std::memcpy(&last, x + at, (n - at) * sizeof(float));
  last = lanes_of(kind, a, last);
  std::memcpy(y + at, &last, (n - at) * sizeof(float));
}

constexpr Layers kLayers{static_cast<int>(kWidth), &pack, &dense, &unary};
