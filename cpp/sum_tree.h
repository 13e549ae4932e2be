// A sum tree over priorities: proportional draws and updates, many at a time.
//
// Leaf i holds the priority of row i. A node covers 8 children that lie in one cache line, so a million leaves make
// seven levels, not twenty. Two summaries are kept for every node: the sum and the smallest positive leaf.
//
// Values.    Priorities lie in [0, kLargest]. Zero means "never draw this row" and is what every leaf starts at.
//   NaN, negative, infinite and larger values are refused; so no sum can overflow. -0.0 is stored as 0.0.
// Exactness. A parent is always recomputed from its 8 children in one fixed order, so every sum is a pure function
//   of the leaves: nothing drifts, whatever the history, and two trees of the same leaves draw the very same.
// Draws.     Row i comes with probability leaf i / total(), up to rounding (a few parts in 10^16 of the total). A row
//   whose leaf is zero, or that doesn't exist, never comes: where rounding carries a search past the last positive
//   child of a node, the search goes on in that last positive child.
// Duplicates. In one update of a repeated row the last value wins.
// Failure.   Every argument is checked before anything changes or is written; a call that throws has changed
//   nothing. std::out_of_range for a row, std::invalid_argument for any other value, std::runtime_error for a draw
//   from a tree without a positive leaf.
// Threads.   Nothing is locked here: calls that change the tree (update, put, fill) run alone, the others
//   may run beside each other. A caller that shares a tree holds one lock around each call.
// Cost.      draw and update: O(n log8 capacity), level by level for all n, so that their cache misses overlap.
//   fill: O(n + log8 capacity). total, min_positive: O(1). Memory: 8 * (1 + 2 / 7) = 10.3 bytes a leaf; pages
//   that no positive leaf ever touched are not backed by memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pages.h"

namespace gleanrl {

class SumTree {
 public:
  // 2^63 leaves of it add up to less than the largest double.
  static constexpr double kLargest = 0x1p960;

  // capacity >= 1 leaves, all zero. std::bad_alloc if the memory can't be had.
  explicit SumTree(std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  double total() const { return total_; }
  // The smallest positive leaf, 0 if there is none.
  double min_positive() const { return lowest_; }

  // Leaf index[i] = value[i], in that order. Rows lie in [0, capacity).
  void update(std::span<const std::int64_t> index, std::span<const double> value);

  // The same for kChunk rows at most, with their values, which the caller has checked, and asked for by `prefetch`. It
  // can't fail.
  static constexpr std::size_t kChunk = 512;
  void put(std::span<const std::int64_t> index, const double* value);
  // Asks for what an update of the row reads. Always inline: GCC drops the call of a function that does nothing else.
  [[gnu::always_inline]] void prefetch(std::int64_t row) const {
    __builtin_prefetch(sums_[0] + row, 1, 2);
    if (levels_ == 1) return;
    __builtin_prefetch(sums_[1] + row / kFanOut, 1, 2);
    __builtin_prefetch(lows_[1] + row / kFanOut, 1, 2);
  }

  // Leaf (start + i) % capacity = value, for i in [0, n): the rows of a ring write. start in [0, capacity),
  // n <= capacity.
  void fill(std::int64_t start, std::int64_t n, double value);

  // index[i] = a row drawn with uniform[i], value[i] = its leaf. Uniforms lie in [0, 1), in `value` itself perhaps.
  // Draws are with replacement. Rows of `beside` are what the caller is going to read at the rows drawn; they are asked
  // for meanwhile.
  struct Beside {
    const void* rows;
    std::int64_t row_bytes;
  };
  void draw(std::span<const double> uniform, std::int64_t* index, double* value,
            std::span<const Beside> beside = {}) const;

  // value[i] = leaf index[i].
  void get(std::span<const std::int64_t> index, double* value) const;

  // Recomputes everything from the leaves. std::logic_error if a leaf is not a legal value or a node isn't what its
  // children make it.
  void check_valid() const;

 private:
  static constexpr std::int64_t kFanOut = 8;
  static constexpr int kMaxLevels = 21;  // 8^21 = 2^63
  struct Summary {
    double sum, low;
  };

  std::int64_t nodes(int level) const { return sizes_[static_cast<std::size_t>(level)] / kFanOut; }
  Summary summarise(int level, std::int64_t node) const;
  void refresh(int level, std::int64_t first, std::int64_t last);
  void refresh_top();
  void climb(std::span<const std::int64_t> index);

  std::int64_t capacity_;
  int levels_ = 0;
  // Level 0 holds the leaves, level levels_ - 1 is one line of 8. Lengths are multiples of 8; level 0 is summarised
  // by both arrays' level 1. lows_[0] are the leaves themselves.
  std::array<std::int64_t, kMaxLevels> sizes_{};
  std::array<double*, kMaxLevels> sums_{}, lows_{};
  Pages memory_;
  double total_ = 0.0, lowest_ = 0.0;
  std::array<std::int64_t, kChunk> sum_work_, low_work_;
};

}  // namespace gleanrl
