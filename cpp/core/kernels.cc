#include "kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "processor.h"

namespace gleanrl {
namespace {

using std::int64_t;
using std::size_t;

// The number of searches between the prefetch of a node and its use; 16 and 64 are slightly slower. All prefetches go
// to the L2 cache, which can have more misses in flight than L1.
constexpr size_t kAhead = 32;

namespace two {
#define GLEANRL_LANES 2
#include "kernels_of_width.h"
#undef GLEANRL_LANES
}  // namespace two

#if defined(GLEANRL_HAS_WIDER_REGISTERS)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
namespace eight {
#define GLEANRL_LANES 8
#include "kernels_of_width.h"
#undef GLEANRL_LANES
}  // namespace eight
#pragma GCC pop_options
#endif

// The kernels for `lanes` doubles in a register; null if this processor doesn't support them.
const Kernels* of_lanes(int lanes) {
#if defined(GLEANRL_HAS_WIDER_REGISTERS)
  if (lanes == 8 && has_avx512()) return &eight::kKernels;
#endif
  return lanes == 2 ? &two::kKernels : nullptr;
}

const Kernels* chosen = of_lanes(8) ? of_lanes(8) : of_lanes(2);

}  // namespace

const Kernels& kernels() { return *chosen; }

bool use_lanes(int lanes) {
  const Kernels* const found = of_lanes(lanes);
  if (found) chosen = found;
  return found != nullptr;
}

}  // namespace gleanrl
