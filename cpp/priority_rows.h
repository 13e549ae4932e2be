// What Priorities keeps of each row beside the tree: its raw priority and its mark, in one cache line, and the largest
// raw priorities of blocks of rows.
//
// Values.    Raw priorities are finite and 0 or more; the caller checks them, and the row numbers.
// Threads.   Nothing is locked here: one call at a time.
// Cost.      O(1) a row. largest_in_use: one comparison a block of 1024 rows, and a pass over those blocks whose largest
//   row was lowered and that may still hold the largest of all. Memory: 8 bytes a row if `single`, else 16; pages that
//   were never written are not backed by memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pages.h"

namespace gleanrl {

class PriorityRows {
 public:
  // The bits of a mark. The rest are the low bits of the generation that was drawn.
  static constexpr std::uint32_t kInUse = 1u << 31, kDrawn = 1u << 30, kBlocked = 1u << 29, kGeneration = kBlocked - 1;

  // capacity >= 1 rows, not in use. std::bad_alloc if the memory can't be had.
  PriorityRows(std::int64_t capacity, bool single)
      : single_(single),
        row_bytes_(single ? 8 : 16),
        memory_(static_cast<std::size_t>(capacity) * static_cast<std::size_t>(row_bytes_)),
        largest_(static_cast<std::size_t>((capacity + kBlockRows - 1) / kBlockRows), -1.0),
        stale_(largest_.size(), 0) {}

  bool single() const { return single_; }
  // Where row 0 is, and how far apart rows are.
  const std::byte* data() const { return memory_.data(); }
  std::int64_t row_bytes() const { return row_bytes_; }
  // No row from here on was ever touched.
  std::int64_t end() const { return end_; }
  std::int64_t num_blocked() const { return num_blocked_; }

  // As it is kept; 0 if the row is not in use.
  double raw(std::int64_t row) const {
    return single_ ? static_cast<double>(*reinterpret_cast<const float*>(at(row)))
                   : *reinterpret_cast<const double*>(at(row));
  }
  std::uint32_t mark(std::int64_t row) const { return *reinterpret_cast<const std::uint32_t*>(mark_at(row)); }
  bool in_use(std::int64_t row) const { return (mark(row) & kInUse) != 0; }
  bool blocked(std::int64_t row) const { return (mark(row) & kBlocked) != 0; }
  // In use and not blocked.
  bool drawable(std::int64_t row) const { return (mark(row) & (kInUse | kBlocked)) == kInUse; }
  // Asks for a row, into the second cache. Always inline: GCC drops the call of a function that does nothing else.
  [[gnu::always_inline]] void prefetch(std::int64_t row) const { __builtin_prefetch(at(row), 1, 2); }

  // The row comes in use with this priority.
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
    // At this point no row of the block exceeds `largest`, stale or not.
    stale = raw < largest && (stale || before == largest);
    largest = std::max(largest, raw);
  }

  void remember(std::int64_t row, std::int64_t generation) {
    const std::uint32_t drawn = kDrawn | (static_cast<std::uint32_t>(generation) & kGeneration);
    set_mark(row, (mark(row) & (kInUse | kBlocked)) | drawn);
  }

  // Whether the row was drawn, in another generation than this one.
  bool drawn_before(std::int64_t row, std::int64_t generation) const {
    const std::uint32_t mark = this->mark(row);
    return (mark & kDrawn) && ((static_cast<std::uint32_t>(generation) ^ mark) & kGeneration);
  }

  void set_blocked(std::int64_t row, bool blocked) {
    const std::uint32_t before = mark(row);
    num_blocked_ += blocked - ((before & kBlocked) != 0);
    set_mark(row, blocked ? before | kBlocked : before & ~kBlocked);
  }

  // Whether a row of this priority can have this mark.
  static bool is_mark(std::uint32_t mark, double raw) {
    return ((mark & kInUse) || raw == 0.0) && ((mark & kDrawn) || !(mark & kGeneration));
  }
  // A mark as mark() gave it, on a row whose priority stands there already if it is in use.
  void restore_mark(std::int64_t row, std::uint32_t mark) {
    set_blocked(row, (mark & kBlocked) != 0);
    set_mark(row, mark);
  }

  // -1 if no row is in use.
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

  // Whether what is kept of the blocks and of all rows is what the rows make it.
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
  // The largest raw priority in use in each block, -1 if there is none; of a stale block a bound.
  std::vector<double> largest_;
  std::vector<std::uint8_t> stale_;
  std::int64_t end_ = 0, num_blocked_ = 0;
};

}  // namespace gleanrl
