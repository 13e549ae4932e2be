#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
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

struct Fault {
  Kind kind;
  std::int64_t detail;
};

Fault system_fault() { return {Kind::kSystem, errno}; }

class File {
 public:
  explicit File(const char* path) : number_(::open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const { return number_; }

 private:
  int number_;
};

// Where the next byte goes.
class Place {
 public:
  explicit Place(std::span<const Piece> pieces) : pieces_(pieces) {}

  // Lists memory for at most `most` bytes from here on; returns how many pieces it is. All of it is checked afterwards,
  // so that each piece that nobody wants has a place of its own among as many bytes.
  int list(std::array<iovec, kMostPieces>& memory, size_t most, std::byte* unwanted) const {
    size_t count = 0, bytes = 0;
    for (size_t p = piece_, begin = begin_; p < pieces_.size() && bytes < most && count < kMostPieces; ++p, begin = 0) {
      const auto [at, size] = pieces_[p];
      const size_t part = std::min(size - begin, most - bytes);
      if (part > 0) memory[count++] = {at == nullptr ? unwanted + bytes : at + begin, part};
      bytes += part;
    }
    return static_cast<int>(count);
  }

  void advance(size_t bytes) {
    while (bytes > 0) {
      const size_t part = std::min(bytes, pieces_[piece_].bytes - begin_);
      bytes -= part;
      begin_ += part;
      if (begin_ == pieces_[piece_].bytes) ++piece_, begin_ = 0;
    }
  }

 private:
  std::span<const Piece> pieces_;
  size_t piece_ = 0, begin_ = 0;
};

std::optional<Fault> read_one(const Reading& reading, size_t block, std::byte* unwanted) {
  const File file(reading.path);
  struct stat state;
  if (file.number() < 0 || ::fstat(file.number(), &state) != 0) return system_fault();
  if (!S_ISREG(state.st_mode)) return Fault{Kind::kSystem, EINVAL};
  size_t total = 0, position = 0;
  for (const Piece& piece : reading.pieces) total += piece.bytes;
  Place place(reading.pieces);
  std::uint32_t checksum = 0;
  while (position < total) {
    std::array<iovec, kMostPieces> memory;
    const size_t end = std::min(total, (position / block + 1) * block);
    const int count = place.list(memory, std::min(kStep, end - position), unwanted);
    const ssize_t found = ::preadv(file.number(), memory.data(), count, static_cast<off_t>(position));
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) return system_fault();
    if (found == 0) return Fault{Kind::kShort, static_cast<std::int64_t>(position)};
    const auto bytes = static_cast<size_t>(found);
    place.advance(bytes);
    position += bytes;
    if (reading.checksums.empty()) continue;
    size_t left = bytes;
    for (size_t p = 0; left > 0; ++p) {
      const size_t part = std::min(left, memory[p].iov_len);
      checksum = crc32({static_cast<const std::byte*>(memory[p].iov_base), part}, checksum);
      left -= part;
    }
    if (position < end) continue;
    const size_t number = (position - 1) / block;
    if (number >= reading.checksums.size() || checksum != reading.checksums[number]) {
      return Fault{Kind::kChecksum, static_cast<std::int64_t>(number * block)};
    }
    checksum = 0;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Damage> read_files(std::span<const Reading> files, size_t block, int threads) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex lock;
  std::optional<Damage> first;
  const size_t count = std::max<size_t>(1, std::min(static_cast<size_t>(std::max(threads, 1)), files.size()));
  const auto unwanted = std::make_unique_for_overwrite<std::byte[]>(count * kStep);
  const auto work = [&](size_t thread) {
    while (!failed) {
      const size_t number = next++;
      if (number >= files.size()) return;
      const auto fault = read_one(files[number], block, unwanted.get() + thread * kStep);
      if (!fault) continue;
      failed = true;
      const std::lock_guard held(lock);
      if (!first || number < first->file) first = Damage{number, fault->kind, fault->detail};
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(count);
  for (size_t k = 1; k < count; ++k) {
    try {
      helpers.emplace_back(work, k);
    } catch (const std::system_error&) {  // the system has no more
      break;
    }
  }
  work(0);
  for (auto& helper : helpers) helper.join();
  return first;
}

}  // namespace gleanrl
