// A sum tree over priorities, for proportional draws and updates of many rows per call.
//
// Leaf i holds the priority of row i. A node has 8 children in one cache line, so a million leaves need seven levels
// instead of twenty. Each node stores two summaries of its leaves: their sum and the smallest positive one.
//
// Values.    Priorities are in [0, kLargest]. All leaves start at zero, which means that the row is never drawn. NaN,
//   negative, infinite and larger values are refused, so no sum can overflow. -0.0 is stored as 0.0.
// Exactness. A parent is always recomputed from its 8 children in a fixed order. So every sum depends only on the
//   leaves: rounding errors don't accumulate, and two trees with the same leaves make the same draws.
// Draws.     Row i is drawn with probability leaf i / total(), up to rounding (a few parts in 10^16 of the total). A
//   row with a zero leaf, or a row that doesn't exist, is never drawn. If rounding moves a search past the last
//   positive child of a node, the search continues in this child.
// Duplicates. If an update repeats a row, the last value wins.
// Failure.   Every argument is checked before anything changes or is written. A call that throws has changed nothing.
//   std::out_of_range for a row, std::invalid_argument for any other value, std::runtime_error for a draw from a tree
//   without a positive leaf.
// Threads.   The tree takes no lock. A call that changes it (update, put, fill) must not run together with another
//   call; other calls may run at the same time. A caller that shares a tree holds one lock around each call.
// Cost.      draw and update: O(n log8 capacity), level by level for all n rows, so that their cache misses overlap.
//   fill: O(n + log8 capacity). total, min_positive: O(1). Memory: 8 * (1 + 2 / 7) = 10.3 bytes per leaf. Pages without
//   an update aren't backed by memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pages.h"

namespace gleanrl {

class SumTree {
 public:
  // The sum of 2^63 such leaves is below the largest double.
  static constexpr double kLargest = 0x1p960;

  // capacity >= 1 leaves, all zero. std::bad_alloc if the memory isn't available.
  explicit SumTree(std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  double total() const { return total_; }
  // The smallest positive leaf, 0 if there is none.
  double min_positive() const { return lowest_; }

  // Sets leaf index[i] to value[i], in this order. Rows are in [0, capacity).
  void update(std::span<const std::int64_t> index, std::span<const double> value);

  // The same for at most kChunk rows. It can't fail: the caller has checked rows and values. For speed the caller calls
  // `prefetch` for the rows before.
  static constexpr std::size_t kChunk = 512;
  void put(std::span<const std::int64_t> index, const double* value);
  // Prefetches the memory that an update of the row reads. Always inlined, because GCC drops calls of functions that
  // only prefetch.
  [[gnu::always_inline]] void prefetch(std::int64_t row) const {
    __builtin_prefetch(sums_[0] + row, 1, 2);
    if (levels_ == 1) return;
    __builtin_prefetch(sums_[1] + row / kFanOut, 1, 2);
    __builtin_prefetch(lows_[1] + row / kFanOut, 1, 2);
  }

  // Sets leaf (start + i) % capacity to value, for i in [0, n): the rows of a ring write. start in [0, capacity),
  // n <= capacity.
  void fill(std::int64_t start, std::int64_t n, double value);

  // index[i] = a row drawn with uniform[i], value[i] = its leaf. Uniforms are in [0, 1), and may be stored in `value`
  // itself. Draws are with replacement. `beside` names tables that are prefetched at the drawn rows, because the caller
  // will read them.
  struct Beside {
    const void* rows;
    std::int64_t row_bytes;
  };
  void draw(std::span<const double> uniform, std::int64_t* index, double* value,
            std::span<const Beside> beside = {}) const;

  // value[i] = leaf index[i].
  void get(std::span<const std::int64_t> index, double* value) const;

  // Recomputes all summaries from the leaves. Throws std::logic_error if a leaf isn't a legal value, or a node differs
  // from the summary of its children.
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
  // Level 0 holds the leaves, and level levels_ - 1 is one line of 8. Lengths are multiples of 8. Level 1 of both
  // arrays summarises level 0. lows_[0] is the array of leaves.
  std::array<std::int64_t, kMaxLevels> sizes_{};
  std::array<double*, kMaxLevels> sums_{}, lows_{};
  Pages memory_;
  double total_ = 0.0, lowest_ = 0.0;
  std::array<std::int64_t, kChunk> sum_work_, low_work_;
};

}  // namespace gleanrl
