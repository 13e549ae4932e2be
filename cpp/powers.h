// Logarithms and powers to base 2 of two doubles at once.
//
// Both functions have no branch and no conversion between integers and doubles (which the baseline has no vector
// instruction for): adding 2^52 puts an integer into a double's low bits. Each lane depends on its own argument alone.
// Threads.   Plain functions of their arguments.
// Cost.      Some 20 instructions each, no call of the mathematics library.
#pragma once

#include <bit>
#include <cstdint>

namespace gleanrl {

// Two of each in a register of the baseline. The compiler doesn't turn a scalar loop with bounds into these by itself.
using Pair = double __attribute__((vector_size(16)));
using PairBits = std::uint64_t __attribute__((vector_size(16)));

inline constexpr double kTwo52 = 0x1p52;
inline constexpr std::uint64_t kTwo52Bits = std::bit_cast<std::uint64_t>(kTwo52);
inline constexpr std::uint64_t kBias = 1023;

// The logarithm of positive finite x. Error below 10^-11.
inline Pair log2_of(Pair x) {
  constexpr std::uint64_t kRootHalf = std::bit_cast<std::uint64_t>(0x1.6a09e667f3bcdp-1);
  const auto bits = std::bit_cast<PairBits>(x * 0x1p54);  // no longer subnormal, still finite below 2^970
  const PairBits exponent = (bits - kRootHalf + (kBias << 52)) >> 52;
  const Pair mantissa = std::bit_cast<Pair>(bits - ((exponent - kBias) << 52));  // in [sqrt(1/2), sqrt(2))
  const Pair whole = std::bit_cast<Pair>(exponent | kTwo52Bits) - (kTwo52 + static_cast<double>(kBias) + 54.0);
  // log2 m = 2 / ln 2 * artanh((m - 1) / (m + 1))
  constexpr double kFactor = 2.885390081777927;
  const Pair t = (mantissa - 1.0) / (mantissa + 1.0), s = t * t;
  Pair series = s * (1.0 / 13) + 1.0 / 11;
  for (const double term : {1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) series = series * s + term;
  return whole + kFactor * t * series;
}

// 2^y; far outside float32's range it stops at 2^1000 or 2^-1000. Relative error below 10^-9.
inline Pair exp2_of(Pair y) {
  constexpr double kRound = 1.5 * kTwo52;
  constexpr Pair kMost{1000.0, 1000.0};
  y = y < kMost ? y : kMost;
  y = y > -kMost ? y : -kMost;
  const Pair shifted = y + kRound;  // the nearest integer stands in the low bits
  const Pair f = (y - (shifted - kRound)) * 0.6931471805599453;
  Pair series = f * (1.0 / 40320) + 1.0 / 5040;
  for (const double term : {1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0}) series = series * f + term;
  return std::bit_cast<Pair>(std::bit_cast<PairBits>(series) + (std::bit_cast<PairBits>(shifted) << 52));
}

}  // namespace gleanrl
