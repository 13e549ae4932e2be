// The kernels for registers of GLEANRL_LANES doubles. kernels.cc includes this file once for each width, in a separate
// namespace, with compiler options for processors that have such registers.

constexpr int kLanes = GLEANRL_LANES;
using Doubles = double __attribute__((vector_size(8 * GLEANRL_LANES)));
using Floats = float __attribute__((vector_size(4 * GLEANRL_LANES)));
using Bits = std::uint64_t __attribute__((vector_size(8 * GLEANRL_LANES)));
using Masks = std::int64_t __attribute__((vector_size(8 * GLEANRL_LANES)));

inline Doubles load(const double* from) {
  Doubles lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Doubles all_lanes(double value) { return Doubles{} + value; }

// The number of items for the next register, if the items before `at` of n are done.
inline size_t next_lanes(size_t at, size_t n) { return n - at < kLanes ? n - at : kLanes; }

// Loads `count` doubles; the remaining lanes are 1.
inline Doubles load_some(const double* from, size_t count) {
  if (count == kLanes) return load(from);
  Doubles lanes = all_lanes(1.0);
  std::memcpy(&lanes, from, count * sizeof(double));
  return lanes;
}

// log2_of and exp2_of have no branches and no conversions between integers and doubles, because the baseline processor
// has no vector instruction for these. Instead, adding 2^52 puts an integer into the low bits of a double.
constexpr double kTwo52 = 0x1p52;
constexpr std::uint64_t kTwo52Bits = std::bit_cast<std::uint64_t>(kTwo52), kBias = 1023;

// The logarithm of positive x below 2^970. Error below 10^-11.
inline Doubles log2_of(Doubles x) {
  constexpr std::uint64_t kRootHalf = std::bit_cast<std::uint64_t>(0x1.6a09e667f3bcdp-1);
  const auto bits = reinterpret_cast<Bits>(x * 0x1p54);  // no longer subnormal, still finite below 2^970
  const Bits exponent = (bits - kRootHalf + (kBias << 52)) >> 52;
  const Doubles mantissa = reinterpret_cast<Doubles>(bits - ((exponent - kBias) << 52));  // in [sqrt(1/2), sqrt(2))
  const Doubles whole = reinterpret_cast<Doubles>(exponent | kTwo52Bits) - (kTwo52 + static_cast<double>(kBias) + 54.0);
  // log2 m = 2 / ln 2 * artanh((m - 1) / (m + 1))
  constexpr double kFactor = 2.885390081777927;
  const Doubles t = (mantissa - 1.0) / (mantissa + 1.0), s = t * t;
  Doubles series = s * (1.0 / 13) + 1.0 / 11;
  for (const double term : {1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) series = series * s + term;
  return whole + kFactor * t * series;
}

// 2^y, clamped to [2^-1000, 2^1000]. The relative error is below 10^-9.
inline Doubles exp2_of(Doubles y) {
  constexpr double kRound = 1.5 * kTwo52;
  const Doubles most = all_lanes(1000.0);
  y = y < most ? y : most;
  y = y > -most ? y : -most;
  const Doubles shifted = y + kRound;  // the nearest integer is in the low bits
  const Doubles f = (y - (shifted - kRound)) * 0.6931471805599453;
  Doubles series = f * (1.0 / 40320) + 1.0 / 5040;
  for (const double term : {1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0}) series = series * f + term;
  return reinterpret_cast<Doubles>(reinterpret_cast<Bits>(series) + (reinterpret_cast<Bits>(shifted) << 52));
}

inline void powers(const double* base, double add, double exponent, size_t n, double* power) {
  for (size_t at = 0; at < n; at += kLanes) {
    const size_t count = next_lanes(at, n);
    const Doubles sum = load_some(base + at, count) + add;
    const Doubles found = sum > 0.0 ? exp2_of(exponent * log2_of(sum)) : Doubles{};
    std::memcpy(power + at, &found, count * sizeof(double));
  }
}

inline void weights(const double* value, double one, double beta, size_t n, float* weight) {
  for (size_t at = 0; at < n; at += kLanes) {
    const size_t count = next_lanes(at, n);
    const Doubles found = exp2_of(-beta * (log2_of(load_some(value + at, count)) - one));
    const Floats rounded = __builtin_convertvector(found, Floats);
    std::memcpy(weight + at, &rounded, count * sizeof(float));
  }
}

inline double log2(double value) { return log2_of(all_lanes(value))[0]; }

// child[k] = the k-th child of each node; there are as many nodes as lanes.
inline void load_children(const double* children, const int64_t* node, Doubles (&child)[8]) {
#if GLEANRL_LANES == 2
  const double *a = children + 8 * node[0], *b = children + 8 * node[1];
  for (int k = 0; k < 8; k += 2) {
    const Doubles from_a = load(a + k), from_b = load(b + k);
    child[k] = Doubles{from_a[0], from_b[0]};
    child[k + 1] = Doubles{from_a[1], from_b[1]};
  }
#else
  // A transposition in three rounds, which exchange single elements, pairs, and groups of four.
  constexpr Masks kLow{0, 8, 2, 10, 4, 12, 6, 14}, kHigh{1, 9, 3, 11, 5, 13, 7, 15};
  constexpr Masks kLowPairs{0, 1, 8, 9, 4, 5, 12, 13}, kHighPairs{2, 3, 10, 11, 6, 7, 14, 15};
  constexpr Masks kLowFours{0, 1, 2, 3, 8, 9, 10, 11}, kHighFours{4, 5, 6, 7, 12, 13, 14, 15};
  Doubles one[8], two[8];
  for (int row = 0; row < 8; row += 2) {
    const Doubles a = load(children + 8 * node[row]), b = load(children + 8 * node[row + 1]);
    one[row] = __builtin_shuffle(a, b, kLow);
    one[row + 1] = __builtin_shuffle(a, b, kHigh);
  }
  for (int row = 0; row < 8; row += 4) {
    for (int odd = 0; odd < 2; ++odd) {
      two[row + odd] = __builtin_shuffle(one[row + odd], one[row + 2 + odd], kLowPairs);
      two[row + 2 + odd] = __builtin_shuffle(one[row + odd], one[row + 2 + odd], kHighPairs);
    }
  }
  for (int k = 0; k < 4; ++k) {
    child[k] = __builtin_shuffle(two[k], two[4 + k], kLowFours);
    child[4 + k] = __builtin_shuffle(two[k], two[4 + k], kHighFours);
  }
#endif
}

// Subtracts `mass` from `left` where `left` is at least `mass`; returns the mask of these lanes. Branches would be
// slow, because the outcome is random and the processor can't predict it.
inline Masks step_over(Doubles mass, Doubles& left) {
  const Masks reached = left >= mass;
  left -= reached ? mass : Doubles{};
  return reached;
}

// Selects a child of each node, and returns the mask of lanes whose child isn't positive. Three comparisons halve the
// children: the left four, then the left pair, then the left child.
inline Masks enter(const double* children, bool leaves, int64_t* node, double* mass) {
  Doubles child[8], four[4], pair[2], left = load(mass);
  load_children(children, node, child);
  const Masks fours = step_over((child[0] + child[2]) + (child[1] + child[3]), left);
  for (int k = 0; k < 4; ++k) four[k] = fours ? child[4 + k] : child[k];
  const Masks pairs = step_over(four[0] + four[1], left);
  for (int k = 0; k < 2; ++k) pair[k] = pairs ? four[2 + k] : four[k];
  const Masks ones = step_over(pair[0], left);
  const Doubles entered = ones ? pair[1] : pair[0];
  Masks nodes;
  std::memcpy(&nodes, node, sizeof nodes);
  nodes = 8 * nodes + ((fours & 4) + (pairs & 2) + (ones & 1));
  std::memcpy(node, &nodes, sizeof nodes);
  left = leaves ? entered : left;
  std::memcpy(mass, &left, sizeof left);
  return entered == 0.0;
}

inline void descend(const double* children, bool leaves, int64_t* index, double* left, size_t n) {
  Masks astray{};
  for (size_t at = 0; at < n; at += kLanes) {
    const size_t count = next_lanes(at, n);
    for (size_t ahead = at + kAhead; ahead < std::min(at + kAhead + kLanes, n); ++ahead) {
      __builtin_prefetch(children + 8 * index[ahead], 0, 2);
    }
    if (count == kLanes) {
      astray |= enter(children, leaves, index + at, left + at);
    } else {
      int64_t nodes[kLanes];
      double masses[kLanes];
      for (size_t lane = 0; lane < kLanes; ++lane) {
        nodes[lane] = index[at + std::min(lane, count - 1)];
        masses[lane] = left[at + std::min(lane, count - 1)];
      }
      astray |= enter(children, leaves, nodes, masses);
      std::copy_n(nodes, count, index + at);
      std::copy_n(masses, count, left + at);
    }
  }
  int64_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= astray[lane];
  if (any == 0) return;
  // Rounding can only move a search too far to the right. So a positive child is further left.
  for (size_t i = 0; i < n; ++i) {
    if (children[index[i]] != 0.0) continue;
    while (children[index[i]] == 0.0) --index[i];
    left[i] = children[index[i]];
  }
}

// These loops use three integer operations per register, without branches or comparisons. Only an exponent of all ones
// carries into the sign bit.
inline bool any_nonfinite_float(const float* values, size_t n) {
  constexpr std::uint32_t kExponent = 0x7f800000, kUnit = 0x00800000;
  std::uint32_t any = 0;
  for (size_t i = 0; i < n; ++i) any |= (std::bit_cast<std::uint32_t>(values[i]) & kExponent) + kUnit;
  return any > kExponent;
}

inline bool any_nonfinite_double(const double* values, size_t n) {
  constexpr std::uint64_t kExponent = 0x7ff0000000000000, kUnit = 0x0010000000000000;
  std::uint64_t any = 0;
  for (size_t i = 0; i < n; ++i) any |= (std::bit_cast<std::uint64_t>(values[i]) & kExponent) + kUnit;
  return any > kExponent;
}

constexpr Kernels kKernels{kLanes, &powers, &weights, &log2, &descend, &any_nonfinite_float, &any_nonfinite_double};
