// A small policy as a list of operations on rows of float32, from the root columns of a row to its output columns.
//
// Values.   A slot is a value of the list: `size` floats for each environment. An operation reads slots and writes one
//   or two. Indices of choices are floats too; a slot's size bounds them far below 2^24.
// Random.   A draw is a function of the key, the environment, the step and the number of the operation; see philox.h.
// Order.    `pack`, then `bind`, then `act` for each row; `pack` again for new weights.
// Failure.  std::invalid_argument while the list is built, and for calls in another order. `act` returns false, without
//   a write, if torch has to compute the row: invalid parameters of a distribution, a layer norm that overflows, an
//   index out of range, ties or NaN where torch's result is special, or a mask without choices.
// Threads.  One caller at a time.
// Lifetime. The caller keeps columns and weights alive: columns while they are bound, weights during `pack`.
// Cost.     One call per row. A policy 4-64-64-2 with a draw takes about one microsecond.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "philox.h"

namespace gleanrl {

enum class Kind : int {
  kInput,        // numbers: none; sizes: input, dtype
  kConstant,     // sizes: weight, count
  kDense,        // from: x; sizes: weight, bias or -1, in, out, groups
  kNorm,         // from: x; sizes: weight or -1, bias or -1, n, groups; numbers: eps
  kUnary,        // from: x; sizes: function; numbers: a, b
  kBinary,       // from: a, b; sizes: function; a or b may have size 1
  kCopy,         // from: parts; sizes: groups, then for each part: first, count, size of a group
  kArgmax,       // from: x; sizes: n, groups, whether NaN and ties are left to torch
  kOneHot,       // from: index; sizes: n
  kCategorical,  // from: logits or probabilities, mask or -1; sizes: n, whether probabilities, whether random,
                 // second slot (log-probability) or -1
  kGather,       // from: x, index
  kExplore,      // from: index, probability, mask or -1; sizes: n. With the probability, a uniform choice replaces it.
  kNormal,       // from: loc, scale; sizes: whether random, whether tanh, whether the log-probability is a sum, second
                 // slot or -1; numbers: low, high
};

enum class Binary : int { kAdd, kSubtract, kMultiply, kDivide, kMaximum, kMinimum };

enum class Dtype : int { kFloat32, kFloat64, kInt64, kInt32, kBool, kUint8 };

struct Operation {
  Kind kind;
  int to;
  std::vector<int> from;
  std::vector<std::int64_t> sizes;
  std::vector<double> numbers;
};

// The row of environment p and step t of a column is at data + p * part + t * step.
struct ColumnPlace {
  std::byte* data;
  std::int64_t part, step;
};

struct Output {
  int slot;
  Dtype dtype;
};

struct Weight {
  const float* data;
  std::int64_t count;
};

class ActorProgram {
 public:
  // Slot k has slot_sizes[k] floats. `num_inputs` columns and `num_weights` arrays are given later.
  ActorProgram(std::vector<std::int64_t> slot_sizes, std::vector<Operation> operations, std::vector<Output> outputs,
               int num_inputs, int num_weights);

  // Copies the weights, which may change afterwards without effect.
  void pack(const std::vector<Weight>& weights);

  // Reads and writes these columns from now on. Environments are numbered from `first` on; the first row is step
  // `step`.
  void bind(std::vector<ColumnPlace> inputs, std::vector<ColumnPlace> outputs, std::int64_t num_parts,
            std::int64_t num_steps, std::uint64_t key, std::uint64_t step, std::uint64_t first);

  // Computes row t and writes its outputs; false if torch has to compute it.
  bool act(std::int64_t t);

  // Multiplications of all dense layers in a call of `act`, for the bound columns.
  std::int64_t num_products() const { return num_products_ * num_parts_; }

  // The step after the last row that was computed.
  std::uint64_t next_step() const { return next_step_; }

 private:
  // The values of environment p are at data + p * stride. An input may be read where it is, instead of in `memory`.
  struct Slot {
    float* data;
    std::int64_t stride;
    float* memory;
  };

  Counter draw(std::size_t number, std::int64_t part, std::uint64_t step, std::uint32_t block = 0) const;
  bool run(std::size_t number, const Operation& op, std::int64_t t);
  void read(const Operation& op, std::int64_t t);
  void run_unary(const Operation& op);
  bool run_norm(const Operation& op);
  void run_binary(const Operation& op);
  void run_copy(const Operation& op);
  bool run_categorical(std::size_t number, const Operation& op, std::uint64_t step);
  bool run_explore(std::size_t number, const Operation& op, std::uint64_t step);
  bool run_normal(std::size_t number, const Operation& op, std::uint64_t step);
  void write(const Output& output, const ColumnPlace& place, std::int64_t t) const;
  float* at(int slot, std::int64_t part) {
    const Slot& found = slots_[static_cast<std::size_t>(slot)];
    return found.data + part * found.stride;
  }

  std::vector<std::int64_t> sizes_;
  std::vector<Operation> operations_;
  std::vector<Output> outputs_;
  int num_inputs_;
  std::vector<std::int64_t> weight_counts_;  // expected number of floats of each weight
  std::vector<std::vector<float>> packed_;   // by weight; the weights of dense layers are in panels
  std::vector<float> zeros_;                 // in place of absent biases
  std::int64_t num_products_ = 0;            // for one environment
  std::vector<Slot> slots_;
  std::vector<float> memory_;
  std::vector<ColumnPlace> inputs_, places_;
  std::int64_t num_parts_ = 0, num_steps_ = 0;
  bool is_packed_ = false, copies_inputs_ = false;
  std::uint64_t key_ = 0, step_ = 0, next_step_ = 0, first_ = 0;
};

}  // namespace gleanrl
