#include "finite.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace gleanrl {
namespace {

using std::int64_t;

// Long enough for wide registers, and short enough that the second pass over a block with a hit costs nearly nothing.
constexpr int64_t kBlock = 1024;

// The first position in a block. `any` tests all values of a block together; only a block with a hit is searched.
template <class Float>
int64_t scan(const Float* values, int64_t n, bool (*any)(const Float*, std::size_t)) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    if (!any(values + begin, static_cast<std::size_t>(end - begin))) continue;
    return std::find_if(values + begin, values + end, [any](const Float& value) { return any(&value, 1); }) - values;
  }
  return -1;
}

// Signed overflow is undefined, so the addition uses unsigned numbers. C++20 defines the conversion back.
void add_one(int64_t& counter) { counter = static_cast<int64_t>(static_cast<std::uint64_t>(counter) + 1); }

}  // namespace

int64_t first_nonfinite(const float* values, int64_t n) { return scan(values, n, kernels().any_nonfinite_float); }

int64_t first_nonfinite(const double* values, int64_t n) { return scan(values, n, kernels().any_nonfinite_double); }

void bump(int64_t* counters, int64_t start, int64_t n, int64_t num_rows) {
  if (n < 0 || n > num_rows) {
    throw std::invalid_argument("bump: expected 0 to num_rows rows, " + std::to_string(num_rows) + ", got " +
                                std::to_string(n));
  }
  if (n == 0) return;
  if (start < 0 || start >= num_rows) {
    throw std::out_of_range("bump: start " + std::to_string(start) + " is outside the rows [0, " +
                            std::to_string(num_rows) + ")");
  }
  const int64_t head = std::min(n, num_rows - start);
  std::for_each_n(counters + start, head, add_one);
  std::for_each_n(counters, n - head, add_one);
}

void bump_at(int64_t* counters, const int64_t* index, int64_t n, int64_t num_rows) {
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= num_rows) {
      throw std::out_of_range("bump_at: row " + std::to_string(index[i]) + " at position " + std::to_string(i) +
                              " of " + std::to_string(n) + " is outside the rows [0, " + std::to_string(num_rows) +
                              ")");
    }
  }
  for (int64_t i = 0; i < n; ++i) add_one(counters[index[i]]);
}

}  // namespace gleanrl
