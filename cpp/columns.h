// Registered columns: copy many leaves of a storage in one call.
//
// A Columns object remembers where k columns of `num_rows` rows live: for each its first byte and the bytes of one
// row, rows back to back. It owns no memory and knows no dtype: bytes and row numbers in, bytes out.
//
// Leaves.    What is gathered is a list of leaves: each names the column that its rows stand in, and which of the
//   call's index arrays picks them. Mostly a leaf is a column, read at the one index array that there is. A column
//   that several leaves share is stored once: an observation and the one after it are one column, read at two
//   index arrays, (slots) and (the slots after them). The core doesn't know what an index array means.
// Lifetime.  The caller keeps the memory behind every address alive and in place for as long as the object is used.
//   Nothing here can check an address.
// Threads.   The object never changes after construction, so any number of threads may call it at once. It locks
//   nothing: a caller who writes rows while another thread gathers the same rows gets torn rows, and guards against
//   it (generations, checked after the gather). The arrays of one call (index, out, src) belong to that call until
//   it returns; an index array that another thread changes meanwhile defeats the range check.
// Overlap.   Destinations overlap neither their sources nor each other.
// Failure.   Every argument is checked before the first byte is written; a call that throws has changed nothing.
//   std::out_of_range for a row number outside its range, std::invalid_argument for everything else.
// Duplicates. gather may repeat a row or a column. put with a repeated row number: the last one wins, in every column alike.
// Cost.      gather: one pass over an index array per leaf. Rows are asked for 128 cache lines ahead, across the ends of
//   leaves, so that as many misses overlap as the processor can have on their way. write: at most two memcpy per column. Checking n row numbers costs about 0.1 ns each.
//   A call runs on its caller's thread alone: with a helper thread, 14 MB of long rows were gathered 1.4 times as
//   fast on two idle cores, and 6 times as slowly (median) beside two busy processes, when the call had to wait for
//   a helper that wasn't scheduled. Sampling beside busy environment workers is the usual case.
// Floats.    Rows are bytes: NaN payloads and signed zeros arrive bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gleanrl {

class Columns {
 public:
  // bases[j] is the address of column j, row_bytes[j] >= 0 the size of its rows. A column with empty rows is legal
  // and costs nothing. Throws std::invalid_argument when the lengths differ, a size is negative, a column would
  // not fit the address space, or an address is null although its column has bytes.
  Columns(std::vector<std::byte*> bases, std::vector<std::int64_t> row_bytes, std::int64_t num_rows);

  // Rows of one column, at the row numbers of one of a call's index arrays.
  struct Leaf {
    std::int64_t column;
    std::int64_t index;
  };
  using Index = std::span<const std::int64_t>;

  std::size_t num_columns() const { return columns_.size(); }
  std::int64_t num_rows() const { return num_rows_; }
  // Every column in order, each at the first index array.
  std::span<const Leaf> all_leaves() const { return all_leaves_; }
  // The bytes of one row of all columns together.
  std::int64_t bytes_per_row() const { return bytes_per_row_; }
  // The bytes of one row of `leaves`. Throws like gather for a column that doesn't exist.
  std::int64_t bytes_per_row(std::span<const Leaf> leaves) const;

  // out[p][i] = column leaves[p].column at row indices[leaves[p].index][i], for i in [0, n). All index arrays have n
  // row numbers, in [0, num_rows). Leaves may come in any order and repeat.
  void gather(std::span<const Index> indices, std::span<std::byte* const> out, std::span<const Leaf> leaves) const;

  // Row (start + i) % num_rows of column j = src[j][i], for i in [0, n): a ring write. start in [0, num_rows),
  // n <= num_rows (a longer batch would overwrite itself: the caller cuts it and so decides what is lost).
  void write(std::int64_t start, std::int64_t n, std::span<const std::byte* const> src) const;

  // Row index[i] of column j = src[j][i], for i in [0, n), in that order. Row numbers lie in [0, num_rows).
  void put(Index index, std::span<const std::byte* const> src) const;

 private:
  // One kernel per row size, chosen once: fixed sizes become one or two moves instead of a call of memcpy.
  using RowCopy = void (*)(std::byte* to, const std::byte* from, const std::int64_t* index, std::int64_t n,
                           std::size_t row_bytes, std::int64_t ahead);
  struct Column {
    std::byte* base;
    std::int64_t row_bytes;
    std::int64_t ahead;  // rows asked for ahead of the copy
    RowCopy take;
    RowCopy take_ahead;
    RowCopy place;
  };

  const Column& column(std::int64_t number) const;

  std::vector<Column> columns_;
  std::vector<Leaf> all_leaves_;
  std::int64_t num_rows_;
  std::int64_t bytes_per_row_ = 0;
};

}  // namespace gleanrl
