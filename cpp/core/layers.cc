#include "layers.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "processor.h"

namespace gleanrl {
namespace {

using std::size_t;

namespace four {
#define GLEANRL_WIDTH 4
#include "layers_of_width.h"
#undef GLEANRL_WIDTH
}  // namespace four

#if defined(GLEANRL_HAS_WIDER_REGISTERS)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace eight {
#define GLEANRL_WIDTH 8
#include "layers_of_width.h"
#undef GLEANRL_WIDTH
}  // namespace eight
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
namespace sixteen {
#define GLEANRL_WIDTH 16
#include "layers_of_width.h"
#undef GLEANRL_WIDTH
}  // namespace sixteen
#pragma GCC pop_options
#endif

// The layers for registers of `width` floats; null if this processor doesn't support them.
const Layers* of_width(int width) {
#if defined(GLEANRL_HAS_WIDER_REGISTERS)
  if (width == 16 && has_avx512()) return &sixteen::kLayers;
  if (width == 8 && has_avx2()) return &eight::kLayers;
#endif
  return width == 4 ? &four::kLayers : nullptr;
}

const Layers* widest() {
  for (const int width : {16, 8}) {
    if (const Layers* const found = of_width(width)) return found;
  }
  return of_width(4);
}

const Layers* chosen = widest();

}  // namespace

const Layers& layers() { return *chosen; }

bool use_layer_width(int width) {
  const Layers* const found = of_width(width);
  if (found) chosen = found;
  return found != nullptr;
}

}  // namespace gleanrl
