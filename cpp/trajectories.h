// Which trajectory each frame of a batch belongs to, how many steps that had before, and what it returned in all.
//
// Threads.   A plain function over the caller's memory; the caller keeps it alive and unchanged during the call.
// Order.     Ends are taken by time, ends of one step in the order of the environments: so new ids are given, and so
//   what has ended is returned.
// Floats.    Rewards are added one after the other in double, those of a trajectory by themselves: an infinity or NaN
//   stays within its trajectory.
// Cost.      One pass over the rows; sorting the ends where there are several environments.
#pragma once

#include <cstdint>
#include <vector>

namespace gleanrl {

// A matrix with one row for each of P environments; row p begins `stride` values behind row p - 1.
template <class Value>
struct Rows {
  Value* first = nullptr;  // none where there is no such matrix
  std::int64_t stride = 0;

  explicit operator bool() const { return first != nullptr; }
  Value* operator[](std::int64_t row) const { return first + row * stride; }
};

// A batch of T steps of P environments.
struct Steps {
  std::int64_t num_envs;
  std::int64_t num_steps;
  Rows<const std::uint8_t> done;  // 1 where a trajectory ends with the step
  Rows<const std::uint8_t> mask;  // 0 on steps that are no frames; absent if all are
  Rows<std::int64_t> ids;         // written: -1 on steps that are no frames
  Rows<std::int64_t> counts;      // written unless absent: frames of the trajectory before the step
};

// What the environments' trajectories are before a batch and, changed in place, after it.
struct UnderWay {
  std::int64_t* id;      // (P,)
  std::int64_t* steps;   // (P,) frames so far
  double* returns;       // (P,) rewards so far
  std::int64_t next_id;  // the first one that no trajectory has
};

// Ids are written as id * factor + offset.
struct Names {
  std::int64_t factor;
  std::int64_t offset;
};

struct Ended {
  std::vector<std::int64_t> lengths;
  std::vector<double> returns;  // none without rewards
};

// Fills in ids and counts, and returns what has ended. Without rewards the returns stay as they are.
Ended record(const Steps& steps, Rows<const float> reward, UnderWay& now, Names names);
Ended record(const Steps& steps, Rows<const double> reward, UnderWay& now, Names names);

}  // namespace gleanrl
