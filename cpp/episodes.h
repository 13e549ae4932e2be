// The episode table of a ring: which stored slots belong to which trajectory, kept up to date at every write, so that
// slices are drawn and listed without ever looking at the stored rows.
//
// Ring.      `capacity` time steps times `num_streams` streams that share the time cursor. The slot of a step is
//   its place in the ring * num_streams + its stream: a storage of shape [capacity, *streams], flattened.
// Trajectory. A maximal run of steps that follow each other in one stream, without an end in between. A run ends after
//   a step whose end flag is set, before a step whose id (in any id column) differs from that of the step before, and
//   at the write cursor: the newest and the oldest step are never neighbours. The part of a run that was overwritten
//   is gone from it: a run is what is stored of it. Every stored step belongs to exactly one run.
// Order.     Runs are numbered stream by stream, the oldest first. Number, start and length of the runs are a pure
//   function of what is stored: a table that was told everything again draws the same.
// Draws.     Each slice takes two uniforms: the first picks a run, the second its first step. Runs are picked
//   with equal probability. A run of n steps offers the first steps 0 to n - slice_len, each with equal probability.
//   Strict draws know only runs of slice_len steps and more; the others know all, and take a shorter run whole. With
//   room before and after (`left`, `right`) first steps from -left to n - slice_len + right are drawn, and the slice is
//   cut to the run: never empty, since neither exceeds slice_len - 1 and no slice starts after the last step.
// Counters.  Steps are counted from the first write on in 64 bits: at 10^9 steps a second that lasts 290 years.
// Failure.   Every argument is checked before anything changes or is written; a call that throws has changed nothing
//   (a draw may have built an index of run lengths, which nobody can see). std::out_of_range for a slot,
//   std::invalid_argument for any other value, std::runtime_error for a draw without a run to draw from.
// Threads.   Nothing is locked here, and a draw may build an index: one call at a time. A caller that shares a table
//   holds one lock around each call.
// Cost.      on_write: one pass over its flags and ids, then O(runs that begin, end or vanish + streams). draw: O(1) a
//   slice with one stream, O(log streams) with several. The first draw with a new shortest length of runs looks at
//   every run once; the indexes of the kMostIndexes lengths used last are kept up to date.
//   locate: O(log runs) a slot. Memory: 8 bytes a run, and 16 more for each run in each index.
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

  // How slices are drawn; see "Draws" above.
  struct SliceRule {
    std::int64_t slice_len;  // in [1, 2^61]
    bool strict = true;      // only runs of slice_len steps and more
    std::int64_t left = 0;   // steps that a slice may begin before its run, in [0, slice_len)
    std::int64_t right = 0;  // steps that a slice may end after its run, in [0, slice_len)
  };

  // capacity and num_streams of 1 and more. `now`: where the count of steps begins, 0 and more.
  Episodes(std::int64_t capacity, std::int64_t num_streams, std::int64_t now = 0);

  std::int64_t capacity() const { return capacity_; }
  std::int64_t num_streams() const { return num_streams_; }
  // Steps told of since clear(), or since construction and where it let them begin.
  std::int64_t now() const { return now_; }
  // Steps stored in each stream.
  std::int64_t stored() const { return stored_; }
  // The place that the next write begins at.
  std::int64_t cursor() const { return cursor_; }

  // Steps start, start + 1, ... start + count - 1 (around the end) of every stream were written, the oldest first.
  // ends[i * num_streams + s] is not 0 if step i of stream s is the last one of its trajectory; empty: none is.
  // ids: any number of columns of the same shape. A step whose predecessor was written without ids, or with
  // another number of columns, begins a run.
  // A write begins at the cursor, except the first one and one that replaces everything.
  // To take over a ring that has been in use: clear(), then the steps from its cursor to the end, then the rest.
  void on_write(std::int64_t start, std::int64_t count, std::span<const std::uint8_t> ends,
                std::span<const std::int64_t* const> ids);

  // Nothing is stored, and the next write may begin anywhere.
  void clear();

  // Runs of min_len steps and more; num_runs(1) is all of them.
  std::int64_t num_runs(std::int64_t min_len) const;
  // The first slot and the length of each of them, in order; returns how many.
  std::int64_t list(std::int64_t min_len, std::int64_t* first, std::int64_t* length) const;

  // n slices with 2 * n uniforms in [0, 1): first[i] = the slot of its first step, length[i] = its steps (slice_len
  // unless cut). Returns the sum of the lengths.
  std::int64_t draw(const SliceRule& rule, std::span<const double> uniform, std::int64_t* first, std::int64_t* length);

  // before[i] = steps that the run of slot[i] has before it, after[i] = those that it has from it on (at least 1).
  // slot[i] - before is the first step of the run; a slice of L steps fits at slot[i] if after[i] >= L.
  void locate(std::span<const std::int64_t> slot, std::int64_t* before, std::int64_t* after) const;

  // The slots of n slices. Slice i takes length[i] places in `slot`, or `stride` places if that is not 0 (then
  // length[i] <= stride, and its last slot is repeated behind it). last, if not null, gets 1 at the last step of each
  // slice and 0 elsewhere, repeated slots included. first[i] is any slot; a slice doesn't have to lie in a run.
  void expand(std::span<const std::int64_t> first, std::span<const std::int64_t> length, std::int64_t stride,
              std::int64_t* slot, std::uint8_t* last) const;

  // std::logic_error if the runs don't partition what is stored, or an index doesn't match the runs.
  void check_valid() const;

 private:
  static constexpr std::int64_t kOpen = INT64_MAX;

  struct Stream {
    Fifo<std::int64_t> starts;  // first step of every run, in steps since the beginning; its end is the next start
    bool open = false;          // whether the next step may go on with the last run
  };
  struct Run {
    std::int64_t start, end;
    std::int64_t steps() const { return end - start; }
  };
  // The runs of min_len steps and more, of every stream. The oldest may have lost steps since, the newest be open.
  struct Index {
    std::int64_t min_len, last_use;
    std::vector<Fifo<Run>> streams;
    // The runs of the streams before each one, num_streams + 1 values; counted by the first draw after a write.
    std::vector<std::int64_t> runs_before;
    bool counted = false;
  };
  struct Cut {
    std::int64_t step, stream;
  };

  std::int64_t oldest() const { return now_ - stored_; }
  // What is stored of a run.
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
  std::vector<std::int64_t> last_ids_;  // column by column, one for each stream
  std::int64_t id_columns_ = 0;
  std::vector<Index> indexes_;
  std::vector<Cut> cuts_;
};

}  // namespace gleanrl
