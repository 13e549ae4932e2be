// Running counts and sums over consecutive rows.
//
// The addends are added one after the other, in order. So the results have the same bits as after adding row by row.
//
// Threads.  Plain functions over the caller's memory. The caller keeps it alive and unchanged during the call.
// Cost.     One pass over the rows, element by element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace gleanrl {

// Rows of an array: element e of row t is at data + t * step + elements[e].
struct RowGrid {
  std::byte* data = nullptr;
  std::int64_t step = 0;
  std::vector<std::int64_t> elements;

  template <class T>
  T get(std::int64_t t, std::size_t e) const {
    T value;
    std::memcpy(&value, data + t * step + elements[e], sizeof value);
    return value;
  }
  template <class T>
  void put(std::int64_t t, std::size_t e, T value) const {
    std::memcpy(data + t * step + elements[e], &value, sizeof value);
  }
};

// Adds an innermost dimension to a row: each element becomes `size` elements at a distance of `step` bytes.
inline void add_dimension(std::vector<std::int64_t>& elements, std::int64_t size, std::int64_t step) {
  std::vector<std::int64_t> more;
  for (const auto offset : elements) {
    for (std::int64_t i = 0; i < size; ++i) more.push_back(offset + i * step);
  }
  elements = std::move(more);
}

template <class T>
T sum_of(T one, T other) {
  if constexpr (std::is_integral_v<T>) {  // integers wrap around, as in torch; signed overflow would be undefined
    using Bits = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Bits>(static_cast<Bits>(one) + static_cast<Bits>(other)));
  } else {
    return one + other;
  }
}

// Writes n sums into the rows of `after` from `first` on, and into the rows of `roots` from first + 1 on. The initial
// value is row `first` of `roots`. Each step adds the addends' row; without addends it adds 1.
template <class T>
void run_on(const RowGrid& after, const RowGrid& roots, const RowGrid* addends, std::int64_t first, std::int64_t n) {
  for (std::size_t e = 0; e < roots.elements.size(); ++e) {
    T sum = roots.get<T>(first, e);
    for (std::int64_t t = first; t < first + n; ++t) {
      sum = sum_of(sum, addends == nullptr ? T{1} : addends->get<T>(t, e));
      after.put(t, e, sum);
      roots.put(t + 1, e, sum);
    }
  }
}

}  // namespace gleanrl
