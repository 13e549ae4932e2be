// Where trajectories end by what rows hold, without the table of trajectories: seams between two writes, and ends inside
// of slices that were drawn.
//
// Rows.    ``[steps, streams]`` of them, each so many bytes; equal means bit for bit.
// Threads. Plain functions over the caller's memory.
// Failure. Nothing is checked and nothing thrown: the caller knows what is there.
// Cost.    find_seams: one row of each stream where all go on or are over, else at most one pass over the written rows.
//   ends_inside: one look at each column for each row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gleanrl {

// An outcome of steps and the like entry of their roots.
struct Twin {
  const std::byte* newest;   // the outcomes of the newest stored step, a row for each stream
  const std::byte* outcome;  // those of the written steps
  const std::byte* root;     // their roots
  std::int64_t row_bytes;
};

// An end flag, `width` bytes a row; any that isn't 0 sets it.
struct EndFlag {
  const std::uint8_t* newest;
  const std::uint8_t* written;
  std::int64_t width;
};

// begins[s] = 1 in streams where the written steps don't go on with the newest one: its outcome differs from the first
// root, and no flag ends it. That counts only if the written steps chain: at least one of them, and each that no flag
// ends, leads to the one behind it. Of several twins those count that change from step to step, if any does. Returns
// whether there is such a stream.
bool find_seams(std::span<const Twin> twins, std::span<const EndFlag> flags, std::int64_t steps, std::int64_t streams,
                std::uint8_t* begins);

// A column of ids, whole numbers of 1, 2, 4 or 8 bytes.
struct IdColumn {
  const std::byte* first;
  std::int64_t row_bytes;
};

// A column of flags.
struct FlagColumn {
  const std::uint8_t* first;
  std::int64_t width;
};

// Whether a row i with inner[i] != 0 has a flag set, or another id than the row slot[i + 1]. Flags count where the number
// at its slot in `ahead`, if there is such a column, is 1.
bool ends_inside(std::span<const std::int64_t> slot, const std::uint8_t* inner, std::span<const FlagColumn> flags,
                 std::span<const IdColumn> ids, const IdColumn* ahead);

}  // namespace gleanrl
