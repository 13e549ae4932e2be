// Search for NaN and infinity, and updates of a ring's write counters.
//
// Threads.  Plain functions over the caller's memory; the caller keeps it alive and unchanged during the call.
// Floats.   A number isn't finite if all bits of its exponent are ones. The test uses the bits, so it raises no
//   floating-point flag, finds signalling NaNs, and doesn't depend on compiler options for floats.
// Cost.     One pass at the speed of memory; the scan stops at the first block with a hit.
#pragma once

#include <cstdint>

namespace gleanrl {

// The position of the first NaN or infinity in values[0, n), or -1.
std::int64_t first_nonfinite(const float* values, std::int64_t n);
std::int64_t first_nonfinite(const double* values, std::int64_t n);

// Adds 1 to counters[(start + i) % num_rows] for i in [0, n). Counters wrap from 2^63 - 1 to -2^63.
// start in [0, num_rows), n <= num_rows; std::out_of_range or std::invalid_argument before anything is written.
void bump(std::int64_t* counters, std::int64_t start, std::int64_t n, std::int64_t num_rows);

// Adds 1 to counters[index[i]] for i in [0, n); a repeated row number counts each time. Row numbers are in
// [0, num_rows); otherwise std::out_of_range, before anything is written.
void bump_at(std::int64_t* counters, const std::int64_t* index, std::int64_t n, std::int64_t num_rows);

}  // namespace gleanrl
