// The parts of the episode table that list, look up, save and check; see episodes.h.
#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "episodes.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

constexpr int64_t kFormat = 1;
constexpr int64_t kHeader = 7;
// Counters of a saved state stay below it, so that no sum overflows for another 2^62 steps.
constexpr int64_t kMostSteps = int64_t{1} << 62;

void check_min(const char* name, int64_t value) {
  if (value >= 1) return;
  throw std::invalid_argument(std::string(name) + ": expected 1 or more, got " + std::to_string(value));
}

[[noreturn]] void refuse_state(const std::string& why) { throw std::invalid_argument("load: " + why); }

// Reads a saved state from front to back.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> state) : state_(state) {}
  int64_t next() { return take(1)[0]; }
  std::span<const int64_t> take(int64_t n) {
    if (n < 0 || n > static_cast<int64_t>(state_.size())) refuse_state("the state is cut short");
    const auto values = state_.first(static_cast<size_t>(n));
    state_ = state_.subspan(static_cast<size_t>(n));
    return values;
  }
  bool is_done() const { return state_.empty(); }

 private:
  std::span<const int64_t> state_;
};

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
      const Run run = run_at(stream, r);
      count += run.end - run.start >= min_len;
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
      if (run.end - run.start < min_len) continue;
      first[count] = slot_of(run.start, s);
      length[count] = run.end - run.start;
      ++count;
    }
  }
  return count;
}

void Episodes::locate(std::span<const int64_t> slot, int64_t* before, int64_t* after) const {
  // Steps since the one at a place of the ring was written; 0 is the newest.
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

// Layout: format, capacity, num_streams, now, stored, cursor, number of id columns, the last ids of each column; then
// for each stream whether its last run is open, the number of its runs, and their first steps.
int64_t Episodes::state_size() const {
  return kHeader + static_cast<int64_t>(last_ids_.size()) + 2 * num_streams_ + num_runs(1);
}

void Episodes::save(int64_t* state) const {
  for (const int64_t value : {kFormat, capacity_, num_streams_, now_, stored_, cursor_, id_columns_}) *state++ = value;
  state = std::copy(last_ids_.begin(), last_ids_.end(), state);
  for (const Stream& stream : streams_) {
    *state++ = stream.open ? 1 : 0;
    *state++ = stream.starts.size();
    for (int64_t r = 0; r < stream.starts.size(); ++r) *state++ = run_at(stream, r).start;
  }
}

void Episodes::load(std::span<const int64_t> state) {
  Reader reader(state);
  if (const int64_t format = reader.next(); format != kFormat) {
    refuse_state("expected format " + std::to_string(kFormat) + ", got " + std::to_string(format));
  }
  const int64_t capacity = reader.next(), num_streams = reader.next();
  if (capacity != capacity_ || num_streams != num_streams_) {
    refuse_state("expected the state of a ring of " + std::to_string(capacity_) + " steps and " +
                 std::to_string(num_streams_) + " streams, got " + std::to_string(capacity) + " and " +
                 std::to_string(num_streams));
  }
  const int64_t now = reader.next(), stored = reader.next(), cursor = reader.next(), columns = reader.next();
  if (now < 0 || now > kMostSteps || stored < 0 || stored > std::min(now, capacity_) || cursor < 0 ||
      cursor >= capacity_) {
    refuse_state("the counters contradict each other: now " + std::to_string(now) + ", stored " +
                 std::to_string(stored) + ", cursor " + std::to_string(cursor));
  }
  if (columns < 0 || columns > static_cast<int64_t>(state.size())) refuse_state("the state is cut short");
  const auto ids = reader.take(columns * num_streams_);
  std::vector<int64_t> last_ids(ids.begin(), ids.end());
  std::vector<Stream> streams(streams_.size());
  for (Stream& stream : streams) {
    const int64_t open = reader.next();
    const auto starts = reader.take(reader.next());
    const bool ascend = std::adjacent_find(starts.begin(), starts.end(), std::greater_equal<>()) == starts.end();
    const bool cover = starts.empty() ? stored == 0 : starts.front() == now - stored && starts.back() < now;
    if ((open != 0 && open != 1) || !ascend || !cover || (open == 1 && starts.empty())) {
      refuse_state("the runs don't cover what is stored");
    }
    stream.open = open == 1;
    stream.starts.reserve(static_cast<int64_t>(starts.size()));
    for (const int64_t start : starts) stream.starts.push(start);
  }
  if (!reader.is_done()) refuse_state("the state is too long");
  streams_ = std::move(streams);
  last_ids_ = std::move(last_ids);
  id_columns_ = columns;
  indexes_.clear();
  now_ = now;
  stored_ = stored;
  cursor_ = cursor;
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
      const Fifo<Entry>& entries = index.streams[s];
      int64_t next = 0;
      for (int64_t r = 0; r < stream.starts.size(); ++r) {
        const Run run = run_at(stream, r);
        if (run.end - run.start < index.min_len) continue;
        require(next < entries.size(), "a run is missing from an index");
        const Entry& entry = entries[next];
        const bool open = stream.open && r + 1 == stream.starts.size();
        require(std::max(entry.start, oldest()) == run.start && entry.end == (open ? kOpen : run.end),
                "a run in an index has another extent");
        if (next > 1) {
          const Entry& last = entries[next - 1];
          require(entry.before == last.before + offered(index, last), "an index counts first steps wrongly");
        }
        ++next;
      }
      require(next == entries.size(), "an index has a run too many");
    }
  }
}

}  // namespace gleanrl
