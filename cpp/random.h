// A random generator that a sampler owns: xoshiro256++, seeded by splitmix64 (Blackman and Vigna,
// https://prng.di.unimi.it). Period 2^256 - 1; the sequence is the same on every machine.
//
// Draws.   Each uniform takes one number of the generator. Integers are exactly uniform; a permutation is too.
//   The sequence doesn't depend on how many numbers a call asks for.
// State.   Four 64-bit numbers, not all zero.
// Failure. std::invalid_argument before anything is drawn or written.
// Threads. Nothing is locked here: one call at a time.
// Cost.    About a nanosecond a number, two for an integer.
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
