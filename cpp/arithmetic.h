// Arithmetic on the values of a row, a few of them at a time.
//
// What comes out is bit for bit what float32 or float64 arithmetic gives, one operation after the other, each rounded: a
// float32 sum, product or quotient is that of float64, rounded once more, since float64 has more than twice its digits.
// No operation is fused with the next: each is a turn of a loop.
//
// Threads.  Plain functions over the caller's memory; the caller keeps it alive and unchanged during the call.
// Cost.     Some nanoseconds for each value and operation: for rows of few values, where a call of anything costs more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "running.h"

namespace gleanrl {

enum class Arithmetic { kAdd, kSubtract, kMultiply, kDivide, kConvert };

// Rows of float32 or float64.
struct FloatRows {
  RowGrid grid;
  bool is_float;

  double get(std::int64_t t, std::size_t e) const { return is_float ? grid.get<float>(t, e) : grid.get<double>(t, e); }
  void put(std::int64_t t, std::size_t e, double value) const {
    if (is_float) {
      grid.put(t, e, static_cast<float>(value));
    } else {
      grid.put(t, e, value);
    }
  }
};

struct Operation {
  Arithmetic what;
  FloatRows operand;  // a single row; without elements where there is none
  bool is_float;      // whether what comes out is float32; if not, it's float64
};

inline double applied(const Operation& operation, double value, std::size_t e) {
  switch (operation.what) {
    case Arithmetic::kAdd:
      return value + operation.operand.get(0, e);
    case Arithmetic::kSubtract:
      return value - operation.operand.get(0, e);
    case Arithmetic::kMultiply:
      return value * operation.operand.get(0, e);
    case Arithmetic::kDivide:
      return value / operation.operand.get(0, e);
    case Arithmetic::kConvert:
      break;
  }
  return value;
}

// What comes of element e of row t.
inline double mapped(const FloatRows& source, const std::vector<Operation>& operations, std::int64_t t, std::size_t e) {
  double value = source.get(t, e);
  for (const Operation& operation : operations) {
    value = applied(operation, value, e);
    if (operation.is_float) value = static_cast<float>(value);
  }
  return value;
}

}  // namespace gleanrl
