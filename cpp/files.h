// Files read into memory, and compared with their checksums on the way.
//
// A file is read a quarter of a MB at once, which is checked, and copied to where else it belongs, while it's still in
// the cache: a checksum costs a fifth of the reading then, not a second pass over memory. Large memory that nobody
// touched before costs more than either: the threads share that, too.
//
// Threads.   A call's own threads, which end with it; each block of a file is read by one of them. No thread is needed
//   but the caller's: where none can be started it does all.
// Memory.    The caller keeps all of it alive, and apart; what nobody wants is read into some of the call's own.
// Safety.    A path's last part is never followed as a link, and what isn't a plain file isn't read.
// Failure.   A call returns the first thing that is wrong, in the order of the readings; what was read stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace gleanrl {

// Memory that is filled; without an address, bytes that nobody wants.
struct Piece {
  std::byte* at;
  std::size_t bytes;
};

// Where rows go that follow each other. From row from[k] on to the next run they go to the rows to[k], to[k] + stride and
// so on of the memory at `at`, or nowhere if that is negative; from[0] is 0.
struct Target {
  std::byte* at;
  std::size_t stride;
  std::span<const std::int64_t> from, to;
};

// Bytes of rows, some of the middle of them maybe: how many, and how many stand before them.
struct Rows {
  std::size_t row_bytes, before, bytes;
  std::vector<Target> targets;
};

// What stands in a file from `offset` on: pieces, one after the other, or rows.
struct Reading {
  const char* path;
  std::size_t offset;
  std::span<const Piece> pieces;
  std::optional<Rows> rows;
  // Of each block of bytes; the last one may be short, and ends with the last piece. None for no comparing.
  std::vector<std::uint32_t> checksums;
};

struct Damage {
  enum class Kind { kSystem, kShort, kChecksum };
  std::size_t number;  // of the reading
  Kind kind;
  // errno of kSystem; else where in the file the block begins, or the file ends.
  std::int64_t detail;
};

// `block` bytes have one checksum; at most `threads` threads read.
std::optional<Damage> read_files(std::span<const Reading> files, std::size_t block, int threads);

// Rows in memory.
struct Source {
  const std::byte* bytes;
  Rows rows;
};

// Copies rows in memory to where they go; at most `threads` threads copy.
void spread_rows(std::span<const Source> columns, int threads);

}  // namespace gleanrl
