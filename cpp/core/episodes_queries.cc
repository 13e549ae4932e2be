// Queries of the episode table: list, locate, expand and check_valid. See episodes.h.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "episodes.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

void check_min(const char* name, int64_t value) {
  if (value >= 1) return;
  throw std::invalid_argument(std::string(name) + ": expected 1 or more, got " + std::to_string(value));
}

}  // namespace

int64_t Episodes::num_runs(int64_t min_len) const {
  check_min("num_runs: min_len", min_len);
  int64_t count = 0;
  for (const Stream& stream : streams_) {
    if (min_len == 1) {
      count += stream.starts.size();
      continue;
    }
    for (int64_t r = 0; r < stream.starts.size(); ++r) {
      count += run_at(stream, r).steps() >= min_len;
    }
  }
  return count;
}

int64_t Episodes::list(int64_t min_len, int64_t* first, int64_t* length) const {
  check_min("list: min_len", min_len);
  int64_t count = 0;
  for (int64_t s = 0; s < num_streams_; ++s) {
    const Stream& stream = streams_[static_cast<size_t>(s)];
    for (int64_t r = 0; r < stream.starts.size(); ++r) {
      const Run run = run_at(stream, r);
      if (run.steps() < min_len) continue;
      first[count] = slot_of(run.start, s);
      length[count] = run.steps();
      ++count;
    }
  }
  return count;
}

void Episodes::locate(std::span<const int64_t> slot, int64_t* before, int64_t* after) const {
  // The age of the step at a place of the ring; the newest has age 0.
  const auto age = [this](int64_t place) {
    const int64_t back = cursor_ - 1 - place;
    return back < 0 ? back + capacity_ : back;
  };
  for (size_t i = 0; i < slot.size(); ++i) {
    if (slot[i] < 0 || slot[i] >= capacity_ * num_streams_ || age(slot[i] / num_streams_) >= stored_) {
      throw std::out_of_range("locate: slot " + std::to_string(slot[i]) + " at position " + std::to_string(i) + " of " +
                              std::to_string(slot.size()) + " isn't stored");
    }
  }
  for (size_t i = 0; i < slot.size(); ++i) {
    const Stream& stream = streams_[static_cast<size_t>(slot[i] % num_streams_)];
    const int64_t step = now_ - 1 - age(slot[i] / num_streams_);
    const Run run = run_at(stream, run_of(stream, step));
    before[i] = step - run.start;
    after[i] = run.end - step;
  }
}

void Episodes::expand(std::span<const int64_t> first, std::span<const int64_t> length, int64_t stride, int64_t* slot,
                      std::uint8_t* last) const {
  const int64_t most = stride == 0 ? capacity_ : std::min(stride, capacity_);
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i] < 0 || first[i] >= capacity_ * num_streams_) {
      throw std::out_of_range("expand: slot " + std::to_string(first[i]) + " at position " + std::to_string(i) +
                              " of " + std::to_string(first.size()) + " is outside the slots [0, " +
                              std::to_string(capacity_ * num_streams_) + ")");
    }
    if (length[i] < 1 || length[i] > most) {
      throw std::invalid_argument("expand: expected lengths of 1 to " + std::to_string(most) + ", got " +
                                  std::to_string(length[i]) + " at position " + std::to_string(i) + " of " +
                                  std::to_string(first.size()));
    }
  }
  for (size_t i = 0; i < first.size(); ++i) {
    const int64_t steps = length[i], places = stride == 0 ? steps : stride;
    const int64_t head = std::min(steps, capacity_ - first[i] / num_streams_);
    for (int64_t j = 0; j < head; ++j) slot[j] = first[i] + j * num_streams_;
    for (int64_t j = head; j < steps; ++j) slot[j] = first[i] % num_streams_ + (j - head) * num_streams_;
    std::fill(slot + steps, slot + places, slot[steps - 1]);
    slot += places;
    if (last != nullptr) {
      std::fill_n(last, places, std::uint8_t{0});
      last[steps - 1] = 1;
      last += places;
    }
  }
}

void Episodes::check_valid() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("episode table: ") + what);
  };
  require(0 <= stored_ && stored_ <= std::min(now_, capacity_), "stored is out of range");
  require(0 <= cursor_ && cursor_ < capacity_, "the cursor is out of range");
  require(static_cast<int64_t>(last_ids_.size()) == id_columns_ * num_streams_, "ids of the last step are missing");
  for (const Stream& stream : streams_) {
    require(stream.starts.empty() == (stored_ == 0), "a stream has no run");
    if (stored_ == 0) continue;
    require(stream.starts[0] <= oldest() && run_at(stream, 0).end > oldest(), "the first run isn't the oldest");
    for (int64_t r = 0; r < stream.starts.size(); ++r) {
      const Run run = run_at(stream, r);
      require(run.start < run.end && run.end <= now_, "a run is empty");
    }
  }
  for (const Index& index : indexes_) {
    for (size_t s = 0; s < streams_.size(); ++s) {
      const Stream& stream = streams_[s];
      const Fifo<Run>& indexed = index.streams[s];
      int64_t next = 0;
      for (int64_t r = 0; r < stream.starts.size(); ++r) {
        const Run run = run_at(stream, r);
        if (run.steps() < index.min_len) continue;
        require(next < indexed.size(), "a run is missing from an index");
        const bool open = stream.open && r + 1 == stream.starts.size();
        require(stored_of(indexed[next]).start == run.start && indexed[next].end == (open ? kOpen : run.end),
                "a run in an index has another extent");
        ++next;
      }
      require(next == indexed.size(), "an index has a run too many");
    }
  }
}

}  // namespace gleanrl
