#include "columns.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

// Rows up to this size have specialised kernels. 16 floats cover the observations of classic control environments.
constexpr size_t kFixedBytes = 64;

constexpr size_t kLine = 64;
// The number of cache lines that are prefetched ahead of the copy, and the largest number for one row.
constexpr size_t kLinesAhead = 128, kLinesOfRow = 64;

// The number of rows that are prefetched ahead of the copied row.
int64_t rows_ahead(size_t row_bytes) {
  const size_t lines = std::clamp((row_bytes + kLine - 1) / kLine, size_t{1}, kLinesOfRow);
  return static_cast<int64_t>(kLinesAhead / lines);
}

// Prefetches a row into the L2 cache. L1 can have far fewer misses in flight, and more prefetches would stall. The
// function is always inlined: GCC considers a function that only prefetches to have no effect, and drops the call.
[[gnu::always_inline]] inline void ask_for(const std::byte* row, size_t row_bytes) {
  const size_t bytes = std::min(row_bytes, kLinesOfRow * kLine);
  for (size_t b = 0; b < bytes; b += kLine) __builtin_prefetch(row + b, 0, 2);
  // A row that doesn't begin at a cache line may extend into one more line.
  if (kLine % bytes != 0) __builtin_prefetch(row + bytes - 1, 0, 2);
}

// kTake: to[i] = from[index[i]].  kTakeAhead: the same, with a prefetch of row index[i + ahead].
// kPlace: to[index[i]] = from[i].
enum class Way { kTake, kTakeAhead, kPlace };

template <Way way>
[[gnu::always_inline]] inline void copy_rows(std::byte* to, const std::byte* from, const int64_t* index, int64_t n,
                                             size_t row_bytes, int64_t ahead) {
  for (int64_t i = 0; i < n; ++i) {
    const size_t row = static_cast<size_t>(index[i]) * row_bytes;
    const size_t step = static_cast<size_t>(i) * row_bytes;
    if constexpr (way == Way::kTakeAhead) {
      ask_for(from + static_cast<size_t>(index[i + ahead]) * row_bytes, row_bytes);
    }
    if constexpr (way == Way::kPlace) {
      std::memcpy(to + row, from + step, row_bytes);
    } else {
      std::memcpy(to + step, from + row, row_bytes);
    }
  }
}

template <Way way, size_t kBytes>
void copy_fixed(std::byte* to, const std::byte* from, const int64_t* index, int64_t n, size_t, int64_t ahead) {
  copy_rows<way>(to, from, index, n, kBytes, ahead);
}

template <Way way>
void copy_any(std::byte* to, const std::byte* from, const int64_t* index, int64_t n, size_t row_bytes, int64_t ahead) {
  copy_rows<way>(to, from, index, n, row_bytes, ahead);
}

void copy_nothing(std::byte*, const std::byte*, const int64_t*, int64_t, size_t, int64_t) {}

using Kernel = void (*)(std::byte*, const std::byte*, const int64_t*, int64_t, size_t, int64_t);

// kernels[b] copies rows of b bytes: a specialised kernel for 1, 2, 3 and multiples of 4, else the general one.
template <Way way, size_t... b>
constexpr std::array<Kernel, sizeof...(b)> make_kernels(std::index_sequence<b...>) {
  return {(b == 0 ? &copy_nothing : (b < 4 || b % 4 == 0) ? &copy_fixed<way, b> : &copy_any<way>)...};
}

template <Way way>
Kernel kernel_for(int64_t row_bytes) {
  static constexpr auto kernels = make_kernels<way>(std::make_index_sequence<kFixedBytes + 1>());
  return row_bytes <= static_cast<int64_t>(kFixedBytes) ? kernels[static_cast<size_t>(row_bytes)] : &copy_any<way>;
}

template <class Pointer>
void check_arrays(const char* call, std::span<const Pointer> arrays, size_t expected) {
  if (arrays.size() != expected) {
    throw std::invalid_argument(std::string(call) + ": expected one array per column, " + std::to_string(expected) +
                                ", got " + std::to_string(arrays.size()));
  }
}

template <class Pointer>
void check_not_null(const char* call, Pointer array, int64_t row_bytes, size_t position) {
  if (array == nullptr && row_bytes > 0) {
    throw std::invalid_argument(std::string(call) + ": array " + std::to_string(position) + " has a null address");
  }
}

void check_index_number(int64_t number, size_t count) {
  if (number < 0 || static_cast<size_t>(number) >= count) {
    throw std::out_of_range("gather: index array " + std::to_string(number) + " doesn't exist, there are " +
                            std::to_string(count));
  }
}

}  // namespace

Columns::Columns(std::vector<std::byte*> bases, std::vector<int64_t> row_bytes, int64_t num_rows)
    : num_rows_(num_rows) {
  if (bases.size() != row_bytes.size()) {
    throw std::invalid_argument("Columns: expected as many row sizes as addresses, " + std::to_string(bases.size()) +
                                ", got " + std::to_string(row_bytes.size()));
  }
  if (num_rows < 0) throw std::invalid_argument("Columns: num_rows is negative: " + std::to_string(num_rows));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  columns_.reserve(bases.size());
  for (size_t j = 0; j < bases.size(); ++j) {
    const int64_t bytes = row_bytes[j];
    const std::string name = "Columns: column " + std::to_string(j);
    if (bytes < 0) throw std::invalid_argument(name + " has a negative row size: " + std::to_string(bytes));
    if (bytes > 0 && num_rows > kMost / bytes) {
      throw std::invalid_argument(name + " doesn't fit the address space: " + std::to_string(num_rows) + " rows of " +
                                  std::to_string(bytes) + " bytes");
    }
    if (bases[j] == nullptr && bytes > 0 && num_rows > 0) throw std::invalid_argument(name + " has a null address");
    if (bytes > kMost - bytes_per_row_) throw std::invalid_argument(name + " makes a row too long for 64 bits");
    bytes_per_row_ += bytes;
    all_leaves_.push_back({static_cast<int64_t>(j), 0});
    columns_.push_back({bases[j], bytes, rows_ahead(static_cast<size_t>(bytes)), kernel_for<Way::kTake>(bytes),
                        kernel_for<Way::kTakeAhead>(bytes), kernel_for<Way::kPlace>(bytes)});
  }
}

const Columns::Column& Columns::column(int64_t number) const {
  if (number < 0 || static_cast<size_t>(number) >= columns_.size()) {
    throw std::out_of_range("gather: column " + std::to_string(number) + " doesn't exist, there are " +
                            std::to_string(columns_.size()));
  }
  return columns_[static_cast<size_t>(number)];
}

int64_t Columns::bytes_per_row(std::span<const Leaf> leaves) const {
  int64_t bytes = 0;
  for (const Leaf leaf : leaves) bytes += column(leaf.column).row_bytes;
  return bytes;
}

void Columns::gather(std::span<const Index> indices, std::span<std::byte* const> out,
                     std::span<const Leaf> leaves) const {
  check_arrays<std::byte*>("gather", out, leaves.size());
  const auto n = static_cast<int64_t>(indices.empty() ? 0 : indices[0].size());
  for (size_t p = 0; p < out.size(); ++p) {
    const Column& c = column(leaves[p].column);
    if (n > 0) check_not_null("gather", out[p], c.row_bytes, p);
    check_index_number(leaves[p].index, indices.size());
  }
  for (const Index index : indices) {
    if (static_cast<int64_t>(index.size()) != n) throw std::invalid_argument("gather: index arrays differ in length");
    check_rows("gather", index, num_rows_);
  }
  // The first rows of a leaf are prefetched before the copy of the previous leaf has ended.
  const auto ask_for_first = [&](size_t p) {
    if (p == out.size()) return;
    const Column& c = column(leaves[p].column);
    if (c.row_bytes == 0) return;
    const auto bytes = static_cast<size_t>(c.row_bytes);
    const Index index = indices[static_cast<size_t>(leaves[p].index)];
    for (int64_t i = 0; i < std::min(n, c.ahead); ++i) ask_for(c.base + static_cast<size_t>(index[i]) * bytes, bytes);
  };
  ask_for_first(0);
  for (size_t p = 0; p < out.size(); ++p) {
    const Column& c = column(leaves[p].column);
    const int64_t* index = indices[static_cast<size_t>(leaves[p].index)].data();
    const auto bytes = static_cast<size_t>(c.row_bytes);
    const int64_t first = std::max<int64_t>(n - c.ahead, 0);
    c.take_ahead(out[p], c.base, index, first, bytes, c.ahead);
    ask_for_first(p + 1);
    c.take(out[p] + first * c.row_bytes, c.base, index + first, n - first, bytes, 0);
  }
}

void Columns::write(int64_t start, int64_t n, std::span<const std::byte* const> src) const {
  check_arrays<const std::byte*>("write", src, columns_.size());
  if (n < 0 || n > num_rows_) {
    throw std::invalid_argument("write: expected 0 to num_rows rows, " + std::to_string(num_rows_) + ", got " +
                                std::to_string(n));
  }
  if (n == 0) return;
  if (start < 0 || start >= num_rows_) {
    throw std::out_of_range("write: start " + std::to_string(start) + " is outside the rows [0, " +
                            std::to_string(num_rows_) + ")");
  }
  for (size_t j = 0; j < src.size(); ++j) check_not_null("write", src[j], columns_[j].row_bytes, j);

  const int64_t head = std::min(n, num_rows_ - start);
  for (size_t j = 0; j < src.size(); ++j) {
    const Column& c = columns_[j];
    if (c.row_bytes == 0) continue;
    std::memcpy(c.base + start * c.row_bytes, src[j], static_cast<size_t>(head * c.row_bytes));
    std::memcpy(c.base, src[j] + head * c.row_bytes, static_cast<size_t>((n - head) * c.row_bytes));
  }
}

void Columns::put(Index index, std::span<const std::byte* const> src) const {
  check_arrays<const std::byte*>("put", src, columns_.size());
  if (index.empty()) return;
  for (size_t j = 0; j < src.size(); ++j) check_not_null("put", src[j], columns_[j].row_bytes, j);
  check_rows("put", index, num_rows_);
  for (size_t j = 0; j < src.size(); ++j) {
    const Column& c = columns_[j];
    c.place(c.base, src[j], index.data(), static_cast<int64_t>(index.size()), static_cast<size_t>(c.row_bytes), 0);
  }
}

}  // namespace gleanrl
