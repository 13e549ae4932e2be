// Importance weights for drawn priorities.
//
// Threads.   A plain function over the caller's memory.
// Accuracy.  Computed in double, relative error below 10^-9, then rounded to float32 once.
// Cost.      A few nanoseconds per weight: two short polynomials, without a call of the mathematics library.
#pragma once

#include <span>

namespace gleanrl {

// weights[i] = (priority[i] / unit)^-beta. The unit is the priority whose weight is exactly 1. With the smallest stored
// priority as unit, weights are at most 1; with the mean priority, the weighted estimate is unbiased. With `normalise`
// the unit is the smallest priority of the batch, and `unit` has no effect.
// Priorities and unit are positive and at most 2^960, which holds for drawn rows. beta is finite and at least 0.
// Otherwise std::invalid_argument, before anything is written. Weights outside float32's range become 0 or infinity.
void importance_weights(std::span<const double> priority, double unit, double beta, bool normalise, float* weights);

}  // namespace gleanrl
