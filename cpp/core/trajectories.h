// Trajectory ids and step counts for the frames of a batch, and the length and return of each ended trajectory.
//
// Threads.   A plain function over the caller's memory. The caller keeps it alive and unchanged during the call.
// Order.     Ends are processed in the order of time, and ends at the same step in the order of the environments. New
//   ids are assigned, and ended trajectories are returned, in this order.
// Floats.    The rewards of a trajectory are added in double, one after the other. Trajectories are summed separately,
//   so an infinity or NaN affects only its trajectory.
// Cost.      One pass over the rows, and a sort of the ends if there are several environments.
#pragma once

#include <cstdint>
#include <vector>

namespace gleanrl {

// A matrix with one row for each of P environments. Row p begins `stride` values after row p - 1.
template <class Value>
struct Rows {
  Value* first = nullptr;  // null if the matrix is absent
  std::int64_t stride = 0;

  explicit operator bool() const { return first != nullptr; }
  Value* operator[](std::int64_t row) const { return first + row * stride; }
};

// A batch of T steps of P environments.
struct Steps {
  std::int64_t num_envs;
  std::int64_t num_steps;
  Rows<const std::uint8_t> done;  // 1 where a trajectory ends with the step
  Rows<const std::uint8_t> mask;  // 0 at padding; absent if all steps are frames
  Rows<std::int64_t> ids;         // output: trajectory ids, -1 at padding
  Rows<std::int64_t> counts;      // output unless absent: frames of the trajectory before the step
};

// The current trajectory of each environment: the state before a batch, changed in place to the state after it.
struct UnderWay {
  std::int64_t* id;      // (P,)
  std::int64_t* steps;   // (P,) frames so far
  double* returns;       // (P,) sum of rewards so far
  std::int64_t next_id;  // the next unused id
};

// Ids are written as id * factor + offset.
struct Names {
  std::int64_t factor;
  std::int64_t offset;
};

struct Ended {
  std::vector<std::int64_t> lengths;
  std::vector<double> returns;  // empty without rewards
};

// Writes ids and counts, and returns the ended trajectories. Without rewards, `now.returns` doesn't change.
Ended record(const Steps& steps, Rows<const float> reward, UnderWay& now, Names names);
Ended record(const Steps& steps, Rows<const double> reward, UnderWay& now, Names names);

}  // namespace gleanrl
