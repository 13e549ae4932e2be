// Importance weights of drawn priorities.
//
// Threads.   A plain function over the caller's memory.
// Accuracy.  Computed in double, relative error below 10^-9, then rounded to float32 once.
// Cost.      A few nanoseconds a weight: two short polynomials, no call of the mathematics library.
#pragma once

#include <span>

namespace gleanrl {

// weights[i] = (priority[i] / unit)^-beta. The unit is the priority whose weight is exactly 1: the smallest one stored
// gives weights of 1 at most, the mean those of an unbiased estimate. With `normalise` it is the batch's smallest, and
// `unit` has no effect.
// Priorities and unit are positive and at most 2^960 (a drawn row's are), beta is finite and 0 or more:
// std::invalid_argument otherwise, before anything is written. Weights outside float32's range become 0 or infinity.
void importance_weights(std::span<const double> priority, double unit, double beta, bool normalise, float* weights);

}  // namespace gleanrl
