// Vectorised numerical loops, in the widest registers of the processor: eight doubles with AVX-512, two otherwise.
//
// Values.  Every width and every machine gives the same bits: lanes are independent, and the build forbids the compiler
//   to fuse products and sums (-ffp-contract=off).
// Threads. Plain functions over the caller's memory. Tests call `use_lanes` while no other call runs.
// Cost.    A power takes about 45 instructions per register, without branches or calls. One level of a search takes one
//   cache line for each item, and about 50 instructions per register.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gleanrl {

struct Kernels {
  // Doubles in a register.
  int lanes;

  // power[i] = (base[i] + add)^exponent, but 0 where base[i] + add is 0. Bases and `add` are at least 0, and their sum
  // is below 2^970; the result for other numbers is undefined. The relative error is below 10^-9. Powers are clamped to
  // [2^-1000, 2^1000]. `power` may be `base`.
  void (*powers)(const double* base, double add, double exponent, std::size_t n, double* power);

  // weight[i] = (value[i] / 2^one)^-beta, for positive values below 2^970; computed in double, then rounded once.
  void (*weights)(const double* value, double one, double beta, std::size_t n, float* weight);

  // The logarithm to base 2 of a positive number below 2^970. Error below 10^-11.
  double (*log2)(double value);

  // One level of n searches in a tree whose nodes are lines of eight children; children[8 k] is the first child of node
  // k. left[i] is the remaining mass to find in node index[i]. It is less than the sum of the children, up to rounding.
  // The call replaces index[i] by the selected child, and left[i] by the remaining mass in it, or with `leaves` by the
  // child's value. Only positive children are selected.
  void (*descend)(const double* children, bool leaves, std::int64_t* index, double* left, std::size_t n);

  // Whether a value is NaN or infinite: all bits of its exponent are set.
  bool (*any_nonfinite_float)(const float* values, std::size_t n);
  bool (*any_nonfinite_double)(const double* values, std::size_t n);
};

// The kernels for the widest registers of this processor.
const Kernels& kernels();

// Makes `kernels` return the kernels for `lanes` doubles in a register; false if this processor doesn't support them.
bool use_lanes(int lanes);

}  // namespace gleanrl
