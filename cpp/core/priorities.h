// The priorities of a buffer's rows. Each draw, update or write of a prioritized sampler is one call.
//
// A row is in use after it was filled or updated. The object stores for each row the raw priority from the caller, the
// generation at its last draw, and whether it is blocked. A sum tree stores the row's leaf:
//   leaf = (raw + eps)^alpha    if the row is in use and not blocked
//   leaf = 0                    otherwise: the row is never drawn.
// Leaves are always computed from raw priorities, never from older leaves.
//
// Values.    Raw priorities are in [0, largest()]: up to 2^960, or up to float32's largest number in `single`
//   precision. In single precision they are rounded first, but a positive priority is never rounded to 0. -0.0 is
//   stored as 0.0. Leaves have a relative error of about 10^-9. They are 1 if alpha is 0, and exactly raw + eps if
//   alpha is 1. Positive leaves below about 2^-1000 are raised to it, so that a row with a positive priority can always
//   be drawn. A leaf above kLargestLeaf is refused.
// Generations. The caller counts in `written` (int64, one per row) how often each row was written. The object stores
//   the low 29 bits. So a late update is accepted by mistake only if exactly k * 2^29 writes happened since the draw.
//   Generations that the caller passes to `update` are compared completely.
// Draws, duplicates. As in SumTree: if a call repeats a row, the last value wins.
// State.     end(), raw priorities and marks (save), the rule and max_seen(). An object that gets this state by `load`,
//   set_rule and set_max_seen continues exactly like this one, including blocked rows.
// Failure.   Every argument is checked before anything changes or is written. A call that throws has changed nothing.
//   std::out_of_range for a row, std::invalid_argument for any other value, std::runtime_error for a draw if no row can
//   be drawn.
// Threads.   The object takes no lock: only one call at a time, including draws. A caller that shares the object holds
//   one lock around each call.
// Cost.      draw, update: the cost of SumTree, and one more cache miss per row for `written` and one for the row
//   itself. fill: O(n + log8 capacity). set_rule, load: a pass over the rows below end(). Memory in addition to the
//   tree: 8 bytes per row in single precision, else 16. Pages that were never written aren't backed by memory.
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
  // Half of the tree's limit, as a margin for the rounding of a power.
  static constexpr double kLargestLeaf = SumTree::kLargest / 2;

  // The parameters that map raw priorities to leaves. Both are finite and at least 0; eps is at most 2^960.
  struct Rule {
    double alpha = 1.0, eps = 0.0;
  };
  // The importance weights of a batch: leaf^-beta, divided by this power of the smallest positive leaf of all rows.
  // With `by_batch` it is divided by the largest weight of the batch instead, which becomes exactly 1.
  struct WeightRule {
    double beta = 1.0;
    bool by_batch = false;
  };

  // capacity >= 1 rows, none in use; alpha is 1 and eps is 0. std::bad_alloc if the memory isn't available.
  Priorities(std::int64_t capacity, bool single);

  std::int64_t capacity() const { return tree_.capacity(); }
  bool single() const { return rows_.single(); }
  // The largest raw priority that can be stored.
  double largest() const;
  const Rule& rule() const { return rule_; }
  double total() const { return tree_.total(); }
  // The smallest positive leaf, 0 if there is none.
  double min_positive() const { return tree_.min_positive(); }
  // The end of the used range: no row from here on was ever filled, updated, remembered or blocked.
  std::int64_t end() const { return rows_.end(); }

  // Sets the rule for leaves. If it differs from the present one, the leaves of all rows in use are recomputed.
  void set_rule(const Rule& rule);

  // Puts the rows (start + i) % capacity, for i in [0, n), in use with this raw priority. start in [0, capacity),
  // n <= capacity. The generations of their last draws stay stored, because they identify late updates.
  void fill(std::int64_t start, std::int64_t n, double raw);

  // The raw priority for new rows: the largest one in any update, or with `within` the largest one of the rows in use,
  // including blocked rows. 1 if there is none.
  double default_priority(bool within);
  // The largest raw priority in any update; dropped updates don't count.
  std::optional<double> max_seen() const { return max_seen_; }
  void set_max_seen(std::optional<double> raw);

  // Sets the raw priority of row index[i] to raw[i], float or double. Pairs whose index is -1 are skipped without a
  // check of their priority. All other indices are in [0, limit), limit <= capacity. A pair is dropped if the row was
  // written since its draw: if written[row] differs from expected[i], or, if `expected` is null, from the generation at
  // the row's last draw. A row that was never drawn is accepted then. Returns the number of dropped pairs.
  std::int64_t update(std::span<const std::int64_t> index, std::span<const double> raw, std::int64_t limit,
                      const std::int64_t* written, const std::int64_t* expected);
  std::int64_t update(std::span<const std::int64_t> index, std::span<const float> raw, std::int64_t limit,
                      const std::int64_t* written, const std::int64_t* expected);

  // index[i] = a row drawn with uniform[i] in [0, 1), weight[i] = its importance weight, generation[i] =
  // written[index[i]]. With `served` the generations are stored, as in `remember`.
  void draw(std::span<const double> uniform, const WeightRule& rule, const std::int64_t* written, std::int64_t* index,
            float* weight, std::int64_t* generation, bool served);
  // The same with the next n uniforms of a generator, whose state doesn't change if the call throws.
  void draw(Random& random, std::int64_t n, const WeightRule& rule, const std::int64_t* written, std::int64_t* index,
            float* weight, std::int64_t* generation, bool served);

  // Stores generation[i] as the generation at the last draw of row index[i].
  void remember(std::span<const std::int64_t> index, const std::int64_t* generation);

  // Blocks row index[i] if flag[i] isn't 0, otherwise unblocks it. The row needn't be in use.
  void block(std::span<const std::int64_t> index, const std::uint8_t* flag);

  // value[i] = the raw priority of row index[i]; 0 if the row isn't in use.
  void get(std::span<const std::int64_t> index, double* value) const;
  // value[i] = the leaf of row index[i].
  void get_leaves(std::span<const std::int64_t> index, double* value) const { tree_.get(index, value); }

  // Resets everything except the rule: no row is in use or blocked, and no draws or updates are stored.
  void clear();

  // Writes raw[i] and mark[i] of the rows i in [0, end()). A mark holds the bits in use, drawn, blocked, and the
  // generation.
  void save(double* raw, std::uint32_t* mark) const;
  // Sets the rows [0, n) to saved values, and all other rows as clear() does. n <= capacity. max_seen() doesn't change.
  void load(std::span<const double> raw, const std::uint32_t* mark);

  // Throws std::logic_error if a leaf differs from its row's value under the rule, or a summary differs from the rows.
  void check_valid() const;

 private:
  void check_draw(const WeightRule& rule, std::size_t n) const;
  // NaN fails both comparisons. "&" instead of "&&" keeps branches out of loops.
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
