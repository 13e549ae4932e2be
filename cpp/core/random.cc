#include "random.h"

#include <bit>
#include <stdexcept>
#include <string>

namespace gleanrl {
namespace {

__extension__ using Wide = unsigned __int128;

}  // namespace

Random::Random(std::uint64_t seed) {
  for (std::uint64_t& word : state_) {  // splitmix64
    std::uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    word = z ^ (z >> 31);
  }
}

std::uint64_t Random::next() {
  const std::uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
  const std::uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

// The high word of high * x is uniform if the low words that occur too often are rejected (Lemire,
// https://arxiv.org/abs/1805.10941).
std::uint64_t Random::below(std::uint64_t high) {
  Wide product = static_cast<Wide>(next()) * high;
  if (static_cast<std::uint64_t>(product) < high) [[unlikely]] {
    const std::uint64_t surplus = (0 - high) % high;
    while (static_cast<std::uint64_t>(product) < surplus) product = static_cast<Wide>(next()) * high;
  }
  return static_cast<std::uint64_t>(product >> 64);
}

void Random::uniforms(double* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(next() >> 11) * 0x1p-53;
}

void Random::integers(std::int64_t high, std::int64_t* out, std::int64_t n) {
  if (high < 1) throw std::invalid_argument("integers: expected a bound of 1 or more, got " + std::to_string(high));
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high)));
}

void Random::permutation(std::int64_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    // At this point out[0:i] holds the numbers below i in random order.
    const auto j = static_cast<std::int64_t>(below(static_cast<std::uint64_t>(i) + 1));
    out[i] = out[j];
    out[j] = i;
  }
}

void Random::set_state(const State& state) {
  if (state == State{}) throw std::invalid_argument("state: expected four numbers that aren't all 0");
  state_ = state;
}

}  // namespace gleanrl
