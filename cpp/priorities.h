// The priorities of a buffer's rows: what a prioritized sampler needs for a draw, an update or a write in one call.
//
// A row is in use once it was filled or updated. It keeps the raw priority that the caller gave, and what was said of
// it: the generation at its last draw, and whether it is blocked. A sum tree keeps its leaf,
//   leaf = (raw + eps)^alpha    in use and not blocked
//   leaf = 0                    otherwise: never drawn.
// Leaves are always computed from raw priorities, never from older leaves.
//
// Values.    Raw priorities lie in [0, largest()]: 2^960, or float32's largest if they are kept in `single` precision
//   (then they are rounded to it first, but never a positive one to 0). -0.0 is kept as 0.0. Leaves: relative error of
//   some 10^-9; 1 if alpha is 0, whatever the priority; raw + eps exactly if alpha is 1. A positive one is never below
//   about 2^-1000: what is smaller is raised to that, so that no row of a positive priority gets lost. One above
//   kLargestLeaf is refused.
// Generations. The caller counts in `written` (int64, one for each row) how often each row was written. What is kept of
//   it here are the low 29 bits, so that a row is taken for an older one of its slot only if exactly k * 2^29 writes lie
//   between them. Generations that the caller gives are compared as a whole.
// Draws, duplicates. As in SumTree: of repeated rows in one call the last one wins.
// State.     end(), raw priorities and marks (save), the rule and max_seen(): set and loaded, another object goes on as
//   this one would, blocks included.
// Failure.   Every argument is checked before anything changes or is written; a call that throws has changed
//   nothing. std::out_of_range for a row, std::invalid_argument for any other value, std::runtime_error for a draw
//   without a row to draw.
// Threads.   Nothing is locked here: one call at a time, draws included. A caller that shares the object holds one lock
//   around each call.
// Cost.      draw, update: those of SumTree, and one more cache miss a row for `written` and for what is kept here.
//   fill: O(n + log8 capacity). set_rule, load: a pass over the rows below end(). Memory: 8 bytes a row
//   in single precision, else 16, beside the tree; pages that were never written are not backed by memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "priority_rows.h"
#include "random.h"
#include "sum_tree.h"

namespace gleanrl {

class Priorities {
 public:
  // Half of what the tree takes: room for the rounding of a power.
  static constexpr double kLargestLeaf = SumTree::kLargest / 2;

  // How leaves come from raw priorities: alpha and eps finite, 0 or more, eps at most 2^960.
  struct Rule {
    double alpha = 1.0, eps = 0.0;
  };
  // How a batch is weighted: leaf^-beta, divided by that of the smallest positive leaf there is, or with `by_batch` by
  // the largest weight of the batch, so that that one is exactly 1.
  struct WeightRule {
    double beta = 1.0;
    bool by_batch = false;
  };

  // capacity >= 1 rows, none in use; alpha 1 and eps 0. std::bad_alloc if the memory can't be had.
  Priorities(std::int64_t capacity, bool single);

  std::int64_t capacity() const { return tree_.capacity(); }
  bool single() const { return rows_.single(); }
  // The largest raw priority that can be kept.
  double largest() const;
  const Rule& rule() const { return rule_; }
  double total() const { return tree_.total(); }
  // The smallest positive leaf, 0 if there is none.
  double min_positive() const { return tree_.min_positive(); }
  // No row from here on was ever filled, updated, remembered or blocked.
  std::int64_t end() const { return rows_.end(); }

  // From now on leaves follow `rule`; those of rows in use are computed anew, if it differs.
  void set_rule(const Rule& rule);

  // Rows (start + i) % capacity, for i in [0, n), come in use with this raw priority. start in [0, capacity),
  // n <= capacity. What was remembered of their last draws stays: it tells late updates from timely ones.
  void fill(std::int64_t start, std::int64_t n, double raw);

  // The raw priority for new rows: the largest one that an update brought, or with `within` the largest one of the
  // rows in use, blocked ones included. 1 if there is none.
  double default_priority(bool within);
  // The largest raw priority that an update brought (dropped ones don't count).
  std::optional<double> max_seen() const { return max_seen_; }
  void set_max_seen(std::optional<double> raw);

  // Row index[i] gets raw priority raw[i], of either precision. Pairs whose index is -1 are left out, whatever their
  // priority. Any other index lies in [0, limit), limit <= capacity. A row is dropped if written[row] is no longer
  // expected[i], or, if `expected` is null, no longer what it was at the row's last draw (a row that was never drawn is
  // accepted). Returns the number of dropped ones.
  std::int64_t update(std::span<const std::int64_t> index, std::span<const double> raw, std::int64_t limit,
                      const std::int64_t* written, const std::int64_t* expected);
  std::int64_t update(std::span<const std::int64_t> index, std::span<const float> raw, std::int64_t limit,
                      const std::int64_t* written, const std::int64_t* expected);

  // index[i] = a row drawn with uniform[i] in [0, 1), weight[i] = its importance weight, generation[i] =
  // written[index[i]]. With `served` it is remembered.
  void draw(std::span<const double> uniform, const WeightRule& rule, const std::int64_t* written, std::int64_t* index,
            float* weight, std::int64_t* generation, bool served);
  // The same with the next n uniforms of a generator, which stays where it is if the call throws.
  void draw(Random& random, std::int64_t n, const WeightRule& rule, const std::int64_t* written, std::int64_t* index,
            float* weight, std::int64_t* generation, bool served);

  // From now on generation[i] is that of the last draw of row index[i].
  void remember(std::span<const std::int64_t> index, const std::int64_t* generation);

  // Row index[i] is blocked if flag[i] is not 0, else unblocked, until the next such call. It may be in use or not.
  void block(std::span<const std::int64_t> index, const std::uint8_t* flag);

  // value[i] = the raw priority of row index[i], 0 if it is not in use.
  void get(std::span<const std::int64_t> index, double* value) const;
  // value[i] = the leaf of row index[i].
  void get_leaves(std::span<const std::int64_t> index, double* value) const { tree_.get(index, value); }

  // No row is in use or blocked, no draw remembered, no update seen; the rule stays.
  void clear();

  // raw[i] and mark[i] of the rows i in [0, end()). Marks are bits: in use, drawn, blocked, generation.
  void save(double* raw, std::uint32_t* mark) const;
  // The rows [0, n) as they were saved, the others as after clear(). n <= capacity. max_seen() stays.
  void load(std::span<const double> raw, const std::uint32_t* mark);

  // std::logic_error if a leaf isn't what the rule makes of its row, or a summary isn't what the rows make it.
  void check_valid() const;

 private:
  void check_draw(const WeightRule& rule, std::size_t n) const;
  // NaN fails both comparisons. "&", not "&&": a loop over it has no branch.
  bool is_legal(double raw) const { return (raw >= 0.0) & (raw <= largest()); }
  double rounded(double raw) const;
  void check_raw(const char* call, std::span<const double> raw) const;
  double checked_leaf(const char* call, const Rule& rule, double raw) const;
  void compute_leaves(const Rule& rule, std::int64_t first, std::int64_t n, double* leaf) const;
  void refresh_leaves(const Rule& rule);
  template <class Raw>
  std::int64_t update_rows(std::span<const std::int64_t> index, std::span<const Raw> raw, std::int64_t limit,
                           const std::int64_t* written, const std::int64_t* expected);

  SumTree tree_;
  PriorityRows rows_;
  Rule rule_;
  std::optional<double> max_seen_;
  std::vector<std::int64_t> row_work_;
  std::vector<double> raw_work_, leaf_work_;
};

}  // namespace gleanrl
