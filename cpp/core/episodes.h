// The episode table of a ring buffer: it maps stored slots to trajectories, so that slices are drawn and listed without
// reading the stored rows. Every write updates it.
//
// Ring.      The ring holds `capacity` time steps of `num_streams` streams with a common time cursor. The slot of a
//   step is (its place in the ring) * num_streams + (its stream), as in a flattened storage of shape [capacity,
//   *streams].
// Trajectory. A *run* is a maximal sequence of consecutive stored steps of one stream without an end inside. A run ends
//   after a step with a set end flag, and before a step whose id (in any id column) differs from the previous one. It
//   also ends at the write cursor, because the newest step is never followed by the oldest one. Overwritten steps no
//   longer belong to a run. Every stored step belongs to exactly one run.
// Order.     Runs are numbered stream by stream, the oldest first. Number, start and length of the runs depend only on
//   the stored steps. So a table that gets all writes again makes the same draws.
// Draws.     Each slice uses two uniforms: the first selects a run, the second its first step. All runs have the same
//   probability. In a run of n steps the first steps 0 to n - slice_len have the same probability. Strict draws use
//   only runs of at least slice_len steps. Other draws use all runs, and return a shorter run completely. With room
//   before and after (`left`, `right`), first steps from -left to n - slice_len + right are drawn, and the slice is cut
//   to the run. It is never empty, because `left` and `right` are below slice_len, and no slice starts after the last
//   step.
// Counters.  Steps are counted in 64 bits: at 10^9 steps a second the counter lasts 290 years.
// Failure.   Every argument is checked before anything changes or is written. A call that throws has changed nothing,
//   except that a draw may have built an index of run lengths, which has no visible effect. std::out_of_range for a
//   slot, std::invalid_argument for any other value, std::runtime_error for a draw if no run can be drawn.
// Threads.   The table takes no lock, and a draw may build an index: only one call at a time. A caller that shares a
//   table holds one lock around each call.
// Cost.      on_write: one pass over the flags and ids, then O(runs that begin, end or vanish + streams). draw: O(1)
//   per slice with one stream, O(log streams) with several. The first draw with a new minimal run length visits every
//   run once. The indexes of the kMostIndexes lengths used last are kept up to date. locate: O(log runs) per slot.
//   Memory: 8 bytes per run, and 16 bytes for each run in each index.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "fifo.h"

namespace gleanrl {

class Episodes {
 public:
  static constexpr std::size_t kMostIndexes = 8;

  // Options of a draw; see "Draws" above.
  struct SliceRule {
    std::int64_t slice_len;  // in [1, 2^61]
    bool strict = true;      // use only runs of at least slice_len steps
    std::int64_t left = 0;   // how many steps before its run a slice may begin, in [0, slice_len)
    std::int64_t right = 0;  // how many steps after its run a slice may end, in [0, slice_len)
  };

  // capacity and num_streams are at least 1. `now`: the first value of the step counter, at least 0.
  Episodes(std::int64_t capacity, std::int64_t num_streams, std::int64_t now = 0);

  std::int64_t capacity() const { return capacity_; }
  std::int64_t num_streams() const { return num_streams_; }
  // The step counter: the first value plus all steps written since. clear() sets it to 0.
  std::int64_t now() const { return now_; }
  // Steps stored in each stream.
  std::int64_t stored() const { return stored_; }
  // The place in the ring at which the next write begins.
  std::int64_t cursor() const { return cursor_; }

  // Records a write of the steps start, start + 1, ..., start + count - 1 (around the end) of every stream, oldest
  // first. ends[i * num_streams + s] is not 0 if step i of stream s is the last one of its trajectory. An empty `ends`
  // means no step is. ids: any number of columns of the same shape. If the previous step was written without ids, or
  // with another number of columns, a step begins a run. A write begins at the cursor, except the first write and a
  // write that replaces everything. To build the table of a ring in use, call clear(), then write the steps from its
  // cursor to the end, then the rest.
  void on_write(std::int64_t start, std::int64_t count, std::span<const std::uint8_t> ends,
                std::span<const std::int64_t* const> ids);

  // Removes all steps. The next write may begin anywhere.
  void clear();

  // The number of runs with at least min_len steps; num_runs(1) counts all.
  std::int64_t num_runs(std::int64_t min_len) const;
  // Writes the first slot and the length of each of these runs, in order; returns their number.
  std::int64_t list(std::int64_t min_len, std::int64_t* first, std::int64_t* length) const;

  // Draws n slices with 2 * n uniforms in [0, 1). first[i] is the slot of the first step, and length[i] the number of
  // steps (slice_len unless the slice is cut). Returns the sum of the lengths.
  std::int64_t draw(const SliceRule& rule, std::span<const double> uniform, std::int64_t* first, std::int64_t* length);

  // before[i] = the number of steps of the run of slot[i] before this slot; after[i] = the number from this slot on, at
  // least 1. A slice of L steps fits at slot[i] if after[i] >= L.
  void locate(std::span<const std::int64_t> slot, std::int64_t* before, std::int64_t* after) const;

  // Writes the slots of n slices. Slice i takes length[i] places in `slot`. If stride isn't 0, it takes `stride` places
  // (length[i] <= stride), and its last slot is repeated at the end. If `last` isn't null, it gets 1 at the last step
  // of each slice, and 0 elsewhere, also for repeated slots. first[i] is any slot; a slice may cross the end of a run.
  void expand(std::span<const std::int64_t> first, std::span<const std::int64_t> length, std::int64_t stride,
              std::int64_t* slot, std::uint8_t* last) const;

  // Throws std::logic_error if the runs don't partition the stored steps, or an index doesn't match the runs.
  void check_valid() const;

 private:
  static constexpr std::int64_t kOpen = INT64_MAX;

  struct Stream {
    Fifo<std::int64_t> starts;  // the step counter at the first step of every run; a run ends at the next start
    bool open = false;          // whether the next step may continue the last run
  };
  struct Run {
    std::int64_t start, end;
    std::int64_t steps() const { return end - start; }
  };
  // The runs of every stream with at least min_len steps. The oldest may have lost steps; the newest may be open.
  struct Index {
    std::int64_t min_len, last_use;
    std::vector<Fifo<Run>> streams;
    // For each stream, the number of runs in the streams before it; num_streams + 1 values. The first draw after a
    // write computes them.
    std::vector<std::int64_t> runs_before;
    bool counted = false;
  };
  struct Cut {
    std::int64_t step, stream;
  };

  std::int64_t oldest() const { return now_ - stored_; }
  // The part of a run that is still stored.
  Run stored_of(Run run) const { return {std::max(run.start, oldest()), std::min(run.end, now_)}; }
  std::int64_t slot_of(std::int64_t step, std::int64_t stream) const;
  Run run_at(const Stream& stream, std::int64_t number) const;
  std::int64_t run_of(const Stream& stream, std::int64_t step) const;

  void find_cuts(std::int64_t count, std::span<const std::uint8_t> ends, std::span<const std::int64_t* const> ids);
  void add_run(Index& index, std::int64_t stream, Run run) const;
  void drop_short(Index& index, std::int64_t stream) const;
  Index& index_for(std::int64_t min_len);
  static void count_runs(Index& index);
  Run pick(const Index& index, double uniform, std::int64_t& stream) const;

  std::int64_t capacity_, num_streams_;
  std::int64_t now_ = 0, stored_ = 0, cursor_ = 0;
  std::int64_t uses_ = 0;
  std::vector<Stream> streams_;
  std::vector<std::int64_t> last_ids_;  // ids of the newest step: column by column, one for each stream
  std::int64_t id_columns_ = 0;
  std::vector<Index> indexes_;
  std::vector<Cut> cuts_;
};

}  // namespace gleanrl
