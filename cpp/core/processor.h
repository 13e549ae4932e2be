// Tests for instructions of the processor that not all code of the core may use.
//
// Threads. A plain function.
#pragma once

// Clang doesn't support the pragmas that compile a part of a file for other processors.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GLEANRL_HAS_WIDER_REGISTERS

namespace gleanrl {

// Whether the processor has AVX-512, with the parts that the options in kernels.cc and layers.cc name.
inline bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
}

inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2");
}

}  // namespace gleanrl
#endif
