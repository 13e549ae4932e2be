// The random generator of a sampler: xoshiro256++, seeded by splitmix64 (Blackman and Vigna, https://prng.di.unimi.it).
// Its period is 2^256 - 1, and its sequence is the same on every machine.
//
// Draws.   Each uniform uses one number of the generator. Integers and permutations are exactly uniform. The sequence
//   doesn't depend on the number of values that a call draws.
// State.   Four 64-bit numbers, not all zero.
// Failure. std::invalid_argument, before anything is drawn or written.
// Threads. The generator takes no lock: only one call at a time.
// Cost.    About one nanosecond per number, two for an integer.
#pragma once

#include <array>
#include <cstdint>

namespace gleanrl {

class Random {
 public:
  using State = std::array<std::uint64_t, 4>;

  explicit Random(std::uint64_t seed);

  // out[i] in [0, 1), a multiple of 2^-53.
  void uniforms(double* out, std::int64_t n);
  // out[i] in [0, high), high >= 1.
  void integers(std::int64_t high, std::int64_t* out, std::int64_t n);
  // The numbers of [0, n) in random order.
  void permutation(std::int64_t* out, std::int64_t n);

  const State& state() const { return state_; }
  void set_state(const State& state);

 private:
  std::uint64_t next();
  std::uint64_t below(std::uint64_t high);

  State state_;
};

}  // namespace gleanrl
