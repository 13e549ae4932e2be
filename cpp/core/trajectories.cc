#include "trajectories.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace gleanrl {
namespace {

using std::int64_t;

// The position of a trajectory's end.
struct End {
  int64_t t;
  int64_t env;
};

bool is_frame(const Steps& steps, int64_t env, int64_t t) { return !steps.mask || steps.mask[env][t] != 0; }

// All ends, environment after environment.
std::vector<End> ends_of(const Steps& steps) {
  std::vector<End> ends;
  for (int64_t env = 0; env < steps.num_envs; ++env) {
    const std::uint8_t* row = steps.done[env];
    for (int64_t t = 0; t < steps.num_steps; ++t) {
      const void* found = std::memchr(row + t, 1, static_cast<std::size_t>(steps.num_steps - t));
      if (found == nullptr) break;
      t = static_cast<const std::uint8_t*>(found) - row;
      if (is_frame(steps, env, t)) ends.push_back({t, env});
    }
  }
  return ends;
}

// The rank of each end in the order of time.
std::vector<int64_t> ranks_of(const std::vector<End>& ends, bool sorted) {
  std::vector<int64_t> order(ends.size());
  std::iota(order.begin(), order.end(), 0);
  if (sorted) return order;
  const auto earlier = [&](int64_t a, int64_t b) {
    return ends[static_cast<std::size_t>(a)].t < ends[static_cast<std::size_t>(b)].t;
  };
  std::stable_sort(order.begin(), order.end(), earlier);
  std::vector<int64_t> ranks(ends.size());
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    ranks[static_cast<std::size_t>(order[rank])] = static_cast<int64_t>(rank);
  }
  return ranks;
}

// Records the steps [begin, end) of an environment, which all belong to its current trajectory.
template <class Real>
void pass(const Steps& steps, Rows<const Real> reward, int64_t env, int64_t begin, int64_t end, UnderWay& now,
          Names names) {
  int64_t* ids = steps.ids[env];
  const int64_t name = now.id[env] * names.factor + names.offset;
  int64_t count = now.steps[env];
  for (int64_t t = begin; t < end; ++t) {
    const bool frame = is_frame(steps, env, t);
    ids[t] = frame ? name : -1;
    if (steps.counts) steps.counts[env][t] = count;
    count += frame;
  }
  now.steps[env] = count;
  if (!reward) return;
  double sum = now.returns[env];
  for (int64_t t = begin; t < end; ++t) {
    if (is_frame(steps, env, t)) sum += static_cast<double>(reward[env][t]);
  }
  now.returns[env] = sum;
}

template <class Real>
Ended record_all(const Steps& steps, Rows<const Real> reward, UnderWay& now, Names names) {
  const std::vector<End> ends = ends_of(steps);
  const std::vector<int64_t> ranks = ranks_of(ends, steps.num_envs == 1);
  Ended ended{std::vector<int64_t>(ends.size()), std::vector<double>(reward ? ends.size() : 0)};
  std::size_t k = 0;
  for (int64_t env = 0; env < steps.num_envs; ++env) {
    int64_t begin = 0;
    for (; k < ends.size() && ends[k].env == env; ++k) {
      pass(steps, reward, env, begin, ends[k].t + 1, now, names);
      begin = ends[k].t + 1;
      const auto rank = static_cast<std::size_t>(ranks[k]);
      ended.lengths[rank] = now.steps[env];
      now.id[env] = now.next_id + ranks[k];
      now.steps[env] = 0;
      if (reward) {
        ended.returns[rank] = now.returns[env];
        now.returns[env] = 0.0;
      }
    }
    pass(steps, reward, env, begin, steps.num_steps, now, names);
  }
  now.next_id += static_cast<int64_t>(ends.size());
  return ended;
}

}  // namespace

Ended record(const Steps& steps, Rows<const float> reward, UnderWay& now, Names names) {
  return record_all(steps, reward, now, names);
}

Ended record(const Steps& steps, Rows<const double> reward, UnderWay& now, Names names) {
  return record_all(steps, reward, now, names);
}

}  // namespace gleanrl
