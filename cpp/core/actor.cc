#include "actor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "layers.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

constexpr double kHalfLogTwoPi = 0.9189385332046727, kTwoPi = 6.283185307179586, kLogTwo = 0.6931471805599453;
// The largest hyperbolic tangent that a squashed sample may have, so that its inverse stays finite: TorchRL's bound.
constexpr double kLimit = static_cast<double>(static_cast<float>(1.0 - 1e-6));
constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("actor: expected ") + what);
}

size_t count_of(int64_t number) { return static_cast<size_t>(number); }

// The first position of the largest number; NaN counts as the largest, as in torch.
int64_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return i;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

// Whether one number is larger than all others.
bool has_one_maximum(const float* x, int64_t n) {
  const float most = x[argmax(x, n)];
  return std::count(x, x + n, most) == 1;  // none for NaN
}

// log(1 + e^x) without overflow.
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

template <class Value>
void convert(const float* from, int64_t n, std::byte* to) {
  for (int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<Value>(from[i]);
    std::memcpy(to + count_of(i) * sizeof(Value), &value, sizeof(Value));
  }
}

template <class Value>
void widen(const std::byte* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    Value value;
    std::memcpy(&value, from + count_of(i) * sizeof(Value), sizeof(Value));
    to[i] = static_cast<float>(value);
  }
}

// Checks operations in their order. Each slot is written once, before another operation reads it; each weight is
// used once. Numbers are small, so that products don't overflow.
class Checks {
 public:
  Checks(const std::vector<int64_t>& sizes, int num_inputs, int num_weights)
      : sizes_(sizes), made_(sizes.size()), num_inputs_(num_inputs), weight_counts_(count_of(num_weights), -1) {
    for (const int64_t size : sizes) require(size >= 0 && size < kMost, "slots below 2^24 floats");
  }

  bool is_made(int64_t slot) const { return is_slot(slot) && made_[count_of(slot)]; }

  // The number of floats of each weight; -1 for one that no operation uses.
  const std::vector<int64_t>& weight_counts() const { return weight_counts_; }

  void check(const Operation& op) {
    for (const int64_t number : op.sizes) require(number >= -1 && number < kMost, "numbers below 2^24");
    for (const int from : op.from) require(is_made(from) || from == -1, "earlier results");
    const bool may_lack_mask = op.kind == Kind::kCategorical || op.kind == Kind::kExplore;
    for (size_t k = 0; k < op.from.size(); ++k) {
      require(op.from[k] >= 0 || (may_lack_mask && k + 1 == op.from.size()), "earlier results");
    }
    make(op.to);
    if (op.kind <= Kind::kNorm) {
      check_weighted(op);
    } else if (op.kind <= Kind::kCopy) {
      check_arithmetic(op);
    } else {
      check_choice(op);
    }
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 24;

  bool is_slot(int64_t slot) const { return slot >= 0 && slot < static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t slot) const { return sizes_[count_of(slot)]; }

  void make(int64_t slot) {
    require(is_slot(slot) && !made_[count_of(slot)], "a new slot for each result");
    made_[count_of(slot)] = true;
  }

  void use_weight(int64_t number, int64_t count) {
    require(number >= 0 && number < static_cast<int64_t>(weight_counts_.size()), "a weight that exists");
    require(weight_counts_[count_of(number)] == -1, "a weight for each use");
    weight_counts_[count_of(number)] = count;
  }

  void use_weight_or_none(int64_t number, int64_t count) {
    if (number != -1) use_weight(number, count);
  }

  static void require_given(const Operation& op, size_t from, size_t sizes, size_t numbers) {
    require(op.from.size() == from && op.sizes.size() == sizes && op.numbers.size() == numbers,
            "arguments of the operation");
  }

  void check_weighted(const Operation& op) {
    const auto& n = op.sizes;
    if (op.kind == Kind::kInput) {
      require_given(op, 0, 2, 0);
      require(n[0] >= 0 && n[0] < num_inputs_, "an input that exists");
      const bool known = n[1] == static_cast<int>(Dtype::kFloat32) || n[1] == static_cast<int>(Dtype::kBool);
      require(known, "inputs of float32 or bool");
    } else if (op.kind == Kind::kConstant) {
      require_given(op, 0, 2, 0);
      require(n[1] == size(op.to), "as many numbers as the slot has");
      use_weight(n[0], n[1]);
    } else if (op.kind == Kind::kDense) {
      require_given(op, 1, 5, 0);
      require(n[2] >= 0 && n[3] >= 1 && n[4] >= 0, "a layer with outputs");
      require(size(op.from[0]) == n[2] * n[4] && size(op.to) == n[3] * n[4], "fitting slots");
      use_weight(n[0], n[2] * n[3]);
      use_weight_or_none(n[1], n[3]);
    } else {
      require_given(op, 1, 4, 1);
      require(op.kind == Kind::kNorm, "a known operation");
      require(n[2] >= 1 && n[3] >= 0 && size(op.from[0]) == n[2] * n[3] && size(op.to) == n[2] * n[3], "fitting slots");
      use_weight_or_none(n[0], n[2]);
      use_weight_or_none(n[1], n[2]);
    }
  }

  void check_arithmetic(const Operation& op) {
    const auto& n = op.sizes;
    if (op.kind == Kind::kUnary) {
      require_given(op, 1, 1, 2);
      require(n[0] >= 0 && n[0] < kNumUnary && size(op.from[0]) == size(op.to), "a known function of equal slots");
    } else if (op.kind == Kind::kBinary) {
      require_given(op, 2, 1, 0);
      require(n[0] >= 0 && n[0] <= static_cast<int>(Binary::kMinimum), "a known function");
      for (const int from : op.from) require(size(from) == size(op.to) || size(from) == 1, "fitting slots");
    } else {
      require(n.size() == 1 + 3 * op.from.size() && n[0] >= 1, "three numbers for each part");
      int64_t total = 0;
      for (size_t part = 0; part < op.from.size(); ++part) {
        const int64_t first = n[1 + 3 * part], count = n[2 + 3 * part], stride = n[3 + 3 * part];
        require(first >= 0 && count >= 0 && first + count <= stride, "parts of the slots");
        require(stride * n[0] == size(op.from[part]), "parts of the slots");
        total += count;
      }
      require(total < kMost && total * n[0] == size(op.to), "fitting slots");
    }
  }

  void check_choice(const Operation& op) {
    const auto& n = op.sizes;
    switch (op.kind) {
      case Kind::kArgmax:
        require_given(op, 1, 3, 0);
        require(n[0] >= 1 && size(op.from[0]) == n[0] * n[1] && size(op.to) == n[1], "fitting slots");
        break;
      case Kind::kOneHot:
        require_given(op, 1, 1, 0);
        require(n[0] >= 1 && size(op.from[0]) == 1 && size(op.to) == n[0], "fitting slots");
        break;
      case Kind::kCategorical:
        require_given(op, 2, 4, 0);
        require(n[0] >= 1 && size(op.from[0]) == n[0] && size(op.to) == 1, "fitting slots");
        require(op.from[1] == -1 || size(op.from[1]) == n[0], "a mask for all choices");
        check_score(n[3], 1);
        break;
      case Kind::kGather:
        require_given(op, 2, 0, 0);
        require(size(op.from[0]) >= 1 && size(op.from[1]) == 1 && size(op.to) == 1, "fitting slots");
        break;
      case Kind::kExplore:
        require_given(op, 3, 1, 0);
        require(n[0] >= 1 && size(op.from[0]) == 1 && size(op.from[1]) == 1 && size(op.to) == 1, "fitting slots");
        require(op.from[2] == -1 || size(op.from[2]) == n[0], "a mask for all choices");
        break;
      case Kind::kNormal:
        require_given(op, 2, 4, 2);
        for (const int from : op.from) require(size(from) == size(op.to) || size(from) == 1, "fitting slots");
        require(size(op.to) <= 65536, "at most 65,536 numbers of a normal distribution");
        check_score(n[3], n[2] != 0 ? 1 : size(op.to));
        break;
      default:
        require(false, "a known operation");
    }
  }

  void check_score(int64_t slot, int64_t count) {
    if (slot == -1) return;
    make(slot);
    require(size(slot) == count, "a slot for the log-probability");
  }

  const std::vector<int64_t>& sizes_;
  std::vector<bool> made_;
  int num_inputs_;
  std::vector<int64_t> weight_counts_;
};

}  // namespace

ActorProgram::ActorProgram(std::vector<int64_t> slot_sizes, std::vector<Operation> operations,
                           std::vector<Output> outputs, int num_inputs, int num_weights)
    : sizes_(std::move(slot_sizes)),
      operations_(std::move(operations)),
      outputs_(std::move(outputs)),
      num_inputs_(num_inputs),
      slots_(sizes_.size()) {
  require(num_inputs >= 0 && num_weights >= 0, "0 or more inputs and weights");
  Checks checks(sizes_, num_inputs, num_weights);
  for (const Operation& op : operations_) checks.check(op);
  for (const Output& output : outputs_) {
    require(checks.is_made(output.slot), "outputs from results");
    require(output.dtype >= Dtype::kFloat32 && output.dtype <= Dtype::kUint8, "a known dtype");
  }
  weight_counts_ = checks.weight_counts();
  packed_.resize(weight_counts_.size());
  for (const Operation& op : operations_) {
    if (op.kind != Kind::kDense) continue;
    num_products_ += op.sizes[2] * op.sizes[3] * op.sizes[4];
    if (op.sizes[1] < 0) zeros_.resize(std::max(zeros_.size(), padded(count_of(op.sizes[3]))));
  }
}

void ActorProgram::pack(const std::vector<Weight>& weights) {
  require(weights.size() == packed_.size(), "an array for each weight");
  for (size_t k = 0; k < weights.size(); ++k)
    require(weights[k].count == weight_counts_[k], "weights of the same shape");
  const auto copy = [&](int64_t number, size_t room) {
    if (number < 0) return;
    auto& packed = packed_[count_of(number)];
    const Weight& weight = weights[count_of(number)];
    packed.assign(room, 0.0f);
    std::copy_n(weight.data, weight.count, packed.begin());
  };
  for (const Operation& op : operations_) {
    const auto& n = op.sizes;
    if (op.kind == Kind::kConstant) copy(n[0], count_of(n[1]));
    if (op.kind == Kind::kNorm) {
      copy(n[0], count_of(n[2]));
      copy(n[1], count_of(n[2]));
    }
    if (op.kind == Kind::kDense) {
      const size_t in = count_of(n[2]), out = count_of(n[3]);
      auto& packed = packed_[count_of(n[0])];
      packed.resize(padded(out) * in);
      layers().pack(weights[count_of(n[0])].data, in, out, packed.data());
      copy(n[1], padded(out));
    }
  }
  is_packed_ = true;
}

void ActorProgram::bind(std::vector<ColumnPlace> inputs, std::vector<ColumnPlace> outputs, int64_t num_parts,
                        int64_t num_steps, std::uint64_t key, std::uint64_t step, std::uint64_t first) {
  require(inputs.size() == count_of(num_inputs_) && outputs.size() == outputs_.size(), "a column for each key");
  require(num_parts >= 0 && num_parts < (int64_t{1} << 31) && num_steps >= 0, "0 to 2^31 environments and steps");
  require(is_packed_, "packed weights");
  if (num_parts != num_parts_ || memory_.empty()) {
    int64_t total = 0;
    for (const int64_t size : sizes_) total += size;
    require(total < (int64_t{1} << 32), "fewer than 2^32 floats for each environment");
    memory_.assign(count_of(total * num_parts) + 1, 0.0f);
    float* next = memory_.data();
    for (size_t slot = 0; slot < sizes_.size(); ++slot) {
      slots_[slot] = {next, sizes_[slot], next};
      next += sizes_[slot] * num_parts;
    }
  }
  // A column that is read and written must be copied before the outputs are written. Columns of a block are the same or
  // disjoint, so equal addresses suffice.
  copies_inputs_ = false;
  for (const ColumnPlace& input : inputs) {
    for (const ColumnPlace& output : outputs) copies_inputs_ |= input.data == output.data;
  }
  inputs_ = std::move(inputs);
  places_ = std::move(outputs);
  num_parts_ = num_parts;
  num_steps_ = num_steps;
  key_ = key;
  step_ = next_step_ = step;
  first_ = first;
  for (const Operation& op : operations_) {
    if (op.kind != Kind::kConstant) continue;
    for (int64_t part = 0; part < num_parts; ++part) {
      std::copy_n(packed_[count_of(op.sizes[0])].data(), op.sizes[1], at(op.to, part));
    }
  }
}

bool ActorProgram::act(int64_t t) {
  if (t < 0 || t >= num_steps_) throw std::out_of_range("act: no such row");
  next_step_ = step_ + static_cast<std::uint64_t>(t) + 1;
  for (size_t number = 0; number < operations_.size(); ++number) {
    if (!run(number, operations_[number], t)) return false;
  }
  for (size_t k = 0; k < outputs_.size(); ++k) write(outputs_[k], places_[k], t);
  return true;
}

// The random numbers of an operation for one environment and step; each block has four.
Counter ActorProgram::draw(size_t number, int64_t part, std::uint64_t step, std::uint32_t block) const {
  return philox(key_, {static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32),
                       static_cast<std::uint32_t>(first_ + static_cast<std::uint64_t>(part)),
                       static_cast<std::uint32_t>(number) << 16 | block});
}

bool ActorProgram::run(size_t number, const Operation& op, int64_t t) {
  const auto& n = op.sizes;
  const auto rows = count_of(num_parts_);
  switch (op.kind) {
    case Kind::kInput:
      read(op, t);
      return true;
    case Kind::kConstant:
      return true;
    case Kind::kDense: {
      const auto& weight = packed_[count_of(n[0])];
      const size_t in = count_of(n[2]), out = count_of(n[3]), groups = count_of(n[4]);
      const float* const bias = n[1] < 0 ? zeros_.data() : packed_[count_of(n[1])].data();
      const Slot &x = slots_[count_of(op.from[0])], &y = slots_[count_of(op.to)];
      if (groups == 1) {
        layers().dense(weight.data(), bias, in, out, x.data, count_of(x.stride), y.data, count_of(y.stride), rows);
      } else {
        for (int64_t part = 0; part < num_parts_; ++part) {
          layers().dense(weight.data(), bias, in, out, at(op.from[0], part), in, at(op.to, part), out, groups);
        }
      }
      return true;
    }
    case Kind::kNorm:
      return run_norm(op);
    case Kind::kUnary:
      run_unary(op);
      return true;
    case Kind::kBinary:
      run_binary(op);
      return true;
    case Kind::kCopy:
      run_copy(op);
      return true;
    case Kind::kArgmax:
      for (int64_t part = 0; part < num_parts_; ++part) {
        for (int64_t group = 0; group < n[1]; ++group) {
          const float* const x = at(op.from[0], part) + group * n[0];
          if (n[2] != 0 && !has_one_maximum(x, n[0])) return false;
          at(op.to, part)[group] = static_cast<float>(argmax(x, n[0]));
        }
      }
      return true;
    case Kind::kOneHot:
      for (int64_t part = 0; part < num_parts_; ++part) {
        float* const to = at(op.to, part);
        const auto index = static_cast<int64_t>(*at(op.from[0], part));
        if (index < 0 || index >= n[0]) return false;
        std::fill_n(to, n[0], 0.0f);
        to[index] = 1.0f;
      }
      return true;
    case Kind::kCategorical:
      return run_categorical(number, op, step_ + static_cast<std::uint64_t>(t));
    case Kind::kGather:
      for (int64_t part = 0; part < num_parts_; ++part) {
        const auto index = static_cast<int64_t>(*at(op.from[1], part));
        if (index < 0 || index >= sizes_[count_of(op.from[0])]) return false;
        *at(op.to, part) = at(op.from[0], part)[index];
      }
      return true;
    case Kind::kExplore:
      return run_explore(number, op, step_ + static_cast<std::uint64_t>(t));
    case Kind::kNormal:
      return run_normal(number, op, step_ + static_cast<std::uint64_t>(t));
  }
  return false;
}

void ActorProgram::read(const Operation& op, int64_t t) {
  const ColumnPlace& place = inputs_[count_of(op.sizes[0])];
  std::byte* const row = place.data + t * place.step;
  Slot& slot = slots_[count_of(op.to)];
  const int64_t size = sizes_[count_of(op.to)];
  const auto dtype = static_cast<Dtype>(op.sizes[1]);
  constexpr auto kItem = static_cast<int64_t>(sizeof(float));
  if (dtype == Dtype::kFloat32 && !copies_inputs_ && place.part % kItem == 0 &&
      reinterpret_cast<std::uintptr_t>(row) % alignof(float) == 0) {
    slot.data = reinterpret_cast<float*>(row);  // no operation writes into an input
    slot.stride = place.part / kItem;
    return;
  }
  slot = {slot.memory, size, slot.memory};
  for (int64_t part = 0; part < num_parts_; ++part) {
    const std::byte* const from = row + part * place.part;
    if (dtype == Dtype::kFloat32) {
      std::memcpy(at(op.to, part), from, count_of(size) * sizeof(float));
    } else {
      widen<std::uint8_t>(from, size, at(op.to, part));
    }
  }
}

void ActorProgram::run_unary(const Operation& op) {
  const auto kind = static_cast<Unary>(op.sizes[0]);
  const auto a = static_cast<float>(op.numbers[0]), b = static_cast<float>(op.numbers[1]);
  const int64_t size = sizes_[count_of(op.to)];
  const bool together = slots_[count_of(op.from[0])].stride == size && slots_[count_of(op.to)].stride == size;
  const int64_t calls = together ? 1 : num_parts_, n = together ? size * num_parts_ : size;
  for (int64_t part = 0; part < calls; ++part) {
    layers().unary(kind, a, b, at(op.from[0], part), count_of(n), at(op.to, part));
  }
}

bool ActorProgram::run_norm(const Operation& op) {
  const int64_t n = op.sizes[2], groups = op.sizes[3];
  const float* const weight = op.sizes[0] < 0 ? nullptr : packed_[count_of(op.sizes[0])].data();
  const float* const bias = op.sizes[1] < 0 ? nullptr : packed_[count_of(op.sizes[1])].data();
  for (int64_t row = 0; row < num_parts_ * groups; ++row) {
    const float* const x = at(op.from[0], row / groups) + row % groups * n;
    float* const y = at(op.to, row / groups) + row % groups * n;
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < n; ++i) mean += static_cast<double>(x[i]);
    mean /= static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) variance += (static_cast<double>(x[i]) - mean) * (static_cast<double>(x[i]) - mean);
    if (kernels().any_nonfinite_float(x, count_of(n))) {
      std::fill_n(y, n, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    // torch computes these sums in float32, where they may overflow.
    if (!std::isfinite(static_cast<float>(variance)) || !std::isfinite(static_cast<float>(mean))) return false;
    const double scale = 1.0 / std::sqrt(variance / static_cast<double>(n) + op.numbers[0]);
    for (int64_t i = 0; i < n; ++i) {
      const double value = (static_cast<double>(x[i]) - mean) * scale;
      y[i] = static_cast<float>(weight ? value * static_cast<double>(weight[i]) : value) + (bias ? bias[i] : 0.0f);
    }
  }
  return true;
}

void ActorProgram::run_binary(const Operation& op) {
  const auto each = [&](auto function) {
    const int64_t size = sizes_[count_of(op.to)];
    const int64_t a_step = sizes_[count_of(op.from[0])] == size, b_step = sizes_[count_of(op.from[1])] == size;
    for (int64_t part = 0; part < num_parts_; ++part) {
      const float *a = at(op.from[0], part), *b = at(op.from[1], part);
      float* const y = at(op.to, part);
      for (int64_t i = 0; i < size; ++i) y[i] = function(a[i * a_step], b[i * b_step]);
    }
  };
  const auto nan_first = [](float a, float b, bool a_wins) {
    return std::isnan(a) || (!std::isnan(b) && a_wins) ? a : b;
  };
  switch (static_cast<Binary>(op.sizes[0])) {
    case Binary::kAdd:
      return each([](float a, float b) { return a + b; });
    case Binary::kSubtract:
      return each([](float a, float b) { return a - b; });
    case Binary::kMultiply:
      return each([](float a, float b) { return a * b; });
    case Binary::kDivide:
      return each([](float a, float b) { return a / b; });
    case Binary::kMaximum:
      return each([&](float a, float b) { return nan_first(a, b, a > b); });
    case Binary::kMinimum:
      return each([&](float a, float b) { return nan_first(a, b, a < b); });
  }
}

void ActorProgram::run_copy(const Operation& op) {
  const auto& n = op.sizes;
  for (int64_t part = 0; part < num_parts_; ++part) {
    float* to = at(op.to, part);
    for (int64_t group = 0; group < n[0]; ++group) {
      for (size_t k = 0; k < op.from.size(); ++k) {
        const int64_t first = n[1 + 3 * k], count = n[2 + 3 * k], stride = n[3 + 3 * k];
        to = std::copy_n(at(op.from[k], part) + group * stride + first, count, to);
      }
    }
  }
}

bool ActorProgram::run_categorical(size_t number, const Operation& op, std::uint64_t step) {
  const int64_t n = op.sizes[0];
  const bool probabilities = op.sizes[1] != 0, random = op.sizes[2] != 0;
  static thread_local std::vector<double> masses;
  masses.resize(count_of(n));
  for (int64_t part = 0; part < num_parts_; ++part) {
    const float* const x = at(op.from[0], part);
    const float* const mask = op.from[1] < 0 ? nullptr : at(op.from[1], part);
    const auto masked = [&](int64_t i) { return mask != nullptr && mask[i] == 0.0f; };
    double most = probabilities ? 0.0 : -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(x[i]) || (probabilities && x[i] < 0.0f)) return false;
      if (!masked(i)) most = std::max(most, static_cast<double>(x[i]));
    }
    if (std::isinf(most) || (probabilities && most == 0.0)) return false;
    int64_t choice = -1;
    for (int64_t i = 0; i < n; ++i) {
      const auto value = static_cast<double>(x[i]);
      masses[count_of(i)] = masked(i) ? 0.0 : probabilities ? value : std::exp(value - most);
      total += masses[count_of(i)];
      if (!random && choice < 0 && !masked(i) && value == most) choice = i;
    }
    if (random) {
      const Counter words = draw(number, part, step);
      const double mass = uniform_of(words[0], words[1]) * total;
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (masses[count_of(i)] <= 0.0) continue;  // also after the last one, where rounding may have kept `mass` high
        choice = i;
        sum += masses[count_of(i)];
        if (mass < sum) break;
      }
    }
    *at(op.to, part) = static_cast<float>(choice);
    if (op.sizes[3] < 0) continue;
    const double mass = masses[count_of(choice)] / total;
    // torch clamps probabilities, but not normalised logits.
    const double score = probabilities ? std::log(std::clamp(mass, kEpsilon, 1.0 - kEpsilon))
                                       : static_cast<double>(x[choice]) - most - std::log(total);
    *at(static_cast<int>(op.sizes[3]), part) = static_cast<float>(score);
  }
  return true;
}

bool ActorProgram::run_explore(size_t number, const Operation& op, std::uint64_t step) {
  const int64_t n = op.sizes[0];
  for (int64_t part = 0; part < num_parts_; ++part) {
    const Counter words = draw(number, part, step);
    float choice = *at(op.from[0], part);
    if (uniform_of(words[0], words[1]) < static_cast<double>(*at(op.from[1], part))) {
      const float* const mask = op.from[2] < 0 ? nullptr : at(op.from[2], part);
      int64_t allowed = 0;
      for (int64_t i = 0; i < n; ++i) allowed += mask == nullptr || mask[i] != 0.0f;
      if (allowed == 0) return false;
      auto left = static_cast<int64_t>(uniform_of(words[2], words[3]) * static_cast<double>(allowed));
      int64_t i = 0;
      while ((mask != nullptr && mask[i] == 0.0f) || left-- > 0) ++i;
      choice = static_cast<float>(i);
    }
    *at(op.to, part) = choice;
  }
  return true;
}

bool ActorProgram::run_normal(size_t number, const Operation& op, std::uint64_t step) {
  const bool random = op.sizes[0] != 0, squashed = op.sizes[1] != 0, summed = op.sizes[2] != 0;
  const auto scores = static_cast<int>(op.sizes[3]);
  const int64_t n = sizes_[count_of(op.to)];
  const int64_t loc_step = sizes_[count_of(op.from[0])] == n, scale_step = sizes_[count_of(op.from[1])] == n;
  const double low = op.numbers[0], half = (op.numbers[1] - low) / 2;
  for (int64_t part = 0; part < num_parts_; ++part) {
    const float *const loc = at(op.from[0], part), *const scale = at(op.from[1], part);
    float* const to = at(op.to, part);
    double sum = 0, spare = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float mean = loc[i * loc_step], deviation = scale[i * scale_step];
      if (std::isnan(mean) || !(deviation > 0.0f)) return false;
      double z = spare;
      if (random && i % 2 == 0) {  // Box and Muller's transformation gives two numbers
        const Counter words = draw(number, part, step, static_cast<std::uint32_t>(i / 2));
        const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform_of(words[0], words[1])));
        const double angle = kTwoPi * uniform_of(words[2], words[3]);
        z = radius * std::cos(angle);
        spare = radius * std::sin(angle);
      }
      const float value = random ? static_cast<float>(z) * deviation + mean : mean;
      double score = 0;
      if (scores >= 0) {
        const double distance =
            (static_cast<double>(value) - static_cast<double>(mean)) / static_cast<double>(deviation);
        score = -0.5 * distance * distance - std::log(static_cast<double>(deviation)) - kHalfLogTwoPi;
      }
      to[i] = value;
      if (squashed) {
        const auto x = static_cast<double>(value);
        const double bounded = std::clamp(std::tanh(x), -kLimit, kLimit);
        to[i] = static_cast<float>(low + half * (bounded + 1.0));
        if (scores >= 0) score -= 2.0 * (kLogTwo - x - softplus(-2.0 * x)) + std::log(half);
      }
      if (scores >= 0 && !summed) at(scores, part)[i] = static_cast<float>(score);
      sum += score;
    }
    if (scores >= 0 && summed) *at(scores, part) = static_cast<float>(sum);
  }
  return true;
}

void ActorProgram::write(const Output& output, const ColumnPlace& place, int64_t t) const {
  const int64_t size = sizes_[count_of(output.slot)];
  const Slot& slot = slots_[count_of(output.slot)];
  for (int64_t part = 0; part < num_parts_; ++part) {
    const float* const from = slot.data + part * slot.stride;
    std::byte* const to = place.data + part * place.part + t * place.step;
    switch (output.dtype) {
      case Dtype::kFloat32:
        std::memcpy(to, from, count_of(size) * sizeof(float));
        break;
      case Dtype::kFloat64:
        convert<double>(from, size, to);
        break;
      case Dtype::kInt64:
        convert<int64_t>(from, size, to);
        break;
      case Dtype::kInt32:
        convert<std::int32_t>(from, size, to);
        break;
      case Dtype::kBool:
      case Dtype::kUint8:
        convert<std::uint8_t>(from, size, to);
        break;
    }
  }
}

}  // namespace gleanrl
