#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "checksum.h"

namespace gleanrl {
namespace {

using Kind = Damage::Kind;
using std::size_t;

// The number of bytes of one read: it fits into the L2 cache, and the system call costs little compared with it.
constexpr size_t kStep = size_t{256} << 10;
constexpr size_t kMostPieces = 64;
// The least average number of bytes in a run for reading runs in place. Shorter runs are read together into scratch
// memory, which stays in the cache, and copied from there.
constexpr size_t kLongRun = size_t{16} << 10;
// With fewer parts of rows in memory, starting a thread costs more than it saves.
constexpr size_t kFewParts = 3;

struct Fault {
  Kind kind;
  std::int64_t detail;
};

Fault system_fault() { return {Kind::kSystem, errno}; }

class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }
  int number() const { return number_; }

  // Closes the previous file, and opens a plain file. O_NONBLOCK keeps `open` from waiting at a FIFO.
  std::optional<Fault> open(const char* path) {
    close();
    number_ = ::open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat state;
    if (number_ < 0 || ::fstat(number_, &state) != 0) return system_fault();
    if (!S_ISREG(state.st_mode)) return Fault{Kind::kSystem, EINVAL};
    return std::nullopt;
  }

 private:
  void close() {
    if (number_ >= 0) ::close(number_);
  }
  int number_ = -1;
};

// A list of memory ranges for consecutive bytes of a file.
struct Memory {
  std::array<iovec, kMostPieces> parts;
  int count = 0;

  bool full() const { return count == static_cast<int>(kMostPieces); }
  void add(std::byte* at, size_t bytes) { parts[count++] = {at, bytes}; }

  // Calls `each` for every range of the first `bytes` bytes: with its address, its length, and the bytes before it.
  template <class Each>
  void first(size_t bytes, Each each) const {
    for (size_t p = 0, before = 0; before < bytes; ++p) {
      const size_t part = std::min(bytes - before, parts[p].iov_len);
      each(static_cast<std::byte*>(parts[p].iov_base), part, before);
      before += part;
    }
  }
};

// Calls `each` for every destination range of the bytes [begin, end) of rows: with its address (null: skip), its
// length, and the bytes before it. Stops if `each` returns false.
template <class Each>
void places(const Target& target, size_t row_bytes, size_t begin, size_t end, Each each) {
  const auto next =
      std::upper_bound(target.from.begin(), target.from.end(), static_cast<std::int64_t>(begin / row_bytes));
  auto run = static_cast<size_t>(next - target.from.begin()) - 1;
  for (size_t at = begin; at < end;) {
    const auto first = static_cast<size_t>(target.from[run]);
    const bool last = run + 1 == target.from.size();
    const size_t stop = last ? end : std::min(end, static_cast<size_t>(target.from[run + 1]) * row_bytes);
    if (at >= stop) {
      ++run;
      continue;
    }
    size_t bytes = stop - at;
    std::byte* place = nullptr;
    if (target.to[run] >= 0) {
      const size_t row = at / row_bytes, within = at % row_bytes;
      if (target.stride != 1) bytes = std::min(bytes, row_bytes - within);
      place = target.at + (static_cast<size_t>(target.to[run]) + (row - first) * target.stride) * row_bytes + within;
    }
    if (!each(place, bytes, at - begin)) return;
    at += bytes;
  }
}

void copy_to(const Target& target, size_t row_bytes, size_t begin, const std::byte* source, size_t bytes) {
  places(target, row_bytes, begin, begin + bytes, [&](std::byte* place, size_t part, size_t before) {
    if (place != nullptr) std::memcpy(place, source + before, part);
    return true;
  });
}

// Reads a file into pieces.
class IntoPieces {
 public:
  IntoPieces(std::span<const Piece> pieces, size_t position) : pieces_(pieces), begin_(position) { settle(); }

  // Lists memory for at most `most` bytes from the present position. Skipped pieces get separate ranges in `unwanted`,
  // since the checksum needs all bytes afterwards.
  Memory list(size_t most, std::byte* unwanted) const {
    Memory memory;
    for (size_t p = piece_, begin = begin_, bytes = 0; p < pieces_.size() && bytes < most && !memory.full();
         ++p, begin = 0) {
      const auto [at, size] = pieces_[p];
      const size_t part = std::min(size - begin, most - bytes);
      if (part > 0) memory.add(at == nullptr ? unwanted + bytes : at + begin, part);
      bytes += part;
    }
    return memory;
  }

  void advance(const Memory&, size_t bytes) {
    begin_ += bytes;
    settle();
  }

 private:
  void settle() {
    while (piece_ < pieces_.size() && begin_ >= pieces_[piece_].bytes) begin_ -= pieces_[piece_++].bytes;
  }

  std::span<const Piece> pieces_;
  size_t piece_ = 0, begin_;
};

// Reads a file into rows; long runs are read directly into the first target.
class IntoRows {
 public:
  IntoRows(const Rows& rows, size_t position) : rows_(rows), at_(rows.before + position) {
    if (rows.targets.empty()) return;
    const auto& from = rows.targets.front().from;
    direct_ = from.size() == 1 || static_cast<size_t>(from.back()) * rows.row_bytes / from.size() >= kLongRun;
    direct_ = direct_ && rows.targets.front().stride == 1;
  }

  Memory list(size_t most, std::byte* unwanted) const {
    Memory memory;
    if (direct_) {
      places(rows_.targets.front(), rows_.row_bytes, at_, at_ + most,
             [&](std::byte* place, size_t part, size_t before) {
               memory.add(place == nullptr ? unwanted + before : place, part);
               return !memory.full();
             });
    } else {
      memory.add(unwanted, most);
    }
    return memory;
  }

  void advance(const Memory& memory, size_t bytes) {
    memory.first(bytes, [&](std::byte* found, size_t part, size_t before) {
      for (size_t t = direct_ ? 1 : 0; t < rows_.targets.size(); ++t) {
        copy_to(rows_.targets[t], rows_.row_bytes, at_ + before, found, part);
      }
    });
    at_ += bytes;
  }

 private:
  const Rows& rows_;
  size_t at_;
  bool direct_ = false;
};

size_t size_of(const Reading& reading) {
  if (reading.rows) return reading.rows->bytes;
  size_t total = 0;
  for (const Piece& piece : reading.pieces) total += piece.bytes;
  return total;
}

// Reads the bytes [position, end) after the offset: a block, or a part of one.
template <class Into>
std::optional<Fault> read_block(int file, const Reading& reading, size_t block, size_t position, size_t end,
                                std::byte* unwanted, Into into) {
  const size_t number = position / block;
  std::uint32_t checksum = 0;
  while (position < end) {
    const Memory memory = into.list(std::min(kStep, end - position), unwanted);
    const ssize_t found =
        ::preadv(file, memory.parts.data(), memory.count, static_cast<off_t>(reading.offset + position));
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) return system_fault();
    if (found == 0) return Fault{Kind::kShort, static_cast<std::int64_t>(reading.offset + position)};
    const auto bytes = static_cast<size_t>(found);
    if (!reading.checksums.empty()) {
      memory.first(bytes, [&](const std::byte* at, size_t part, size_t) { checksum = crc32({at, part}, checksum); });
    }
    into.advance(memory, bytes);
    position += bytes;
  }
  if (!reading.checksums.empty() && (number >= reading.checksums.size() || checksum != reading.checksums[number])) {
    return Fault{Kind::kChecksum, static_cast<std::int64_t>(reading.offset + number * block)};
  }
  return std::nullopt;
}

// Calls `work` with the thread's number in at most `count` threads, including the caller's.
template <class Work>
void in_threads(size_t count, Work work) {
  std::vector<std::thread> helpers;
  helpers.reserve(count);
  for (size_t k = 1; k < count; ++k) {
    try {
      helpers.emplace_back(work, k);
    } catch (const std::system_error&) {  // the system's limit of threads is reached
      break;
    }
  }
  work(size_t{0});
  for (auto& helper : helpers) helper.join();
}

// A list of parts that threads take. Each thread has a contiguous share, and helps other threads after it has finished.
// Contiguous shares matter for huge pages: if two threads touch a new page at the same time, both clear a page, and one
// of these is discarded.
class Shares {
 public:
  Shares(size_t parts, size_t threads) : parts_(parts), next_(threads) {
    for (size_t thread = 0; thread < threads; ++thread) next_[thread] = begin(thread);
  }
  size_t threads() const { return next_.size(); }

  // Takes the first part that is left of a share; returns false if no part is left.
  bool next(size_t thread, size_t& number) {
    for (size_t k = 0; k < next_.size(); ++k) {
      const size_t owner = (thread + k) % next_.size();
      if ((number = next_[owner]++) < begin(owner + 1)) return true;
    }
    return false;
  }

 private:
  size_t begin(size_t thread) const { return parts_ * thread / next_.size(); }

  size_t parts_;
  std::vector<std::atomic<size_t>> next_;
};

// A range of bytes in one of several items.
struct Part {
  size_t owner, begin, end;
};

// Cuts items into parts of `step` bytes. The last part of an item may be shorter, and an empty item has one part.
template <class Size>
std::vector<Part> cut(size_t count, size_t step, Size size_of) {
  std::vector<Part> parts;
  for (size_t owner = 0; owner < count; ++owner) {
    const size_t size = size_of(owner);
    size_t begin = 0;
    do {
      const size_t end = begin + std::min(step, size - begin);
      parts.push_back({owner, begin, end});
      begin = end;
    } while (begin < size);
  }
  return parts;
}

size_t threads_for(int threads, size_t shares) {
  return std::max<size_t>(1, std::min(static_cast<size_t>(std::max(threads, 1)), shares));
}

}  // namespace

std::optional<Damage> read_files(std::span<const Reading> files, size_t block, int threads) {
  const auto parts = cut(files.size(), block, [&](size_t file) { return size_of(files[file]); });
  Shares shares(parts.size(), threads_for(threads, parts.size()));
  // The call returns the first damage in the order of files, not the one found first. So parts before a damage are
  // still read, and parts after it are skipped.
  std::atomic<size_t> worst{parts.size()};
  std::mutex lock;
  std::optional<Damage> first;
  const auto unwanted = std::make_unique_for_overwrite<std::byte[]>(shares.threads() * kStep);
  in_threads(shares.threads(), [&](size_t thread) {
    std::byte* const own = unwanted.get() + thread * kStep;
    File open;
    const char* opened = nullptr;  // consecutive parts are often in one file, which stays open
    for (size_t number; shares.next(thread, number);) {
      if (number >= worst) continue;
      const auto [file, begin, end] = parts[number];
      const Reading& reading = files[file];
      std::optional<Fault> fault;
      if (opened == nullptr || std::strcmp(opened, reading.path) != 0) {
        fault = open.open(reading.path);
        opened = fault ? nullptr : reading.path;
      }
      if (!fault && begin < end) {
        fault = reading.rows
                    ? read_block(open.number(), reading, block, begin, end, own, IntoRows(*reading.rows, begin))
                    : read_block(open.number(), reading, block, begin, end, own, IntoPieces(reading.pieces, begin));
      }
      if (!fault) continue;
      const std::lock_guard held(lock);
      if (number < worst) worst = number, first = Damage{file, fault->kind, fault->detail};
    }
  });
  return first;
}

void spread_rows(std::span<const Source> columns, int threads) {
  const auto parts = cut(columns.size(), kStep, [&](size_t column) { return columns[column].rows.bytes; });
  Shares shares(parts.size(), parts.size() < kFewParts ? 1 : threads_for(threads, parts.size()));
  in_threads(shares.threads(), [&](size_t thread) {
    for (size_t number; shares.next(thread, number);) {
      const auto [column, begin, end] = parts[number];
      const auto& [bytes, rows] = columns[column];
      for (const Target& target : rows.targets) {  // the part stays in the cache for all targets
        copy_to(target, rows.row_bytes, rows.before + begin, bytes + begin, end - begin);
      }
    }
  });
}

}  // namespace gleanrl
