// Argument checks shared by several classes, and the format of numbers in their messages.
//
// Failure. std::out_of_range for a row, std::invalid_argument for any other value; the message names the call, the
//   value and its position.
// Cost.    One pass without a branch, which the compiler vectorises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>

namespace gleanrl {

// The text of a double with enough digits to identify it.
inline std::string text_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

// Checks that all rows are in [0, limit). With skip_minus_one a row may also be -1.
inline void check_rows(const char* call, std::span<const std::int64_t> index, std::int64_t limit,
                       bool skip_minus_one = false) {
  // As unsigned numbers, negative rows are large. With the shift, -1 becomes 0, which is below the bound.
  const auto shift = static_cast<std::uint64_t>(skip_minus_one);
  const auto bound = static_cast<std::uint64_t>(limit) + shift;
  const auto bad = [=](std::int64_t row) { return static_cast<std::uint64_t>(row) + shift >= bound; };
  bool any = false;
  for (const std::int64_t row : index) any |= bad(row);
  if (!any) return;
  const auto found = std::find_if(index.begin(), index.end(), bad);
  throw std::out_of_range(std::string(call) + ": row " + std::to_string(*found) + " at position " +
                          std::to_string(found - index.begin()) + " of " + std::to_string(index.size()) +
                          " is outside the rows [0, " + std::to_string(limit) + ")");
}

// Checks the random numbers of a draw.
inline void check_uniforms(std::span<const double> uniform) {
  // NaN fails both comparisons. "&" instead of "&&" keeps branches out of loops.
  const auto legal = [](double u) { return (u >= 0.0) & (u < 1.0); };
  bool all = true;
  for (const double u : uniform) all &= legal(u);
  if (all) return;
  const auto found = std::find_if_not(uniform.begin(), uniform.end(), legal);
  throw std::invalid_argument("draw: expected uniforms in [0, 1), got " + text_of(*found) + " at position " +
                              std::to_string(found - uniform.begin()) + " of " + std::to_string(uniform.size()));
}

}  // namespace gleanrl
