// Importance weights of drawn priorities.
//
// Threads.   A plain function over the caller's memory.
// Accuracy.  Computed in double, relative error below 10^-9, then rounded to float32 once.
// Cost.      A few nanoseconds a weight: two short polynomials, no call of the mathematics library.
#pragma once

#include <span>

namespace gleanrl {

// weights[i] = (priority[i] * scale)^-beta, divided by the largest of these weights if `normalise`, so that the
// largest is exactly 1 (scale has no effect then). Without it, scale = 1 / (smallest priority stored) gives weights
// of 1 at most, and scale = 1 / mean gives those of an unbiased estimate.
// Priorities are positive and finite (a drawn row's are), scale is positive and finite, beta is finite and 0 or more:
// std::invalid_argument otherwise, before anything is written. Weights outside float32's range become 0 or infinity.
void importance_weights(std::span<const double> priority, double scale, double beta, bool normalise, float* weights);

}  // namespace gleanrl
