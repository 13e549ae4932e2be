#include "shared_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "boundaries.h"
#include "checks.h"

namespace gleanrl {

using std::int64_t;
using std::size_t;

namespace {

// Heads from kFollows on tell that the older frames are in the slots of the steps before: kFollows + 2 * b + zeros, if
// the frames up to b steps before are there, and all older ones repeat the oldest of them, or are zeros.
constexpr std::uint32_t kFollows = 0xFFFF0000;
constexpr std::uint32_t kEmpty = kFollows + 1;
constexpr int64_t kMostFrames = 0x7FFF;
constexpr int64_t kLine = 64, kLinesAhead = 64;

bool equal(const std::byte* left, const std::byte* right, int64_t bytes) {
  return std::memcmp(left, right, static_cast<size_t>(bytes)) == 0;
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Whether the newest b frames of a stack are in the slots before.
int64_t steps_back(std::uint32_t head) { return head < kFollows ? 0 : (head - kFollows) >> 1; }

// The pieces of frames alternate in a row: piece p of frame f is piece p * frames + f. The loops over four frames of
// bytes, such as gray images, handle many pieces at once.
void interleave_four(const std::byte* const* from, int64_t pieces, std::byte* __restrict to) {
  const std::byte *a = from[0], *b = from[1], *c = from[2], *d = from[3];
  for (int64_t p = 0; p < pieces; ++p) {
    to[4 * p] = a[p];
    to[4 * p + 1] = b[p];
    to[4 * p + 2] = c[p];
    to[4 * p + 3] = d[p];
  }
}

void interleave(const std::byte* const* from, int64_t frames, int64_t pieces, int64_t bytes, std::byte* to) {
  if (bytes == 1 && frames == 4) return interleave_four(from, pieces, to);
  for (int64_t f = 0; f < frames; ++f) {
    for (int64_t p = 0; p < pieces; ++p) copy_bytes(to + (p * frames + f) * bytes, from[f] + p * bytes, bytes);
  }
}

// The opposite: frame f begins at to + f * pieces * bytes.
void separate_four(const std::byte* from, int64_t pieces, std::byte* to) {
  std::byte* const __restrict a = to;
  std::byte* const __restrict b = to + pieces;
  std::byte* const __restrict c = to + 2 * pieces;
  std::byte* const __restrict d = to + 3 * pieces;
  for (int64_t p = 0; p < pieces; ++p) {
    a[p] = from[4 * p];
    b[p] = from[4 * p + 1];
    c[p] = from[4 * p + 2];
    d[p] = from[4 * p + 3];
  }
}

void separate(const std::byte* from, int64_t frames, int64_t pieces, int64_t bytes, std::byte* to) {
  if (bytes == 1 && frames == 4) return separate_four(from, pieces, to);
  for (int64_t f = 0; f < frames; ++f) {
    for (int64_t p = 0; p < pieces; ++p)
      copy_bytes(to + (f * pieces + p) * bytes, from + (p * frames + f) * bytes, bytes);
  }
}

Columns columns_of(const std::vector<std::byte*>& bases, std::vector<int64_t> row_bytes,
                   const std::vector<SharedRows::Pair>& pairs, const std::vector<SharedRows::Stack>& stacks,
                   int64_t num_rows) {
  std::vector<std::byte*> found = bases;
  if (bases.size() != row_bytes.size() || bases.size() != stacks.size() || pairs.empty()) {
    throw std::invalid_argument("SharedRows: expected an address, a row size and a stack for each leaf, and a pair");
  }
  for (const auto [outcome, root] : pairs) {
    if (row_bytes.at(outcome) != row_bytes.at(root)) throw std::invalid_argument("SharedRows: pairs differ in size");
    found[outcome] = found[root];
    if (stacks[root].frames > 1) row_bytes[outcome] = row_bytes[root] = 0;
  }
  return {std::move(found), std::move(row_bytes), num_rows};
}

}  // namespace

SharedRows::SharedRows(std::vector<std::byte*> bases, std::vector<int64_t> row_bytes, std::vector<Pair> pairs,
                       std::vector<Stack> stacks, int64_t num_slots, int64_t streams, std::uint32_t* places,
                       std::uint32_t* heads)
    : bases_(std::move(bases)),
      bytes_(std::move(row_bytes)),
      size_(num_slots),
      streams_(streams),
      limit_(limit(num_slots, streams, heads != nullptr)),
      places_(places),
      heads_(heads),
      used_(num_slots + 1),
      columns_(columns_of(bases_, bytes_, pairs, stacks, limit_)) {
  if (streams < 1 || num_slots < streams || num_slots >= int64_t{1} << 30 || limit_ > kFollows) {
    throw std::invalid_argument("SharedRows: expected 1 or more steps, and less than 2^30 rows");
  }
  root_of_.resize(bases_.size(), -1);
  for (const auto [outcome, root] : pairs) {
    const auto [frames, pieces] = stacks[root];
    const int64_t bytes = bytes_[root];
    if (frames < 1 || frames > kMostFrames || pieces < 1 || bytes % (frames * pieces) != 0) {
      throw std::invalid_argument("SharedRows: expected frames of equal size, and pieces of equal size in them");
    }
    if (frames > 1 && heads == nullptr) throw std::invalid_argument("SharedRows: stacks need heads");
    most_ = std::max(most_, frames);
    root_of_[outcome] = root_of_[root] = static_cast<int64_t>(roots_.size());
    roots_.push_back({bases_[root], bytes, frames, pieces, bytes / frames, root, outcome});
    alternate_ = alternate_ || pieces > 1;
  }
  for (size_t leaf = 0; leaf < bases_.size(); ++leaf) {
    all_leaves_.push_back(static_cast<int64_t>(leaf));
    row_bytes_ += bytes_[leaf];
    const Root* const root = root_of(leaf);
    if (root != nullptr && (root->outcome == leaf || root->frames > 1)) continue;
    whole_.push_back(leaf);
    memory_.emplace_back(bases_[leaf], row(leaf, size_));
  }
  for (const Root& root : roots_) memory_.emplace_back(root.base, spare_row(root, limit_));
  low_ = memory_.front().first;
  for (const auto& [first, stop] : memory_) {
    low_ = std::min(low_, first);
    high_ = std::max(high_, stop);
  }
  forget();
}

void SharedRows::forget() {
  std::fill(places_, places_ + size_, static_cast<std::uint32_t>(size_));
  if (most_ > 1) std::fill(heads_, heads_ + size_, kEmpty);
  free_.clear();
  used_ = size_ + 1;
}

void SharedRows::recount() {
  std::vector<bool> taken(static_cast<size_t>(used_ - size_));
  const auto take = [&](std::uint32_t row) {
    if (row > size_ && row < kFollows) taken[row - static_cast<size_t>(size_)] = true;
  };
  std::for_each(places_, places_ + size_, take);
  if (most_ > 1) std::for_each(heads_, heads_ + size_, take);
  free_.clear();
  for (int64_t row = size_ + 1; row < used_; ++row) {
    if (!taken[static_cast<size_t>(row - size_)]) free_.push_back(static_cast<std::uint32_t>(row));
  }
}

int64_t SharedRows::reach(int64_t n, bool by_slot) const {
  // A row takes one spare row, and another one for its stack. A piece of rows also moves the outcomes of the step before
  // it, and the stacks of up to most_ - 1 steps behind it.
  const int64_t needed = n * (most_ > 1 ? 2 : 1) + (by_slot ? n : streams_) * most_;
  return reach_by(needed);
}

int64_t SharedRows::reach_of(int64_t start, int64_t n, Sources src) const {
  check(start, n, src);
  Made made;
  const Sources from = by_frames(src, n, made);
  int64_t needed = streams_ * most_;
  for (int64_t i = 0; i < n; ++i) {
    if (!is_repeated(start, n, from, i, false)) ++needed;
    if (most_ > 1 && head(start, n, from, i) == 0) ++needed;
  }
  return reach_by(needed);
}

int64_t SharedRows::reach_by(int64_t needed) const {
  const int64_t more = std::max<int64_t>(needed - static_cast<int64_t>(free_.size()), 0);
  return std::min(used_ + more, limit_);
}

bool SharedRows::overlaps(Sources src) const {
  return std::any_of(src.begin(), src.end(), [this](const std::byte* from) {
    const auto inside = [&](const auto& memory) { return memory.first <= from && from < memory.second; };
    return low_ <= from && from < high_ && std::any_of(memory_.begin(), memory_.end(), inside);
  });
}

void SharedRows::check(int64_t n, Sources src) const {
  if (src.size() != bases_.size()) throw std::invalid_argument("SharedRows: expected one array per leaf");
  if (n < 0) throw std::invalid_argument("SharedRows: expected 0 or more rows");
  for (size_t leaf = 0; leaf < src.size(); ++leaf) {
    if (src[leaf] == nullptr && bytes_[leaf] > 0 && n > 0) throw std::invalid_argument("SharedRows: a null address");
  }
}

SharedRows::Sources SharedRows::by_frames(Sources src, int64_t n, Made& made) const {
  if (!alternate_) return src;
  made.leaves.assign(src.begin(), src.end());
  for (const Root& root : roots_) {
    if (root.pieces == 1) continue;
    for (const size_t leaf : {root.outcome, root.leaf}) {
      auto& rows = made.rows.emplace_back(static_cast<size_t>(n * root.bytes));
      for (int64_t i = 0; i < n; ++i) {
        separate(src[leaf] + i * root.bytes, root.frames, root.pieces, root.frame_bytes / root.pieces,
                 rows.data() + i * root.bytes);
      }
      made.leaves[leaf] = rows.data();
    }
  }
  return made.leaves;
}

int64_t SharedRows::frame_number(const Root& root, int64_t number, int64_t back) const {
  if (number < size_) {
    if (root.frames == 1) return number;
    const std::uint32_t head = heads_[number];
    if (head >= kFollows) {
      const int64_t there = steps_back(head);
      if (back > there && head % 2 == 1) return size_;  // zeros
      const int64_t slot = number - std::min(back, there) * streams_;
      return slot < 0 ? around(slot) : slot;
    }
    number = head;
  }
  return size_ + (number - size_ + 1) * root.frames - 1 - back;
}

bool SharedRows::equals(const Root& root, int64_t number, const std::byte* frames) const {
  for (int64_t back = 0; back < root.frames; ++back) {
    const std::byte* const other = frames + (root.frames - 1 - back) * root.frame_bytes;
    if (!equal(frame(root, number, back), other, root.frame_bytes)) return false;
  }
  return true;
}

void SharedRows::copy_frames(const Root& root, int64_t number, std::byte* to) const {
  for (int64_t back = 0; back < root.frames; ++back) {
    copy_bytes(to + (root.frames - 1 - back) * root.frame_bytes, frame(root, number, back), root.frame_bytes);
  }
}

void SharedRows::copy_rows(const Root& root, std::span<const int64_t> rows, std::byte* to) const {
  std::vector<int64_t> numbers(rows.size() * static_cast<size_t>(root.frames));
  int64_t* at = numbers.data();
  for (const int64_t number : rows) {
    for (int64_t back = root.frames; back-- > 0;) *at++ = frame_number(root, number, back);
  }
  const auto ask_for = [&](size_t i, int64_t lines) {
    if (i >= numbers.size()) return;
    const std::byte* const frame = root.base + numbers[i] * root.frame_bytes;
    for (int64_t b = 0; b < std::min(root.frame_bytes, lines * kLine); b += kLine) __builtin_prefetch(frame + b, 0, 2);
  };
  if (root.pieces == 1) {
    for (size_t i = 0, stop = 0; i < numbers.size(); i = stop) {
      // The frames of one stream lie one after the other, so most stacks are one piece of memory.
      for (stop = i + 1; stop < numbers.size() && numbers[stop] == numbers[stop - 1] + 1;) ++stop;
      ask_for(stop, kLinesAhead);
      const int64_t bytes = static_cast<int64_t>(stop - i) * root.frame_bytes;
      copy_bytes(to, root.base + numbers[i] * root.frame_bytes, bytes);
      to += bytes;
    }
    return;
  }
  std::vector<const std::byte*> from(static_cast<size_t>(root.frames));
  const auto k = static_cast<size_t>(root.frames);
  for (size_t i = 0; i < numbers.size(); i += k) {
    for (size_t f = 0; f < k; ++f) {
      from[f] = root.base + numbers[i + f] * root.frame_bytes;
      ask_for(i + k + f, root.frame_bytes);
    }
    interleave(from.data(), root.frames, root.pieces, root.frame_bytes / root.pieces, to);
    to += root.bytes;
  }
}

void SharedRows::copy_to_spare(int64_t number, int64_t to) const {
  for (const Root& root : roots_) copy_frames(root, number, spare_row(root, to));
}

void SharedRows::make_room(int64_t n, bool by_slot) {
  const auto needed = static_cast<size_t>(reach(n, by_slot) - size_);
  if (free_.capacity() < needed) free_.reserve(std::max(needed, 2 * free_.capacity()));
}

int64_t SharedRows::spare() {
  if (free_.empty()) return used_++;
  const std::uint32_t row = free_.back();
  free_.pop_back();
  return row;
}

bool SharedRows::continues(int64_t place, Sources src, int64_t i) const {
  return std::all_of(roots_.begin(), roots_.end(),
                     [&](const Root& root) { return equals(root, place, src[root.leaf] + i * root.bytes); });
}

bool SharedRows::leave(int64_t slot, Sources src, int64_t i) {
  const int64_t place = places_[slot];
  if (place == size_) return false;
  const bool same = continues(place, src, i);
  if (place > size_) return same;
  if (!same) {
    const int64_t to = spare();
    copy_to_spare(place, to);
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
  for (const Root& root : roots_) copy_bytes(spare_row(root, to), src[root.outcome] + i * root.bytes, root.bytes);
  places_[slot] = static_cast<std::uint32_t>(to);
}

void SharedRows::detach(int64_t start, int64_t n, Sources src) {
  const auto changes = [&](int64_t i, int64_t back) {
    return i < n && std::any_of(
                        roots_.begin(), roots_.end(),
                        [&](const Root& root) {
                          const std::byte* const newest = src[root.leaf] + i * root.bytes + root.newest();
                          return root.frames > back &&
                                 !equal(root.base + wrapped(start + i) * root.frame_bytes, newest, root.frame_bytes);
                        });
  };
  for (int64_t i = n; i < std::min(size_, n + (most_ - 1) * streams_); ++i) {
    const int64_t slot = wrapped(start + i);
    for (int64_t back = 1; back <= steps_back(heads_[slot]); ++back) {
      if (!changes(around(i - back * streams_), back)) continue;
      const int64_t to = spare();
      for (const Root& root : roots_) {
        if (root.frames > 1) copy_frames(root, slot, spare_row(root, to));
      }
      heads_[slot] = static_cast<std::uint32_t>(to);
    }
  }
}

std::uint32_t SharedRows::head(int64_t start, int64_t n, Sources src, int64_t i) const {
  const auto older = [&](const Root& root, int64_t back) {
    return src[root.leaf] + i * root.bytes + (root.frames - 1 - back) * root.frame_bytes;
  };
  const auto is_there = [&](int64_t back) {
    const int64_t before = around(i - back * streams_);
    return std::all_of(roots_.begin(), roots_.end(), [&](const Root& root) {
      if (root.frames <= back) return true;
      const std::byte* const newest = before < n ? src[root.leaf] + before * root.bytes + root.newest()
                                                 : root.base + wrapped(start + before) * root.frame_bytes;
      return equal(older(root, back), newest, root.frame_bytes);
    });
  };
  int64_t there = 0;
  while (there + 1 < most_ && is_there(there + 1)) ++there;
  for (const bool zeros : {false, true}) {
    const bool is_padded = std::all_of(roots_.begin(), roots_.end(), [&](const Root& root) {
      for (int64_t back = there + 1; back < root.frames; ++back) {
        const std::byte* const padding = zeros ? root.base + size_ * root.frame_bytes : older(root, there);
        if (!equal(older(root, back), padding, root.frame_bytes)) return false;
      }
      return true;
    });
    if (is_padded) return kFollows + static_cast<std::uint32_t>(2 * there + zeros);
  }
  return 0;
}

void SharedRows::write_stacks(int64_t start, int64_t n, Sources src) {
  for (int64_t i = 0; i < n; ++i) {
    std::uint32_t& at = heads_[wrapped(start + i)];
    const std::uint32_t follows = head(start, n, src, i), old = at;
    if (follows != 0) {
      at = follows;
      if (old < kFollows) free_.push_back(old);
      continue;
    }
    const int64_t to = old < kFollows ? old : spare();
    for (const Root& root : roots_) {
      if (root.frames > 1) copy_bytes(spare_row(root, to), src[root.leaf] + i * root.bytes, root.bytes);
    }
    at = static_cast<std::uint32_t>(to);
  }
  for (const Root& root : roots_) {
    if (root.frames == 1) continue;
    for (int64_t i = 0; i < n; ++i) {
      copy_bytes(root.base + wrapped(start + i) * root.frame_bytes, src[root.leaf] + i * root.bytes + root.newest(),
                 root.frame_bytes);
    }
  }
}

bool SharedRows::is_repeated(int64_t start, int64_t n, Sources src, int64_t i, bool looks_behind) const {
  const int64_t behind = wrapped(i + streams_);
  if (i + streams_ >= n && !looks_behind) return false;
  return std::all_of(roots_.begin(), roots_.end(), [&](const Root& root) {
    const std::byte* const outcome = src[root.outcome] + i * root.bytes;
    return behind < n ? equal(outcome, src[root.leaf] + behind * root.bytes, root.bytes)
                      : equals(root, wrapped(start + behind), outcome);
  });
}

void SharedRows::write_rows(int64_t start, int64_t n, Sources src, bool in_place, bool looks_behind) {
  // The step before, as far as this write doesn't overwrite it.
  const int64_t before = wrapped(start - streams_), last = std::min(streams_, n);
  std::vector<int64_t> repeated;
  for (int64_t i = std::max<int64_t>(n - (size_ - streams_), 0); i < last; ++i) {
    if (leave(wrapped(before + i), src, i)) repeated.push_back(wrapped(before + i));
  }
  if (most_ > 1) detach(start, n, src);
  for (int64_t i = 0; i < n; ++i) {
    if (is_repeated(start, n, src, i, looks_behind)) {
      share(wrapped(start + i));
    } else {
      keep_apart(wrapped(start + i), src, i);
    }
  }
  if (most_ > 1) write_stacks(start, n, src);
  const int64_t head = std::min(n, size_ - start);
  for (const size_t leaf : whole_) {
    const int64_t bytes = bytes_[leaf];
    if (in_place || bytes == 0) continue;
    copy_bytes(row(leaf, start), src[leaf], head * bytes);
    copy_bytes(row(leaf, 0), src[leaf] + head * bytes, (n - head) * bytes);
  }
  for (const int64_t slot : repeated) share(slot);
}

void SharedRows::check(int64_t start, int64_t n, Sources src) const {
  check(n, src);
  if (n > size_) throw std::invalid_argument("SharedRows: more rows than slots");
  if (n > 0 && (start < 0 || start >= size_)) throw std::out_of_range("SharedRows: start is outside of the ring");
}

void SharedRows::write(int64_t start, int64_t n, Sources src, bool in_place) {
  check(start, n, src);
  if (n == 0) return;
  Made made;
  const Sources from = by_frames(src, n, made);
  make_room(n, false);
  write_rows(start, n, from, in_place, false);
}

void SharedRows::put(std::span<const int64_t> index, Sources src) {
  const auto n = static_cast<int64_t>(index.size());
  check(n, src);
  check_rows("put", index, size_);
  Made made;
  const Sources first = by_frames(src, n, made);
  std::vector<const std::byte*> from(first.begin(), first.end());
  make_room(n, true);
  for (const int64_t slot : index) {
    write_rows(slot, 1, from, false, true);
    for (size_t leaf = 0; leaf < from.size(); ++leaf) from[leaf] += bytes_[leaf];
  }
}

void SharedRows::gather(std::span<const int64_t> index, std::span<std::byte* const> out,
                        std::span<const int64_t> leaves) const {
  if (out.size() != leaves.size()) throw std::invalid_argument("gather: expected one array per leaf");
  check_rows("gather", index, size_);
  std::vector<int64_t> places(index.size());
  for (size_t i = 0; i < index.size(); ++i) places[i] = places_[index[i]];
  const std::span<const int64_t> rows[] = {index, places};
  std::vector<Columns::Leaf> whole;
  std::vector<std::byte*> to;
  for (size_t p = 0; p < leaves.size(); ++p) {
    const auto leaf = static_cast<size_t>(leaves[p]);
    const Root* const root = root_of(leaf);
    const bool is_outcome = root != nullptr && root->outcome == leaf;
    if (root == nullptr || root->frames == 1) {
      whole.push_back({leaves[p], is_outcome ? 1 : 0});
      to.push_back(out[p]);
      continue;
    }
    if (out[p] == nullptr && !index.empty()) throw std::invalid_argument("gather: a null address");
    copy_rows(*root, rows[is_outcome ? 1 : 0], out[p]);
  }
  columns_.gather(rows, to, whole);
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
    const Root* const shared = root_of(outcome);
    const std::byte* first = row(outcome, newest);
    if (shared != nullptr) {
      auto& rows = outcomes.emplace_back(static_cast<std::size_t>(streams_ * bytes));
      const std::vector<int64_t> numbers(places_ + newest, places_ + newest + streams_);
      copy_rows(*shared, numbers, rows.data());
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
