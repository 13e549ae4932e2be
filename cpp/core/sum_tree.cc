#include "sum_tree.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "kernels.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

constexpr int64_t kLine = 64;

// NaN fails both comparisons. "&" instead of "&&" keeps branches out of loops.
bool is_priority(double value) { return (value >= 0.0) & (value <= SumTree::kLargest); }

void check_values(const char* call, std::span<const double> values) {
  bool all = true;
  for (const double value : values) all &= is_priority(value);
  if (all) return;
  const auto found = std::find_if_not(values.begin(), values.end(), is_priority);
  throw std::invalid_argument(std::string(call) + ": expected finite priorities of 0 or more (at most 2^960), got " +
                              text_of(*found) + " at position " + std::to_string(found - values.begin()) + " of " +
                              std::to_string(values.size()));
}

// Maps -0.0 to 0.0: their sum is 0.0.
double stored(double value) { return value + 0.0; }

// Two doubles in a register, which every supported processor has.
using Pair = double __attribute__((vector_size(16)));

Pair load_pair(const double* from) {
  Pair pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

// sum_of and low_of take a line of eight children. They are lambdas, because each lambda has a distinct type: a
// template that takes it is instantiated for it and inlines it.
//
// The order of these additions must not change: it determines the last bit of every sum, so it decides draws.
constexpr auto sum_of = [](const double* line) {
  const Pair sum = (load_pair(line) + load_pair(line + 2)) + (load_pair(line + 4) + load_pair(line + 6));
  return sum[0] + sum[1];
};

// The smallest positive child; 0 if all are 0.
constexpr auto low_of = [](const double* line) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const auto lower = [](Pair a, Pair b) { return a < b ? a : b; };
  const auto positive = [](Pair a) { return a > Pair{0.0, 0.0} ? a : Pair{kNone, kNone}; };
  const Pair low = lower(lower(positive(load_pair(line)), positive(load_pair(line + 2))),
                         lower(positive(load_pair(line + 4)), positive(load_pair(line + 6))));
  const double lowest = std::min(low[0], low[1]);
  return lowest == kNone ? 0.0 : lowest;
};

}  // namespace

SumTree::SumTree(int64_t capacity) : capacity_(capacity) {
  if (capacity < 1) throw std::invalid_argument("capacity: expected 1 or more, got " + std::to_string(capacity));
  // For larger capacities the sizes below would overflow. No machine has so much memory.
  if (capacity > std::numeric_limits<int64_t>::max() / 32) throw std::bad_alloc();
  int64_t doubles = 0;
  for (int64_t size = capacity; levels_ == 0 || sizes_[static_cast<size_t>(levels_ - 1)] > kFanOut;) {
    size = (size + kFanOut - 1) / kFanOut * kFanOut;
    sizes_[static_cast<size_t>(levels_)] = size;
    doubles += levels_ == 0 ? size : 2 * size;
    ++levels_;
    size /= kFanOut;
  }
  memory_ = Pages(static_cast<std::size_t>(doubles) * sizeof(double));
  auto* next = reinterpret_cast<double*>(memory_.data());
  for (size_t level = 0; level < static_cast<size_t>(levels_); ++level) {
    for (auto* summary : {&sums_, &lows_}) {
      (*summary)[level] = next;
      if (level > 0) next += sizes_[level];
    }
    if (level == 0) next += sizes_[0];
  }
}

SumTree::Summary SumTree::summarise(int level, int64_t node) const {
  const auto l = static_cast<size_t>(level);
  return {sum_of(sums_[l] + kFanOut * node), low_of(lows_[l] + kFanOut * node)};
}

// Recomputes the parents of the nodes [first, last] of a level, and all levels above them.
void SumTree::refresh(int level, int64_t first, int64_t last) {
  for (; level + 1 < levels_; ++level) {
    first /= kFanOut;
    last /= kFanOut;
    const auto up = static_cast<size_t>(level + 1);
    for (int64_t node = first; node <= last; ++node) {
      const Summary summary = summarise(level, node);
      sums_[up][node] = summary.sum;
      lows_[up][node] = summary.low;
    }
  }
}

void SumTree::refresh_top() {
  const Summary top = summarise(levels_ - 1, 0);
  total_ = top.sum;
  lowest_ = top.low;
}

void SumTree::update(std::span<const int64_t> index, std::span<const double> value) {
  if (index.size() != value.size()) {
    throw std::invalid_argument("update: expected one value per row, " + std::to_string(index.size()) + ", got " +
                                std::to_string(value.size()));
  }
  check_rows("update", index, capacity_);
  check_values("update", value);
  for (size_t begin = 0; begin < index.size(); begin += kChunk) {
    const auto some = index.subspan(begin, std::min(kChunk, index.size() - begin));
    for (const int64_t row : some) prefetch(row);
    put(some, value.data() + begin);
  }
}

void SumTree::put(std::span<const int64_t> index, const double* value) {
  for (size_t i = 0; i < index.size(); ++i) sums_[0][index[i]] = stored(value[i]);
  if (levels_ > 1) climb(index);
  if (!index.empty()) refresh_top();
}

// Recomputes the summaries above changed leaves, level by level for all leaves. Sums and smallest leaves are updated
// separately: a changed leaf changes every sum above it, but rarely the smallest leaf. So the second list is short from
// the second level on. Lists are shortened without branches: every item is written, and the position advances only past
// items that are kept.
void SumTree::climb(std::span<const int64_t> index) {
  size_t num_sums = 0, num_lows = 0;
  int64_t previous = -1;
  for (const int64_t row : index) {  // adjacent rows share a parent, which is common: slices of rows
    const int64_t node = row / kFanOut;
    sum_work_[num_sums] = node;
    num_sums += node != previous;
    previous = node;
  }
  for (size_t i = 0; i < num_sums; ++i) {
    const int64_t node = sum_work_[i];
    const double* const line = sums_[0] + kFanOut * node;
    const double low = low_of(line);
    sums_[1][node] = sum_of(line);
    low_work_[num_lows] = node / kFanOut;
    num_lows += low != lows_[1][node];
    lows_[1][node] = low;
    sum_work_[i] = node / kFanOut;
  }
  const auto renew = [this](auto& levels, auto& work, size_t n, int level, auto summary, bool stop_unchanged) {
    const auto l = static_cast<size_t>(level);
    if (static_cast<int64_t>(n) >= nodes(level)) {
      for (int64_t node = 0; node < nodes(level); ++node) {
        work[static_cast<size_t>(node)] = node / kFanOut;
        levels[l + 1][node] = summary(levels[l] + kFanOut * node);
      }
      return static_cast<size_t>(nodes(level));
    }
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      const int64_t node = work[i];
      const double now = summary(levels[l] + kFanOut * node);
      work[kept] = node / kFanOut;
      kept += !stop_unchanged || now != levels[l + 1][node];
      levels[l + 1][node] = now;
    }
    return kept;
  };
  for (int level = 1; level + 1 < levels_; ++level) {
    num_sums = renew(sums_, sum_work_, num_sums, level, sum_of, false);
    num_lows = renew(lows_, low_work_, num_lows, level, low_of, true);
  }
}

void SumTree::fill(int64_t start, int64_t n, double value) {
  if (n < 0 || n > capacity_) {
    throw std::invalid_argument("fill: expected 0 to capacity rows, " + std::to_string(capacity_) + ", got " +
                                std::to_string(n));
  }
  check_values("fill", {&value, 1});
  if (n == 0) return;
  if (start < 0 || start >= capacity_) {
    throw std::out_of_range("fill: start " + std::to_string(start) + " is outside the rows [0, " +
                            std::to_string(capacity_) + ")");
  }
  const int64_t head = std::min(n, capacity_ - start);
  std::fill_n(sums_[0] + start, head, stored(value));
  refresh(0, start, start + head - 1);
  if (n > head) {
    std::fill_n(sums_[0], n - head, stored(value));
    refresh(0, 0, n - head - 1);
  }
  refresh_top();
}

// value[i] holds the remaining mass to find in node index[i], and the leaf at the end. Only positive children are
// selected, so every visited node has a positive sum.
void SumTree::draw(std::span<const double> uniform, int64_t* index, double* value,
                   std::span<const Beside> beside) const {
  if (uniform.empty()) return;
  check_uniforms(uniform);
  if (!(total_ > 0.0)) throw std::runtime_error("draw: no row has a positive priority");
  for (size_t begin = 0; begin < uniform.size(); begin += kChunk) {
    const size_t end = std::min(begin + kChunk, uniform.size());
    for (size_t i = begin; i < end; ++i) {
      value[i] = uniform[i] * total_;
      index[i] = 0;
    }
    for (int level = levels_ - 1; level >= 0; --level) {
      for (size_t i = begin; level == 0 && i < end; ++i) {  // prefetch the rows of all eight leaves into the L2 cache
        for (const auto& [rows, row_bytes] : beside) {
          const auto* const eight = static_cast<const std::byte*>(rows) + kFanOut * index[i] * row_bytes;
          for (int64_t at = 0; at < kFanOut * row_bytes; at += kLine) __builtin_prefetch(eight + at, 0, 2);
        }
      }
      kernels().descend(sums_[static_cast<size_t>(level)], level == 0, index + begin, value + begin, end - begin);
    }
  }
}

void SumTree::get(std::span<const int64_t> index, double* value) const {
  check_rows("get", index, capacity_);
  for (size_t i = 0; i < index.size(); ++i) value[i] = sums_[0][index[i]];
}

void SumTree::check_valid() const {
  for (int64_t i = 0; i < sizes_[0]; ++i) {
    const double leaf = sums_[0][i];
    if (!is_priority(leaf) || std::signbit(leaf) || (i >= capacity_ && leaf != 0.0)) {
      throw std::logic_error("leaf " + std::to_string(i) + " is " + text_of(leaf));
    }
  }
  const auto same = [](const Summary& a, const Summary& b) { return a.sum == b.sum && a.low == b.low; };
  for (int level = 0; level + 1 < levels_; ++level) {
    const auto up = static_cast<size_t>(level + 1);
    for (int64_t node = 0; node < sizes_[up]; ++node) {
      const Summary expected = node < nodes(level) ? summarise(level, node) : Summary{0.0, 0.0};
      if (!same(expected, {sums_[up][node], lows_[up][node]})) {
        throw std::logic_error("node " + std::to_string(node) + " of level " + std::to_string(level + 1) +
                               " isn't what its children make it");
      }
    }
  }
  if (!same(summarise(levels_ - 1, 0), {total_, lowest_})) throw std::logic_error("the top is stale");
}

}  // namespace gleanrl
