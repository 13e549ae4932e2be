// Parallel reading of files into memory, with comparison of checksums.
//
// A file is read in steps of 256 KiB. Each step is checked, and copied to further targets, while it is still in the
// cache. So a checksum costs a fifth of the reading instead of a second pass over memory. The first access to large new
// memory costs more than either, so the threads share it, too.
//
// Threads.   A call starts threads that end with it. Each block is read by one thread. If no thread can be
//   started, the caller's thread reads everything.
// Memory.    The caller keeps all memory alive, and its parts don't overlap. Bytes that no piece wants are read into
//   the call's scratch memory, because their checksum is needed.
// Safety.    The last part of a path isn't followed if it is a link. Only plain files are read.
// Failure.   A call returns the first damage in the order of the readings. Memory that was read stays written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace gleanrl {

// Memory for the next bytes of a file; without an address the bytes are skipped.
struct Piece {
  std::byte* at;
  std::size_t bytes;
};

// The destination of consecutive rows, given as runs. The run k begins at row from[k] (from[0] is 0) and ends at the
// next one. Its rows go to the rows to[k], to[k] + stride, ... of the memory at `at`. If to[k] is negative, they are
// skipped.
struct Target {
  std::byte* at;
  std::size_t stride;
  std::span<const std::int64_t> from, to;
};

// A range of bytes in a sequence of rows: its length, and the number of bytes before it. It may begin and end inside of
// a row.
struct Rows {
  std::size_t row_bytes, before, bytes;
  std::vector<Target> targets;
};

// The content of a file from `offset` on: consecutive pieces, or rows.
struct Reading {
  const char* path;
  std::size_t offset;
  std::span<const Piece> pieces;
  std::optional<Rows> rows;
  // The checksum of each block of bytes. The last block may be shorter, and ends with the last piece. Empty: don't
  // compare.
  std::vector<std::uint32_t> checksums;
};

struct Damage {
  enum class Kind { kSystem, kShort, kChecksum };
  std::size_t number;  // the position of the reading
  Kind kind;
  // kSystem: errno. kChecksum: the offset of the block in the file. kShort: the length of the file.
  std::int64_t detail;
};

// Reads files. Each block of `block` bytes has one checksum. At most `threads` threads read.
std::optional<Damage> read_files(std::span<const Reading> files, std::size_t block, int threads);

// Rows in memory.
struct Source {
  const std::byte* bytes;
  Rows rows;
};

// Copies rows in memory to their targets, with at most `threads` threads.
void spread_rows(std::span<const Source> columns, int threads);

}  // namespace gleanrl
