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

// Read at once: fits the second cache, and a call costs little beside it.
constexpr size_t kStep = size_t{256} << 10;
constexpr size_t kMostPieces = 64;
// Of a run of rows on the average: shorter ones are copied from memory that stays in the cache, not read one by one.
constexpr size_t kLongRun = size_t{16} << 10;
// Fewer parts of rows in memory than that aren't worth a thread.
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

  // Opens a plain file in the place of the one before.
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

// Memory for some bytes of a file, in their order.
struct Memory {
  std::array<iovec, kMostPieces> parts;
  int count = 0;

  bool full() const { return count == static_cast<int>(kMostPieces); }
  void add(std::byte* at, size_t bytes) { parts[count++] = {at, bytes}; }

  // Calls `each` with where the first `bytes` are, and how many stand before them.
  template <class Each>
  void first(size_t bytes, Each each) const {
    for (size_t p = 0, before = 0; before < bytes; ++p) {
      const size_t part = std::min(bytes - before, parts[p].iov_len);
      each(static_cast<std::byte*>(parts[p].iov_base), part, before);
      before += part;
    }
  }
};

// Calls `each` with where bytes [begin, end) of rows go (null for nowhere), how many, and how many stand before them,
// until it returns false.
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

// How a file is read into its pieces.
class IntoPieces {
 public:
  IntoPieces(std::span<const Piece> pieces, size_t position) : pieces_(pieces), begin_(position) { settle(); }

  // Lists memory for at most `most` bytes from here on. All of it is checked afterwards, so that each piece that nobody
  // wants has a place of its own among as many bytes.
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

// How a file is read into rows: to the first target itself where that takes long runs of them.
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

// Reads bytes [position, end) behind the offset, one block or a part of one.
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

// Calls `work` with the number of a thread in each of `count` threads at most, of which the caller's is one.
template <class Work>
void in_threads(size_t count, Work work) {
  std::vector<std::thread> helpers;
  helpers.reserve(count);
  for (size_t k = 1; k < count; ++k) {
    try {
      helpers.emplace_back(work, k);
    } catch (const std::system_error&) {  // the system has no more
      break;
    }
  }
  work(size_t{0});
  for (auto& helper : helpers) helper.join();
}

// Parts of a work, of which each thread begins with a share of its own, and helps the others when that is done.
// Neighbours fill the same large pages, and of two threads that touch one at once each clears one, of which one is
// thrown away.
class Shares {
 public:
  Shares(size_t parts, size_t threads) : parts_(parts), next_(threads) {
    for (size_t thread = 0; thread < threads; ++thread) next_[thread] = begin(thread);
  }
  size_t threads() const { return next_.size(); }

  // Takes a part, the lowest of a share; false if none is left.
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

// Bytes of one of several things.
struct Part {
  size_t owner, begin, end;
};

// Cuts things into parts of `step` bytes, the last ones maybe less; what is empty is one part.
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
  // The first damage in the order of files is told, whichever is found first: what stands before it is read on.
  std::atomic<size_t> worst{parts.size()};
  std::mutex lock;
  std::optional<Damage> first;
  const auto unwanted = std::make_unique_for_overwrite<std::byte[]>(shares.threads() * kStep);
  in_threads(shares.threads(), [&](size_t thread) {
    std::byte* const own = unwanted.get() + thread * kStep;
    File open;
    const char* opened = nullptr;  // neighbours are often of one file
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
      for (const Target& target : rows.targets) {  // in the cache for all of them
        copy_to(target, rows.row_bytes, rows.before + begin, bytes + begin, end - begin);
      }
    }
  });
}

}  // namespace gleanrl
