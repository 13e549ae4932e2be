// Conversion between one-hot rows and the positions of their ones.
//
// Threads.   Plain functions over the caller's memory; the caller keeps it alive and unchanged during the call.
// Floats.    Items are compared by their bits: -0.0 and NaN aren't zero.
// Cost.      One pass over the rows.
#pragma once

#include <cstdint>

namespace gleanrl {

// Sets positions[i] to the position of the single `one` in row i, for n rows of `width` items. Returns false if a row
// isn't one-hot.
template <class Item>
bool find_ones(const Item* rows, std::int64_t n, std::int64_t width, Item one, std::int64_t* positions) {
  for (std::int64_t i = 0; i < n; ++i, rows += width) {
    std::int64_t found = -1;
    for (std::int64_t j = 0; j < width; ++j) {
      if (rows[j] == 0) continue;
      if (rows[j] != one || found >= 0) return false;
      found = j;
    }
    if (found < 0) return false;
    positions[i] = found;
  }
  return true;
}

// Fills n rows of `width` items: `one` at positions[i] of row i, and zeros elsewhere. Returns false and writes nothing
// if a position is outside the row.
template <class Item>
bool put_ones(const std::int64_t* positions, std::int64_t n, std::int64_t width, Item one, Item* rows) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (positions[i] < 0 || positions[i] >= width) return false;
  }
  for (std::int64_t i = 0; i < n; ++i, rows += width) {
    for (std::int64_t j = 0; j < width; ++j) rows[j] = 0;
    rows[positions[i]] = one;
  }
  return true;
}

}  // namespace gleanrl
