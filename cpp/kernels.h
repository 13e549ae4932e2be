// Loops over numbers in the widest registers that the processor has: two in each everywhere, eight with AVX-512.
//
// Values.  The same bits from every width, and on every machine: lanes don't see each other, and the build keeps the
//   compiler from fusing products and sums (-ffp-contract=off).
// Threads. Plain functions over the caller's memory. `use_lanes` is for tests, while nothing else runs.
// Cost.    A power takes some 45 instructions a register, without a branch or a call; one level of a search a line of
//   the cache for each item, and some 50 instructions a register.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gleanrl {

struct Kernels {
  // Doubles in a register.
  int lanes;

  // power[i] = (base[i] + add)^exponent, but 0 where base[i] + add is 0; for bases and `add` of 0 or more, together below
  // 2^970, of other ones the result means nothing. Relative error below 10^-9; far outside float32's range they stop at
  // 2^1000 and 2^-1000. `power` may be `base`.
  void (*powers)(const double* base, double add, double exponent, std::size_t n, double* power);

  // weight[i] = (value[i] / 2^one)^-beta, for positive values below 2^970; computed in double, then rounded once.
  void (*weights)(const double* value, double one, double beta, std::size_t n, float* weight);

  // The logarithm to base 2 of a positive number below 2^970. Error below 10^-11.
  double (*log2)(double value);

  // One level of n searches in a tree whose nodes are lines of eight children: children[8 k] is the first child of node k.
  // left[i] is the mass that is left to find in node index[i], less than its children add up to but for rounding; they
  // become child and mass, or with `leaves` the child's value. Only positive children are entered.
  void (*descend)(const double* children, bool leaves, std::int64_t* index, double* left, std::size_t n);

  // Whether one of the values is NaN or infinite: has all bits of its exponent set.
  bool (*any_nonfinite_float)(const float* values, std::size_t n);
  bool (*any_nonfinite_double)(const double* values, std::size_t n);
};

// Those of the widest registers.
const Kernels& kernels();

// Makes `kernels` return those of so many lanes; false if this processor hasn't so many.
bool use_lanes(int lanes);

}  // namespace gleanrl
