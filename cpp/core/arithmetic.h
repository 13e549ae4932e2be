// Arithmetic on the values of short rows, element by element.
//
// Results have the same bits as float32 or float64 arithmetic with each operation rounded. A float32 sum, product or
// quotient is computed in float64 and rounded once more. This gives the same bits, because float64 has more than twice
// the digits. The compiler can't fuse operations, because each is a separate iteration of a loop.
//
// Threads.  Plain functions over the caller's memory. The caller keeps it alive and unchanged during the call.
// Cost.     A few nanoseconds for each value and operation. For short rows a call of torch or NumPy costs more.
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
  FloatRows operand;  // a single row; it has no elements if the operation has no operand
  bool is_float;      // whether the result is float32; otherwise it is float64
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

// The result of all operations for element e of row t.
inline double mapped(const FloatRows& source, const std::vector<Operation>& operations, std::int64_t t, std::size_t e) {
  double value = source.get(t, e);
  for (const Operation& operation : operations) {
    value = applied(operation, value, e);
    if (operation.is_float) value = static_cast<float>(value);
  }
  return value;
}

}  // namespace gleanrl
