// The rows of Priorities: raw priority and mark of each row in one cache line, and the largest raw priority of each
// block of rows.
//
// Values.    Raw priorities are finite and at least 0. The caller checks them, and the row numbers.
// Threads.   The object takes no lock: only one call at a time.
// Cost.      O(1) per row. largest_in_use: one comparison per block of 1024 rows, and a pass over each block whose
//   largest row was lowered, if it may still hold the largest priority of all. Memory: 8 bytes per row if `single`,
//   else 16. Pages that were never written aren't backed by memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pages.h"

namespace gleanrl {

class PriorityRows {
 public:
  // The flag bits of a mark. The other bits are the low bits of the generation at the last draw.
  static constexpr std::uint32_t kInUse = 1u << 31, kDrawn = 1u << 30, kBlocked = 1u << 29, kGeneration = kBlocked - 1;

  // capacity >= 1 rows, none in use. std::bad_alloc if the memory isn't available.
  PriorityRows(std::int64_t capacity, bool single)
      : single_(single),
        row_bytes_(single ? 8 : 16),
        memory_(static_cast<std::size_t>(capacity) * static_cast<std::size_t>(row_bytes_)),
        largest_(static_cast<std::size_t>((capacity + kBlockRows - 1) / kBlockRows), -1.0),
        stale_(largest_.size(), 0) {}

  bool single() const { return single_; }
  // The address of row 0, and the distance between rows.
  const std::byte* data() const { return memory_.data(); }
  std::int64_t row_bytes() const { return row_bytes_; }
  // The end of the used range: no row from here on has a mark.
  std::int64_t end() const { return end_; }
  std::int64_t num_blocked() const { return num_blocked_; }

  // The stored raw priority; 0 if the row isn't in use.
  double raw(std::int64_t row) const {
    return single_ ? static_cast<double>(*reinterpret_cast<const float*>(at(row)))
                   : *reinterpret_cast<const double*>(at(row));
  }
  std::uint32_t mark(std::int64_t row) const { return *reinterpret_cast<const std::uint32_t*>(mark_at(row)); }
  bool in_use(std::int64_t row) const { return (mark(row) & kInUse) != 0; }
  bool blocked(std::int64_t row) const { return (mark(row) & kBlocked) != 0; }
  // Whether the row is in use and not blocked.
  bool drawable(std::int64_t row) const { return (mark(row) & (kInUse | kBlocked)) == kInUse; }
  // Prefetches a row into the L2 cache. Always inlined, because GCC drops calls of functions that only prefetch.
  [[gnu::always_inline]] void prefetch(std::int64_t row) const { __builtin_prefetch(at(row), 1, 2); }

  // Puts the row in use with this priority.
  void store(std::int64_t row, double raw) {
    const std::uint32_t mark = this->mark(row);
    const double before = in_use(row) ? this->raw(row) : -1.0;
    if (single_) {
      *reinterpret_cast<float*>(at(row)) = static_cast<float>(raw);
    } else {
      *reinterpret_cast<double*>(at(row)) = raw;
    }
    set_mark(row, mark | kInUse);
    double& largest = largest_[static_cast<std::size_t>(row / kBlockRows)];
    std::uint8_t& stale = stale_[static_cast<std::size_t>(row / kBlockRows)];
    // `largest` is an upper bound of the block here. It becomes stale if the row that may have held it gets lower.
    stale = raw < largest && (stale || before == largest);
    largest = std::max(largest, raw);
  }

  void remember(std::int64_t row, std::int64_t generation) {
    const std::uint32_t drawn = kDrawn | (static_cast<std::uint32_t>(generation) & kGeneration);
    set_mark(row, (mark(row) & (kInUse | kBlocked)) | drawn);
  }

  // Whether the row was last drawn in another generation than this one.
  bool drawn_before(std::int64_t row, std::int64_t generation) const {
    const std::uint32_t mark = this->mark(row);
    return (mark & kDrawn) && ((static_cast<std::uint32_t>(generation) ^ mark) & kGeneration);
  }

  void set_blocked(std::int64_t row, bool blocked) {
    const std::uint32_t before = mark(row);
    num_blocked_ += blocked - ((before & kBlocked) != 0);
    set_mark(row, blocked ? before | kBlocked : before & ~kBlocked);
  }

  // Whether a saved row with this priority can have this mark.
  static bool is_mark(std::uint32_t mark, double raw) {
    return ((mark & kInUse) || raw == 0.0) && ((mark & kDrawn) || !(mark & kGeneration));
  }
  // Restores a result of mark(). The caller has restored the row's priority before, if the row is in use.
  void restore_mark(std::int64_t row, std::uint32_t mark) {
    set_blocked(row, (mark & kBlocked) != 0);
    set_mark(row, mark);
  }

  // The largest raw priority of the rows in use; -1 if there are none.
  double largest_in_use() {
    double largest = -1.0;
    for (std::size_t b = 0; b < largest_.size(); ++b) largest = std::max(largest, stale_[b] ? -1.0 : largest_[b]);
    for (std::size_t b = 0; b < largest_.size(); ++b) {
      if (!stale_[b] || largest_[b] <= largest) continue;
      largest = std::max(largest, largest_[b] = largest_of(b));
      stale_[b] = 0;
    }
    return largest;
  }

  // Whether the summaries of blocks and the number of blocked rows agree with the rows.
  bool summaries_hold() const {
    std::int64_t blocked = 0;
    for (std::int64_t row = 0; row < end_; ++row) blocked += this->blocked(row);
    bool hold = blocked == num_blocked_;
    for (std::size_t b = 0; b < largest_.size(); ++b) {
      const double largest = largest_of(b);
      hold &= stale_[b] ? largest_[b] >= largest : largest_[b] == largest;
    }
    return hold;
  }

 private:
  static constexpr std::int64_t kBlockRows = 1024;

  std::byte* at(std::int64_t row) const { return memory_.data() + row * row_bytes_; }
  std::byte* mark_at(std::int64_t row) const { return at(row) + row_bytes_ / 2; }
  void set_mark(std::int64_t row, std::uint32_t mark) {
    *reinterpret_cast<std::uint32_t*>(mark_at(row)) = mark;
    end_ = std::max(end_, row + 1);
  }
  double largest_of(std::size_t block) const {
    const std::int64_t first = static_cast<std::int64_t>(block) * kBlockRows, last = std::min(first + kBlockRows, end_);
    double largest = -1.0;
    for (std::int64_t row = first; row < last; ++row) largest = std::max(largest, in_use(row) ? raw(row) : -1.0);
    return largest;
  }

  bool single_;
  std::int64_t row_bytes_;
  Pages memory_;
  // The largest raw priority in use in each block; -1 if there is none. For a stale block it is an upper bound.
  std::vector<double> largest_;
  std::vector<std::uint8_t> stale_;
  std::int64_t end_ = 0, num_blocked_ = 0;
};

}  // namespace gleanrl
