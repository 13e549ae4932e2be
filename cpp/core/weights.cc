#include "weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace gleanrl {
namespace {

using std::size_t;

// "&" instead of "&&" keeps branches out of loops.
bool is_positive(double value) { return (value > 0.0) & (value <= 0x1p960); }

}  // namespace

void importance_weights(std::span<const double> priority, double unit, double beta, bool normalise, float* weights) {
  if (!is_positive(unit)) {
    throw std::invalid_argument("weights: expected a positive unit of at most 2^960, got " + std::to_string(unit));
  }
  if (!(beta >= 0.0) || !std::isfinite(beta)) {
    throw std::invalid_argument("weights: expected a finite beta of 0 or more, got " + std::to_string(beta));
  }
  bool all = true;
  for (const double p : priority) all &= is_positive(p);
  if (!all) {
    const auto found = std::find_if_not(priority.begin(), priority.end(), is_positive);
    throw std::invalid_argument("weights: expected positive priorities of at most 2^960, got " +
                                std::to_string(*found) + " at position " + std::to_string(found - priority.begin()) +
                                " of " + std::to_string(priority.size()));
  }
  if (priority.empty()) return;
  if (normalise) unit = *std::min_element(priority.begin(), priority.end());
  kernels().weights(priority.data(), kernels().log2(unit), beta, priority.size(), weights);
}

}  // namespace gleanrl
