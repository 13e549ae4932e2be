#include "episodes.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

// The scratch memory of a write is kept for the next one up to this size.
constexpr size_t kScratchKept = 4096;
// The limit of slice_len. With it, slice_len + left + right, added to the longest run, stays below 2^63.
constexpr int64_t kLongest = int64_t{1} << 61;

void check_lengths(const char* call, size_t got, size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument(std::string(call) + ": expected " + std::to_string(expected) + " values, got " +
                              std::to_string(got));
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(least) + " or more, got " +
                              std::to_string(value));
}

void check_room(const char* name, int64_t room, int64_t slice_len) {
  if (room >= 0 && room < slice_len) return;
  throw std::invalid_argument(std::string(name) + ": expected 0 to slice_len - 1, " + std::to_string(slice_len - 1) +
                              ", got " + std::to_string(room));
}

// A number in [0, count), each with the same probability. `min` is needed because uniform * count may round to count.
int64_t scaled(double uniform, int64_t count) {
  return std::min(static_cast<int64_t>(uniform * static_cast<double>(count)), count - 1);
}

}  // namespace

Episodes::Episodes(int64_t capacity, int64_t num_streams, int64_t now)
    : capacity_(capacity), num_streams_(num_streams), now_(now) {
  check_at_least("capacity", capacity, 1);
  check_at_least("num_streams", num_streams, 1);
  check_at_least("now", now, 0);
  if (capacity > std::numeric_limits<int64_t>::max() / 4 / num_streams) {
    throw std::invalid_argument("capacity * num_streams is too large for 64 bits");
  }
  streams_.resize(static_cast<size_t>(num_streams));
}

int64_t Episodes::slot_of(int64_t step, int64_t stream) const {
  const int64_t place = cursor_ - (now_ - step);
  return (place < 0 ? place + capacity_ : place) * num_streams_ + stream;
}

Episodes::Run Episodes::run_at(const Stream& stream, int64_t number) const {
  return {std::max(stream.starts[number], oldest()),
          number + 1 < stream.starts.size() ? stream.starts[number + 1] : now_};
}

// The number of the run that holds a stored step: the last run that doesn't start after it.
int64_t Episodes::run_of(const Stream& stream, int64_t step) const {
  int64_t low = 0, high = stream.starts.size();
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (stream.starts[middle] <= step ? low : high) = middle;
  }
  return low;
}

// Writes

void Episodes::on_write(int64_t start, int64_t count, std::span<const std::uint8_t> ends,
                        std::span<const int64_t* const> ids) {
  if (count < 0 || count > capacity_) {
    throw std::invalid_argument("on_write: expected 0 to capacity steps, " + std::to_string(capacity_) + ", got " +
                                std::to_string(count));
  }
  if (!ends.empty()) check_lengths("on_write: ends", ends.size(), static_cast<size_t>(count * num_streams_));
  if (count == 0) return;
  if (start < 0 || start >= capacity_) {
    throw std::out_of_range("on_write: start " + std::to_string(start) + " is outside the steps [0, " +
                            std::to_string(capacity_) + ")");
  }
  if (start != cursor_ && stored_ > 0 && count < capacity_) {
    throw std::invalid_argument("on_write: expected a write from the cursor on, " + std::to_string(cursor_) +
                                ", got one from " + std::to_string(start));
  }
  find_cuts(count, ends, ids);
  // Up to the last `reserve` no visible state changes, since it may throw. After it nothing can throw.
  std::vector<int64_t> last_ids(ids.size() * static_cast<size_t>(num_streams_));
  for (size_t c = 0; c < ids.size(); ++c) {
    std::copy_n(ids[c] + (count - 1) * num_streams_, num_streams_,
                last_ids.begin() + static_cast<std::ptrdiff_t>(c) * num_streams_);
  }
  std::vector<int64_t> new_runs(streams_.size(), 1);
  for (const Cut& cut : cuts_) ++new_runs[static_cast<size_t>(cut.stream)];
  for (size_t s = 0; s < streams_.size(); ++s) {
    streams_[s].starts.reserve(streams_[s].starts.size() + new_runs[s]);
    for (Index& index : indexes_) index.streams[s].reserve(index.streams[s].size() + new_runs[s]);
  }

  const int64_t begin = now_;
  now_ += count;
  stored_ = std::min(stored_ + count, capacity_);
  cursor_ = (start + count) % capacity_;
  last_ids_ = std::move(last_ids);
  id_columns_ = static_cast<int64_t>(ids.size());
  for (Stream& stream : streams_) {
    if (!stream.open) stream.starts.push(begin);
    stream.open = true;
  }
  for (const Cut& cut : cuts_) {
    Stream& stream = streams_[static_cast<size_t>(cut.stream)];
    for (Index& index : indexes_) add_run(index, cut.stream, {stream.starts.back(), cut.step});
    stream.open = cut.step < now_;
    if (stream.open) stream.starts.push(cut.step);
  }
  for (int64_t s = 0; s < num_streams_; ++s) {
    Stream& stream = streams_[static_cast<size_t>(s)];
    for (Index& index : indexes_) {
      if (stream.open) add_run(index, s, {stream.starts.back(), kOpen});
      drop_short(index, s);
    }
    while (stream.starts.size() > 1 && stream.starts[1] <= oldest()) stream.starts.pop();
  }
  for (Index& index : indexes_) index.counted = false;
  if (cuts_.capacity() > kScratchKept) cuts_ = {};
}

// Fills cuts_ with the boundaries in a write, in the order of time: a run of `stream` ends before `step`. A cut at
// now() closes an open run.
void Episodes::find_cuts(int64_t count, std::span<const std::uint8_t> ends, std::span<const int64_t* const> ids) {
  cuts_.clear();
  const int64_t k = num_streams_, total = count * k;
  const bool comparable = static_cast<int64_t>(ids.size()) == id_columns_;
  for (int64_t s = 0; s < k; ++s) {
    bool other = !comparable;
    for (size_t c = 0; comparable && c < ids.size(); ++c)
      other |= ids[c][s] != last_ids_[c * static_cast<size_t>(k) + static_cast<size_t>(s)];
    if (other && streams_[static_cast<size_t>(s)].open) cuts_.push_back({now_, s});
  }
  // Whether a run ends after position j = step * num_streams + stream. At the last step only a flag can show an end.
  const auto ends_after = [&](int64_t j) {
    bool end = !ends.empty() && ends[static_cast<size_t>(j)] != 0;
    for (const int64_t* column : ids) end |= j + k < total && column[j] != column[j + k];
    return end;
  };
  // Most blocks have no boundary: these take one vectorised pass.
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < total; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, total);
    std::uint8_t flags = 0;
    if (!ends.empty()) {
      for (int64_t j = begin; j < end; ++j) flags |= ends[static_cast<size_t>(j)];
    }
    int64_t changes = 0;
    for (const int64_t* column : ids) {
      for (int64_t j = begin; j < std::min(end, total - k); ++j) changes |= column[j] ^ column[j + k];
    }
    if (flags == 0 && changes == 0) continue;
    for (int64_t j = begin; j < end; ++j) {
      if (ends_after(j)) cuts_.push_back({now_ + j / k + 1, j % k});
    }
  }
}

void Episodes::clear() {
  for (Stream& stream : streams_) {
    stream.starts.clear();
    stream.open = false;
  }
  indexes_.clear();
  last_ids_.clear();
  id_columns_ = 0;
  now_ = stored_ = cursor_ = 0;
}

// Indexes of run lengths

// Adds a run that is new, has grown, or was just closed. An index is a queue: only the oldest run of a stream can
// become shorter, so runs leave the index in the order of their arrival.
void Episodes::add_run(Index& index, int64_t stream, Run run) const {
  Fifo<Run>& runs = index.streams[static_cast<size_t>(stream)];
  if (!runs.empty() && runs.back().start == run.start) {
    runs.back().end = run.end;
  } else if (stored_of(run).steps() >= index.min_len) {
    runs.push(run);
  }
}

void Episodes::drop_short(Index& index, int64_t stream) const {
  Fifo<Run>& runs = index.streams[static_cast<size_t>(stream)];
  while (!runs.empty() && stored_of(runs.front()).steps() < index.min_len) runs.pop();
}

Episodes::Index& Episodes::index_for(int64_t min_len) {
  ++uses_;
  for (Index& index : indexes_) {
    if (index.min_len == min_len) {
      index.last_use = uses_;
      return index;
    }
  }
  const auto width = static_cast<size_t>(num_streams_);
  Index index{min_len, uses_, std::vector<Fifo<Run>>(width), std::vector<int64_t>(width + 1)};
  for (int64_t s = 0; s < num_streams_; ++s) {
    const Stream& stream = streams_[static_cast<size_t>(s)];
    for (int64_t r = 0; r < stream.starts.size(); ++r) {
      const bool open = stream.open && r + 1 == stream.starts.size();
      add_run(index, s, {stream.starts[r], open ? kOpen : run_at(stream, r).end});
    }
  }
  if (indexes_.size() < kMostIndexes) {
    indexes_.push_back(std::move(index));
    return indexes_.back();
  }
  const auto older = [](const Index& a, const Index& b) { return a.last_use < b.last_use; };
  return *std::min_element(indexes_.begin(), indexes_.end(), older) = std::move(index);
}

void Episodes::count_runs(Index& index) {
  for (size_t s = 0; s < index.streams.size(); ++s) {
    index.runs_before[s + 1] = index.runs_before[s] + index.streams[s].size();
  }
  index.counted = true;
}

// Draws

// The stored part of the run that a uniform selects; sets `stream` to its stream.
Episodes::Run Episodes::pick(const Index& index, double uniform, int64_t& stream) const {
  const std::vector<int64_t>& before = index.runs_before;
  const int64_t number = scaled(uniform, before.back());
  stream = num_streams_ == 1 ? 0 : std::upper_bound(before.begin(), before.end(), number) - before.begin() - 1;
  const auto s = static_cast<size_t>(stream);
  return stored_of(index.streams[s][number - before[s]]);
}

int64_t Episodes::draw(const SliceRule& rule, std::span<const double> uniform, int64_t* first, int64_t* length) {
  check_at_least("draw: slice_len", rule.slice_len, 1);
  if (rule.slice_len > kLongest) {
    throw std::invalid_argument("draw: slice_len: expected at most 2^61, got " + std::to_string(rule.slice_len));
  }
  check_room("draw: left", rule.left, rule.slice_len);
  check_room("draw: right", rule.right, rule.slice_len);
  if (uniform.size() % 2 != 0) throw std::invalid_argument("draw: expected two uniforms a slice");
  check_uniforms(uniform);
  if (uniform.empty()) return 0;
  Index& index = index_for(rule.strict ? rule.slice_len : 1);
  if (!index.counted) count_runs(index);
  if (index.runs_before.back() == 0) {
    const int64_t runs = num_runs(1);
    throw std::runtime_error(runs == 0 ? std::string("draw: nothing is stored")
                                       : "draw: none of the " + std::to_string(runs) + " stored trajectories has " +
                                             std::to_string(rule.slice_len) + " steps");
  }
  int64_t total = 0;
  for (size_t i = 0; i < uniform.size() / 2; ++i) {
    int64_t stream = 0;
    const Run run = pick(index, uniform[2 * i], stream);
    const int64_t steps = run.steps();
    const int64_t most = std::min(std::max<int64_t>(steps - rule.slice_len, 0) + rule.right, steps - 1);
    const int64_t from = scaled(uniform[2 * i + 1], most + rule.left + 1) - rule.left;
    const int64_t to = std::min(from + rule.slice_len, steps);
    first[i] = slot_of(run.start + std::max<int64_t>(from, 0), stream);
    length[i] = to - std::max<int64_t>(from, 0);
    total += length[i];
  }
  return total;
}

}  // namespace gleanrl
