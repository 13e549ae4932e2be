#include "shared_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "boundaries.h"

namespace gleanrl {

using std::int64_t;

namespace {

bool equal(const std::byte* left, const std::byte* right, int64_t bytes) {
  return std::memcmp(left, right, static_cast<std::size_t>(bytes)) == 0;
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

SharedRows::SharedRows(std::vector<std::byte*> bases, std::vector<int64_t> row_bytes, std::vector<Pair> pairs,
                       int64_t num_slots, int64_t streams, std::uint32_t* places)
    : bases_(std::move(bases)),
      bytes_(std::move(row_bytes)),
      pairs_(std::move(pairs)),
      size_(num_slots),
      streams_(streams),
      places_(places),
      used_(num_slots + 1) {
  if (bases_.size() != bytes_.size() || pairs_.empty()) {
    throw std::invalid_argument("SharedRows: expected an address and a row size for each leaf, and a pair");
  }
  if (streams < 1 || num_slots < streams || num_slots > std::numeric_limits<std::uint32_t>::max() / 4) {
    throw std::invalid_argument("SharedRows: expected 1 or more steps, and less than 2^30 rows");
  }
  std::vector<bool> is_outcome(bases_.size(), false);
  for (const auto [outcome, root] : pairs_) {
    if (bytes_.at(outcome) != bytes_.at(root)) throw std::invalid_argument("SharedRows: pairs differ in size");
    is_outcome[outcome] = true;
  }
  for (std::size_t leaf = 0; leaf < bases_.size(); ++leaf) {
    row_bytes_ += bytes_[leaf];
    if (!is_outcome[leaf]) stored_.push_back(leaf);
    ends_.push_back(row(leaf, size_));
  }
  for (const Pair& pair : pairs_) ends_[pair.root] = row(pair.root, 2 * size_ + 1 + streams_);
  low_ = bases_[stored_.front()];
  for (const std::size_t leaf : stored_) {
    low_ = std::min<const std::byte*>(low_, bases_[leaf]);
    high_ = std::max<const std::byte*>(high_, ends_[leaf]);
  }
  forget();
}

void SharedRows::forget() {
  std::fill(places_, places_ + size_, static_cast<std::uint32_t>(size_));
  free_.clear();
  used_ = size_ + 1;
}

int64_t SharedRows::reach(int64_t n) const {
  const int64_t more = std::max<int64_t>(n + streams_ - static_cast<int64_t>(free_.size()), 0);
  return std::min(used_ + more, 2 * size_ + 1 + streams_);
}

bool SharedRows::overlaps(Sources src) const {
  return std::any_of(src.begin(), src.end(), [this](const std::byte* from) {
    const auto inside = [&](std::size_t leaf) { return bases_[leaf] <= from && from < ends_[leaf]; };
    return low_ <= from && from < high_ && std::any_of(stored_.begin(), stored_.end(), inside);
  });
}

void SharedRows::check(int64_t n, Sources src) const {
  if (src.size() != bases_.size()) throw std::invalid_argument("SharedRows: expected one array per leaf");
  if (n < 0) throw std::invalid_argument("SharedRows: expected 0 or more rows");
  for (std::size_t leaf = 0; leaf < src.size(); ++leaf) {
    if (src[leaf] == nullptr && bytes_[leaf] > 0 && n > 0) throw std::invalid_argument("SharedRows: a null address");
  }
}

void SharedRows::make_room(int64_t n) {
  const std::size_t needed = free_.size() + static_cast<std::size_t>(n + streams_);
  if (free_.capacity() < needed) free_.reserve(std::max(needed, 2 * free_.capacity()));
}

int64_t SharedRows::spare() {
  if (free_.empty()) return used_++;
  const std::uint32_t row = free_.back();
  free_.pop_back();
  return row;
}

bool SharedRows::continues(int64_t place, Sources src, int64_t i) const {
  return std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
    return equal(row(pair.root, place), src[pair.root] + i * bytes_[pair.root], bytes_[pair.root]);
  });
}

bool SharedRows::leave(int64_t slot, Sources src, int64_t i) {
  const int64_t place = places_[slot];
  if (place == size_) return false;
  const bool same = continues(place, src, i);
  if (place > size_) return same;
  if (!same) {
    const int64_t to = spare();
    for (const auto [outcome, root] : pairs_) copy_bytes(row(root, to), row(root, place), bytes_[root]);
    places_[slot] = static_cast<std::uint32_t>(to);
  }
  return false;
}

void SharedRows::share(int64_t slot) {
  const std::uint32_t place = places_[slot];
  places_[slot] = static_cast<std::uint32_t>(following(slot));
  if (place > size_) free_.push_back(place);
}

void SharedRows::keep_apart(int64_t slot, Sources src, int64_t i) {
  const int64_t to = places_[slot] > size_ ? places_[slot] : spare();
  for (const auto [outcome, root] : pairs_)
    copy_bytes(row(root, to), src[outcome] + i * bytes_[outcome], bytes_[outcome]);
  places_[slot] = static_cast<std::uint32_t>(to);
}

void SharedRows::write(int64_t start, int64_t n, Sources src, bool in_place) {
  check(n, src);
  if (n > size_) throw std::invalid_argument("SharedRows: more rows than slots");
  if (n == 0) return;
  if (start < 0 || start >= size_) throw std::out_of_range("SharedRows: start is outside of the ring");
  make_room(n);
  // The step before, as far as this write doesn't overwrite it.
  const int64_t before = (start - streams_ + size_) % size_, last = std::min(streams_, n);
  std::vector<int64_t> repeated;
  for (int64_t i = std::max<int64_t>(n - (size_ - streams_), 0); i < last; ++i) {
    if (leave((before + i) % size_, src, i)) repeated.push_back((before + i) % size_);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = start + i < size_ ? start + i : start + i - size_;
    const bool is_repeated = i + streams_ < n && std::all_of(
                                                     pairs_.begin(), pairs_.end(),
                                                     [&](const Pair& pair) {
                                                       const int64_t bytes = bytes_[pair.root];
                                                       return equal(src[pair.outcome] + i * bytes,
                                                                    src[pair.root] + (i + streams_) * bytes, bytes);
                                                     });
    if (is_repeated) {
      share(slot);
    } else {
      keep_apart(slot, src, i);
    }
  }
  const int64_t head = std::min(n, size_ - start);
  for (const std::size_t leaf : stored_) {
    const int64_t bytes = bytes_[leaf];
    if (in_place || bytes == 0) continue;
    copy_bytes(row(leaf, start), src[leaf], head * bytes);
    copy_bytes(row(leaf, 0), src[leaf] + head * bytes, (n - head) * bytes);
  }
  for (const int64_t slot : repeated) share(slot);
}

void SharedRows::put(std::span<const int64_t> index, Sources src) {
  const auto n = static_cast<int64_t>(index.size());
  check(n, src);
  for (const int64_t slot : index) {
    if (slot < 0 || slot >= size_) throw std::out_of_range("SharedRows: a slot is outside of the ring");
  }
  make_room(2 * n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = index[static_cast<std::size_t>(i)], before = (slot - streams_ + size_) % size_;
    const bool repeated = before != slot && leave(before, src, i);
    const int64_t behind = following(slot);
    const bool is_repeated = std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
      const int64_t bytes = bytes_[pair.root];
      const std::byte* const root = behind == slot ? src[pair.root] + i * bytes : row(pair.root, behind);
      return equal(src[pair.outcome] + i * bytes, root, bytes);
    });
    if (!is_repeated) keep_apart(slot, src, i);
    for (const std::size_t leaf : stored_) copy_bytes(row(leaf, slot), src[leaf] + i * bytes_[leaf], bytes_[leaf]);
    if (is_repeated) share(slot);
    if (repeated) share(before);
  }
}

void SharedRows::find(std::span<const int64_t> index, int64_t* out) const {
  for (const int64_t slot : index) {
    if (slot < 0 || slot >= size_) throw std::out_of_range("SharedRows: a slot is outside of the ring");
    *out++ = places_[slot];
  }
}

void SharedRows::watch(std::vector<Pair> twins, std::vector<std::size_t> flags) {
  for (const auto [outcome, root] : twins) {
    if (bytes_.at(outcome) != bytes_.at(root)) throw std::invalid_argument("SharedRows: twins differ in size");
  }
  for (const std::size_t flag : flags) static_cast<void>(bytes_.at(flag));
  twins_ = std::move(twins);
  flags_ = std::move(flags);
}

bool SharedRows::seams(int64_t newest, int64_t steps, Sources src, std::uint8_t* begins) const {
  check(steps * streams_, src);
  if (newest < 0 || newest > size_ - streams_ || steps < 1) throw std::out_of_range("SharedRows: no stored step");
  // The outcomes of the newest step, one after the other.
  std::vector<std::vector<std::byte>> outcomes;
  outcomes.reserve(twins_.size());
  std::vector<Twin> twins;
  bool same = true;
  for (const auto [outcome, root] : twins_) {
    const int64_t bytes = bytes_[outcome];
    const bool is_shared =
        std::any_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) { return pair.outcome == outcome; });
    const std::byte* first = row(outcome, newest);
    if (is_shared) {
      auto& rows = outcomes.emplace_back(static_cast<std::size_t>(streams_ * bytes));
      for (int64_t s = 0; s < streams_; ++s) copy_bytes(rows.data() + s * bytes, row(root, places_[newest + s]), bytes);
      first = rows.data();
    }
    same = same && equal(first, src[root], streams_ * bytes);
    twins.push_back({first, src[outcome], src[root], bytes});
  }
  if (same) return false;
  std::vector<EndFlag> flags;
  for (const std::size_t flag : flags_) {
    flags.push_back({reinterpret_cast<const std::uint8_t*>(row(flag, newest)),
                     reinterpret_cast<const std::uint8_t*>(src[flag]), bytes_[flag]});
  }
  return find_seams(twins, flags, steps, streams_, begins);
}

}  // namespace gleanrl
