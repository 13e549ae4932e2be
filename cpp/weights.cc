#include "weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gleanrl {
namespace {

using std::size_t;
using std::uint64_t;

// Two of each in a register of the baseline. The compiler doesn't turn a scalar loop with bounds into these by itself.
using Pair = double __attribute__((vector_size(16)));
using PairBits = uint64_t __attribute__((vector_size(16)));

constexpr double kTwo52 = 0x1p52;
constexpr uint64_t kTwo52Bits = std::bit_cast<uint64_t>(kTwo52);
constexpr uint64_t kBias = 1023;

// Both functions below have no branch and no conversion between integers and doubles (which the baseline has no
// vector instruction for): adding 2^52 puts an integer into a double's low bits.

// The logarithm of positive finite x. Error below 10^-11.
inline Pair log2_of(Pair x) {
  constexpr uint64_t kRootHalf = std::bit_cast<uint64_t>(0x1.6a09e667f3bcdp-1);
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

// "&", not "&&": a loop over it has no branch.
bool is_positive(double value) { return (value > 0.0) & (value <= 0x1p960); }

}  // namespace

void importance_weights(std::span<const double> priority, double scale, double beta, bool normalise, float* weights) {
  if (!(scale > 0.0) || !std::isfinite(scale)) {
    throw std::invalid_argument("weights: expected a positive finite scale, got " + std::to_string(scale));
  }
  if (!(beta >= 0.0) || !std::isfinite(beta)) {
    throw std::invalid_argument("weights: expected a finite beta of 0 or more, got " + std::to_string(beta));
  }
  bool all = true;
  for (const double p : priority) all &= is_positive(p);
  if (!all) {
    const auto found = std::find_if_not(priority.begin(), priority.end(), is_positive);
    throw std::invalid_argument("weights: expected positive priorities of at most 2^960, got " +
                                std::to_string(*found) + " at position " + std::to_string(found - priority.begin()) +
                                " of " + std::to_string(priority.size()));
  }
  if (priority.empty()) return;
  // The logarithm of the priority whose weight is 1.
  double one = -std::log2(scale);
  if (normalise) {
    const double lowest = *std::min_element(priority.begin(), priority.end());
    one = log2_of(Pair{lowest, lowest})[0];
  }
  const auto weigh = [&](double a, double b) { return exp2_of(-beta * (log2_of(Pair{a, b}) - one)); };
  const size_t even = priority.size() / 2 * 2;
  for (size_t i = 0; i < even; i += 2) {
    const Pair pair = weigh(priority[i], priority[i + 1]);
    weights[i] = static_cast<float>(pair[0]);
    weights[i + 1] = static_cast<float>(pair[1]);
  }
  if (even < priority.size()) weights[even] = static_cast<float>(weigh(priority[even], priority[even])[0]);
}

}  // namespace gleanrl
