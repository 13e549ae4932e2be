// Ends of trajectories, found by comparing rows without the episode table: seams between two writes, and ends inside of
// drawn slices.
//
// Rows.    ``[steps, streams]`` rows of a fixed number of bytes. Rows are equal if all their bits are.
// Threads. Plain functions over the caller's memory.
// Failure. The functions check nothing and never throw: the caller passes valid addresses.
// Cost.    find_seams: one row of each stream if all streams continue or have ended, otherwise at most one pass over
//   the written rows. ends_inside: one access to each column for each row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gleanrl {

// An entry of the outcomes, and the entry of the roots with the same key.
struct Twin {
  const std::byte* newest;   // outcomes of the newest stored step, a row for each stream
  const std::byte* outcome;  // outcomes of the written steps
  const std::byte* root;     // roots of the written steps
  std::int64_t row_bytes;
};

// An end flag with `width` bytes in each row. It is set if one of them isn't 0.
struct EndFlag {
  const std::uint8_t* newest;
  const std::uint8_t* written;
  std::int64_t width;
};

// Sets begins[s] = 1 for streams in which the written steps don't continue the newest stored step: the stored outcome
// differs from the first written root, and no flag ends the stored step. Returns whether there is such a stream.
//
// The comparison is valid only if the written steps chain: the outcome of each step without an end flag equals the root
// of the following step, and at least one step has no flag. Otherwise no stream is marked. Twins that never change from
// step to step are ignored if another one changes, because a constant can't distinguish trajectories.
bool find_seams(std::span<const Twin> twins, std::span<const EndFlag> flags, std::int64_t steps, std::int64_t streams,
                std::uint8_t* begins);

// A column of ids, which are integers of 1, 2, 4 or 8 bytes.
struct IdColumn {
  const std::byte* first;
  std::int64_t row_bytes;
};

// A column of flags.
struct FlagColumn {
  const std::uint8_t* first;
  std::int64_t width;
};

// Returns whether a trajectory ends at a row i with inner[i] != 0: a flag of row slot[i] is set, or an id differs from
// that of row slot[i + 1]. If there is a column `ahead`, flags count only in rows where it holds 1 (n-step data).
bool ends_inside(std::span<const std::int64_t> slot, const std::uint8_t* inner, std::span<const FlagColumn> flags,
                 std::span<const IdColumn> ids, const IdColumn* ahead);

}  // namespace gleanrl
