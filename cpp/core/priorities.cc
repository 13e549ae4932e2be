#include "priorities.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.h"
#include "kernels.h"
#include "weights.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;
using std::uint32_t;

constexpr auto kChunk = static_cast<int64_t>(SumTree::kChunk);
// The number of rows in one group of prefetches.
constexpr size_t kAsked = 64;

// leaf[i] = (raw[i] + eps)^alpha. Not inlined, so that all callers get the same bits for the same priority.
[[gnu::noinline]] void leaves_of(const Priorities::Rule& rule, const double* raw, size_t n, double* leaf) {
  constexpr double kSmallest = 0x1p-1000;
  if (rule.alpha == 0.0) {
    std::fill_n(leaf, n, 1.0);
  } else if (rule.alpha == 1.0) {
    for (size_t i = 0; i < n; ++i) {
      const double sum = raw[i] + rule.eps;
      leaf[i] = sum > 0.0 ? std::max(sum, kSmallest) : 0.0;
    }
  } else {
    kernels().powers(raw, rule.eps, rule.alpha, n, leaf);
  }
}

void check_leaves(const char* call, const Priorities::Rule& rule, const double* raw, size_t n, const double* leaf) {
  bool any = false;
  for (size_t i = 0; i < n; ++i) any |= leaf[i] > Priorities::kLargestLeaf;
  if (!any) return;
  const auto at = std::find_if(leaf, leaf + n, [](double value) { return value > Priorities::kLargestLeaf; }) - leaf;
  throw std::invalid_argument(std::string(call) + ": priority " + text_of(raw[at]) + " is too large for alpha = " +
                              text_of(rule.alpha) + ", eps = " + text_of(rule.eps) + ": its power exceeds 2^959");
}

}  // namespace

Priorities::Priorities(int64_t capacity, bool single) : tree_(capacity), rows_(capacity, single) {}

double Priorities::largest() const {
  return single() ? static_cast<double>(std::numeric_limits<float>::max()) : SumTree::kLargest;
}

// The value that is stored for a raw priority.
double Priorities::rounded(double raw) const {
  if (!single()) return raw + 0.0;
  const double kept = static_cast<double>(static_cast<float>(raw));
  return kept == 0.0 && raw > 0.0 ? static_cast<double>(std::numeric_limits<float>::denorm_min()) : kept + 0.0;
}

void Priorities::check_raw(const char* call, std::span<const double> raw) const {
  const auto found = std::find_if_not(raw.begin(), raw.end(), [this](double value) { return is_legal(value); });
  if (found == raw.end()) return;
  throw std::invalid_argument(std::string(call) + ": expected finite priorities of 0 or more (at most " +
                              (single() ? "float32's largest number" : "2^960") + "), got " + text_of(*found) +
                              " at position " + std::to_string(found - raw.begin()) + " of " +
                              std::to_string(raw.size()));
}

// The leaf of one legal priority; throws if the leaf is too large.
double Priorities::checked_leaf(const char* call, const Rule& rule, double raw) const {
  double leaf;
  leaves_of(rule, &raw, 1, &leaf);
  check_leaves(call, rule, &raw, 1, &leaf);
  return leaf;
}

void Priorities::set_rule(const Rule& rule) {
  for (const auto& [name, value] : {std::pair{"alpha", rule.alpha}, std::pair{"eps", rule.eps}}) {
    if (!(value >= 0.0) || !(value <= SumTree::kLargest)) {
      throw std::invalid_argument(std::string("set_rule: expected a finite ") + name +
                                  " of 0 or more (at most 2^960), got " + text_of(value));
    }
  }
  if (rule.alpha == rule_.alpha && rule.eps == rule_.eps) return;
  // Powers increase with their base. So if the largest priority has a legal leaf, all have.
  checked_leaf("set_rule", rule, std::max({rows_.largest_in_use(), max_seen_.value_or(0.0), 0.0}));
  refresh_leaves(rule);
  rule_ = rule;
}

// leaf[i] = the leaf of row first + i under `rule`.
void Priorities::compute_leaves(const Rule& rule, int64_t first, int64_t n, double* leaf) const {
  for (int64_t i = 0; i < n; ++i) leaf[i] = rows_.raw(first + i);
  leaves_of(rule, leaf, static_cast<size_t>(n), leaf);
  for (int64_t i = 0; i < n; ++i) leaf[i] = rows_.drawable(first + i) ? leaf[i] : 0.0;
}

// Recomputes the leaves of all rows, and writes them into the tree.
void Priorities::refresh_leaves(const Rule& rule) {
  std::vector<int64_t> rows(kChunk);
  std::vector<double> leaf(kChunk);
  for (int64_t first = 0; first < end(); first += kChunk) {
    const int64_t n = std::min(kChunk, end() - first);
    std::iota(rows.begin(), rows.end(), first);
    compute_leaves(rule, first, n, leaf.data());
    const auto size = static_cast<size_t>(n);
    tree_.update({rows.data(), size}, {leaf.data(), size});
  }
}

void Priorities::fill(int64_t start, int64_t n, double raw) {
  if (n < 0 || n > capacity()) {
    throw std::invalid_argument("fill: expected 0 to capacity rows, " + std::to_string(capacity()) + ", got " +
                                std::to_string(n));
  }
  check_raw("fill", {&raw, 1});
  raw = rounded(raw);
  const double leaf = checked_leaf("fill", rule_, raw);
  if (n == 0) return;
  check_rows("fill", {&start, 1}, capacity());
  const int64_t head = std::min(n, capacity() - start);
  const auto row_at = [&](int64_t i) { return i < head ? start + i : i - head; };
  if (rows_.num_blocked() == 0) {
    tree_.fill(start, n, leaf);
  } else {
    row_work_.resize(static_cast<size_t>(n));
    leaf_work_.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      row_work_[static_cast<size_t>(i)] = row_at(i);
      leaf_work_[static_cast<size_t>(i)] = rows_.blocked(row_at(i)) ? 0.0 : leaf;
    }
    tree_.update(row_work_, leaf_work_);
  }
  for (int64_t i = 0; i < n; ++i) rows_.store(row_at(i), raw);
}

double Priorities::default_priority(bool within) {
  if (!within) return max_seen_.value_or(1.0);
  const double largest = rows_.largest_in_use();
  return largest < 0.0 ? 1.0 : largest;
}

void Priorities::set_max_seen(std::optional<double> raw) {
  if (raw) {
    check_raw("max_seen", {&*raw, 1});
    raw = rounded(*raw);
    checked_leaf("max_seen", rule_, *raw);
  }
  max_seen_ = raw;
}

template <class Raw>
int64_t Priorities::update_rows(std::span<const int64_t> index, std::span<const Raw> raw, int64_t limit,
                                const int64_t* written, const int64_t* expected) {
  const size_t n = index.size();
  if (raw.size() != n) {
    throw std::invalid_argument("update: expected one priority per row, " + std::to_string(n) + ", got " +
                                std::to_string(raw.size()));
  }
  if (limit < 0 || limit > capacity()) {
    throw std::invalid_argument("update: limit is " + std::to_string(limit) + ", expected at most the capacity, " +
                                std::to_string(capacity()));
  }
  check_rows("update", index, limit, true);
  row_work_.resize(n);
  raw_work_.resize(n);
  leaf_work_.resize(n);
  // Prefetches all memory that the update of the rows [begin, end) reads and writes. For the first chunk this happens
  // while leaves are computed, for later chunks right before they are processed. Always inlined, because GCC drops
  // calls of functions that only prefetch.
  const auto ask_for = [&](size_t begin, size_t end) __attribute__((always_inline)) {
    for (size_t i = begin; i < end; ++i) {
      if (index[i] < 0) continue;
      rows_.prefetch(index[i]);
      __builtin_prefetch(written + index[i], 0, 2);
      tree_.prefetch(index[i]);
    }
  };
  const auto given = [&](size_t i) { return index[i] < 0 ? 0.0 : static_cast<double>(raw[i]); };
  bool all_legal = true;
  for (size_t begin = 0; begin < n; begin += kAsked) {
    const size_t end = std::min(n, begin + kAsked);
    if (begin < SumTree::kChunk) ask_for(begin, end);
    for (size_t i = begin; i < end; ++i) {
      all_legal &= is_legal(given(i));
      raw_work_[i] = rounded(given(i));
    }
    leaves_of(rule_, raw_work_.data() + begin, end - begin, leaf_work_.data() + begin);
  }
  if (!all_legal) {  // the leaves of illegal priorities are meaningless: report the priority instead
    for (size_t i = 0; i < n; ++i) raw_work_[i] = given(i);
    check_raw("update", raw_work_);
  }
  check_leaves("update", rule_, raw_work_.data(), n, leaf_work_.data());

  // All checks are done: the rest can't fail.
  int64_t dropped = 0;
  double largest = -1.0;
  for (size_t begin = 0; begin < n; begin += SumTree::kChunk) {
    const size_t end = std::min(n, begin + SumTree::kChunk);
    if (begin > 0) ask_for(begin, end);
    size_t kept = begin;
    for (size_t i = begin; i < end; ++i) {
      const int64_t row = index[i];
      if (row < 0) continue;
      const bool late = expected ? written[row] != expected[i] : rows_.drawn_before(row, written[row]);
      // At this point kept <= i: no value is overwritten before it is read.
      row_work_[kept] = row;
      raw_work_[kept] = raw_work_[i];
      leaf_work_[kept] = rows_.blocked(row) ? 0.0 : leaf_work_[i];
      kept += !late;
      dropped += late;
    }
    tree_.put({row_work_.data() + begin, kept - begin}, leaf_work_.data() + begin);
    for (size_t i = begin; i < kept; ++i) {
      rows_.store(row_work_[i], raw_work_[i]);
      largest = std::max(largest, raw_work_[i]);
    }
  }
  if (largest >= 0.0) max_seen_ = std::max(max_seen_.value_or(largest), largest);
  return dropped;
}

int64_t Priorities::update(std::span<const int64_t> index, std::span<const double> raw, int64_t limit,
                           const int64_t* written, const int64_t* expected) {
  return update_rows(index, raw, limit, written, expected);
}

int64_t Priorities::update(std::span<const int64_t> index, std::span<const float> raw, int64_t limit,
                           const int64_t* written, const int64_t* expected) {
  return update_rows(index, raw, limit, written, expected);
}

void Priorities::check_draw(const WeightRule& rule, size_t n) const {
  if (!(rule.beta >= 0.0) || !std::isfinite(rule.beta)) {
    throw std::invalid_argument("draw: expected a finite beta of 0 or more, got " + text_of(rule.beta));
  }
  if (n > 0 && !(total() > 0.0)) throw std::runtime_error("draw: no row has a positive priority");
}

void Priorities::draw(Random& random, int64_t n, const WeightRule& rule, const int64_t* written, int64_t* index,
                      float* weight, int64_t* generation, bool served) {
  check_draw(rule, static_cast<size_t>(n));
  // The tree's draw replaces the uniforms by leaves in place, one by one.
  leaf_work_.resize(static_cast<size_t>(n));
  random.uniforms(leaf_work_.data(), n);
  draw(leaf_work_, rule, written, index, weight, generation, served);
}

void Priorities::draw(std::span<const double> uniform, const WeightRule& rule, const int64_t* written, int64_t* index,
                      float* weight, int64_t* generation, bool served) {
  const size_t n = uniform.size();
  check_draw(rule, n);
  if (n == 0) return;
  leaf_work_.resize(n);
  // The tree prefetches these at the drawn rows: the write counters, and the rows that `remember` writes.
  const SumTree::Beside beside[] = {{written, sizeof *written}, {rows_.data(), rows_.row_bytes()}};
  tree_.draw(uniform, index, leaf_work_.data(), beside);
  importance_weights(leaf_work_, tree_.min_positive(), rule.beta, rule.by_batch, weight);
  for (size_t i = 0; i < n; ++i) generation[i] = written[index[i]];
  for (size_t i = 0; served && i < n; ++i) rows_.remember(index[i], generation[i]);
}

void Priorities::remember(std::span<const int64_t> index, const int64_t* generation) {
  check_rows("remember", index, capacity());
  for (const int64_t row : index) rows_.prefetch(row);
  for (size_t i = 0; i < index.size(); ++i) rows_.remember(index[i], generation[i]);
}

void Priorities::block(std::span<const int64_t> index, const std::uint8_t* flag) {
  check_rows("block", index, capacity());
  const size_t n = index.size();
  leaf_work_.resize(n);
  for (size_t i = 0; i < n; ++i) leaf_work_[i] = rows_.raw(index[i]);
  leaves_of(rule_, leaf_work_.data(), n, leaf_work_.data());
  for (size_t i = 0; i < n; ++i) {
    if (flag[i] || !rows_.in_use(index[i])) leaf_work_[i] = 0.0;
  }
  tree_.update(index, leaf_work_);
  for (size_t i = 0; i < n; ++i) rows_.set_blocked(index[i], flag[i] != 0);
}

void Priorities::get(std::span<const int64_t> index, double* value) const {
  check_rows("get", index, capacity());
  for (size_t i = 0; i < index.size(); ++i) value[i] = rows_.raw(index[i]);
}

void Priorities::clear() {
  SumTree tree(capacity());
  PriorityRows rows(capacity(), single());
  tree_ = std::move(tree);
  rows_ = std::move(rows);
  max_seen_.reset();
}

void Priorities::save(double* raw, uint32_t* mark) const {
  for (int64_t row = 0; row < end(); ++row) {
    raw[row] = rows_.raw(row);
    mark[row] = rows_.mark(row);
  }
}

void Priorities::load(std::span<const double> raw, const uint32_t* mark) {
  const auto n = static_cast<int64_t>(raw.size());
  if (n > capacity()) {
    throw std::invalid_argument("load: expected at most capacity rows, " + std::to_string(capacity()) + ", got " +
                                std::to_string(n));
  }
  check_raw("load", raw);
  double most = 0.0;
  for (int64_t row = 0; row < n; ++row) {
    const double value = raw[static_cast<size_t>(row)];
    if (!PriorityRows::is_mark(mark[row], value)) {
      throw std::invalid_argument("load: row " + std::to_string(row) + " has mark " + std::to_string(mark[row]) +
                                  ", which wasn't saved with priority " + text_of(value));
    }
    most = std::max(most, value);
  }
  checked_leaf("load", rule_, rounded(most));
  const auto seen = max_seen_;
  clear();
  max_seen_ = seen;
  for (int64_t row = 0; row < n; ++row) {
    if (mark[row] & PriorityRows::kInUse) rows_.store(row, rounded(raw[static_cast<size_t>(row)]));
    rows_.restore_mark(row, mark[row]);
  }
  refresh_leaves(rule_);
}

void Priorities::check_valid() const {
  tree_.check_valid();
  if (!rows_.summaries_hold()) throw std::logic_error("a summary of the rows is stale");
  for (int64_t row = 0; row < capacity(); ++row) {
    const bool touched = rows_.mark(row) != 0 || rows_.raw(row) != 0.0;
    if (!PriorityRows::is_mark(rows_.mark(row), rows_.raw(row)) || (touched && row >= end())) {
      throw std::logic_error("the mark of row " + std::to_string(row) + " is wrong");
    }
    double expected, leaf;
    compute_leaves(rule_, row, 1, &expected);
    tree_.get({&row, 1}, &leaf);
    if (leaf != expected) throw std::logic_error("leaf " + std::to_string(row) + " isn't the power of its priority");
  }
}

}  // namespace gleanrl
