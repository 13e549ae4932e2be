// Columns of a storage: gather, write and put rows of many columns in one call.
//
// A Columns object stores the addresses of k columns of `num_rows` contiguous rows, and the row size of each column. It
// owns no memory and knows no dtypes: it copies bytes at row numbers.
//
// Leaves.    A gather takes a list of leaves. Each leaf names a column, and one of the call's index arrays, which
//   selects the rows. Usually each leaf is a column, and all use the same index array. Several leaves may share a
//   column: an observation and the next observation are one column, read at the slots and at the slots after them. The
//   core doesn't know the meaning of an index array.
// Lifetime.  The caller keeps the memory at every address alive and in place while the object is used. The object can't
//   check an address.
// Threads.   The object never changes after construction, so any number of threads may call it at once. It takes no
//   lock. If one thread writes rows while another gathers them, the gathered rows may be torn; callers detect this by
//   comparing generations after the gather. Other threads must not change the arrays of a call (index, out, src) until
//   it returns: a changed index would bypass the range check.
// Overlap.   Destinations overlap neither their sources nor each other.
// Failure.   Every argument is checked before the first byte is written. A call that throws has changed nothing.
//   std::out_of_range for a row number outside its range, std::invalid_argument for all other errors.
// Duplicates. gather may repeat a row or a column. If put gets a row number twice, the last one wins in every column.
// Cost.      gather: one pass over an index array per leaf. Rows are prefetched 128 cache lines ahead, also across the
//   end of a leaf, so that as many cache misses overlap as the processor allows. write: at most two memcpy per column.
//   Checking a row number costs about 0.1 ns. A call uses only its caller's thread. With a helper thread, a gather of
//   14 MB of long rows was 1.4 times as fast on two idle cores. But it was 6 times as slow (median) next to two busy
//   processes, because the call had to wait for a helper that wasn't scheduled. Sampling next to busy environment
//   workers is the usual case.
// Floats.    Rows are copied as bytes: NaN payloads and signed zeros are preserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gleanrl {

class Columns {
 public:
  // bases[j] is the address of column j, and row_bytes[j] >= 0 is the size of its rows. A column with empty rows is
  // allowed and costs nothing. Throws std::invalid_argument if the lengths differ, a size is negative, a column doesn't
  // fit the address space, or the address of a column with bytes is null.
  Columns(std::vector<std::byte*> bases, std::vector<std::int64_t> row_bytes, std::int64_t num_rows);

  // A column, and the number of the index array that selects its rows.
  struct Leaf {
    std::int64_t column;
    std::int64_t index;
  };
  using Index = std::span<const std::int64_t>;

  std::size_t num_columns() const { return columns_.size(); }
  std::int64_t num_rows() const { return num_rows_; }
  // All columns in order, each with the first index array.
  std::span<const Leaf> all_leaves() const { return all_leaves_; }
  // The bytes of one row of all columns together.
  std::int64_t bytes_per_row() const { return bytes_per_row_; }
  // The bytes of one row of `leaves`. Throws like gather for a column that doesn't exist.
  std::int64_t bytes_per_row(std::span<const Leaf> leaves) const;

  // out[p][i] = column leaves[p].column at row indices[leaves[p].index][i], for i in [0, n). All index arrays have n
  // row numbers, in [0, num_rows). Leaves may come in any order and repeat.
  void gather(std::span<const Index> indices, std::span<std::byte* const> out, std::span<const Leaf> leaves) const;

  // Row (start + i) % num_rows of column j = src[j][i], for i in [0, n): a ring write. start in [0, num_rows),
  // n <= num_rows. A longer batch would overwrite itself, so the caller shortens it and chooses the rows to drop.
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
    std::int64_t ahead;  // how many rows ahead of the copy are prefetched
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
