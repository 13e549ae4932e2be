// Layers of small neural networks on rows of float32, in the widest registers of the processor.
//
// Values.  Every width, every batch size and every machine gives the same bits: a sum runs over its inputs in their
//   order, lanes are independent, and the build forbids the compiler to fuse products and sums (-ffp-contract=off).
//   Exceptions are the logarithm, the square root, softplus and the error function, which come from the C library.
// Threads. Plain functions over the caller's memory. Tests call `use_layer_width` while no other call runs.
// Cost.    A dense layer takes one multiplication and one addition per weight and register; a hyperbolic tangent about
//   40 instructions per register.
#pragma once

#include <cstddef>

namespace gleanrl {

// Functions of one number. `a` and `b` are the parameters of the function.
enum class Unary : int {
  kTanh,
  kRelu,
  kLeakyRelu,  // slope a
  kElu,        // scale a
  kSilu,
  kGelu,      // exact, with the error function
  kGeluTanh,  // the approximation with the hyperbolic tangent
  kSigmoid,
  kSoftplus,  // beta a, threshold b
  kExp,
  kLog,
  kAbs,
  kSqrt,
  kNegate,
  kAtLeast,       // max(x, a); NaN stays
  kAtMost,        // min(x, a); NaN stays
  kAdd,           // x + a
  kMultiply,      // x * a
  kDivide,        // x / a
  kSubtractFrom,  // a - x
  kDivideInto,    // a / x
};
inline constexpr int kNumUnary = static_cast<int>(Unary::kDivideInto) + 1;

// Outputs of a dense layer that are computed together. Packed weights are padded to a multiple of it.
inline constexpr std::size_t kPanel = 16;

inline std::size_t padded(std::size_t outputs) { return (outputs + kPanel - 1) / kPanel * kPanel; }

struct Layers {
  int width;  // floats in a register

  // Packs the weights of a dense layer, [out, in] with contiguous rows, into padded(out) * in floats.
  void (*pack)(const float* weight, std::size_t in, std::size_t out, float* packed);

  // y[row] = W x[row] + bias for `rows` rows that begin x_stride and y_stride floats apart. `bias` has padded(out)
  // floats. x and y don't overlap.
  void (*dense)(const float* packed, const float* bias, std::size_t in, std::size_t out, const float* x,
                std::size_t x_stride, float* y, std::size_t y_stride, std::size_t rows);

  // y[i] = f(x[i]); y may be x.
  void (*unary)(Unary kind, float a, float b, const float* x, std::size_t n, float* y);
};

// The layers for the widest registers of this processor.
const Layers& layers();

// Makes `layers` return the layers for `width` floats in a register (4, 8 or 16); false if this processor doesn't
// support them.
bool use_layer_width(int width);

}  // namespace gleanrl
