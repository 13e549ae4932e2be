// The module `gleanrl._core`. Only the files in `cpp/bindings/` use nanobind and Python.
//
// Errors: std::out_of_range becomes IndexError, and std::invalid_argument becomes ValueError. An argument that should
// be an int and isn't raises TypeError.
#include "module.h"

#include "core/kernels.h"

using namespace nanobind::literals;

NB_MODULE(_core, m) {
  using namespace gleanrl;
  // A buffer in a script's global variable lives until the interpreter ends. nanobind would report it as a leak.
  nb::set_leak_warnings(false);
  m.doc() = "Bytes and row numbers in, bytes and row numbers out; see the headers in cpp/core/.";

  m.def("lanes", [] { return kernels().lanes; }, "How many doubles are worked on at a time.");
  m.def("use_lanes", &use_lanes, "n"_a, "Work on n doubles at a time, if the processor can.");
  bind_columns(m);
  bind_draws(m);
  bind_trajectories(m);
  bind_arithmetic(m);
  bind_arrays(m);
  bind_files(m);
  bind_tensors(m);
  bind_tensor_columns(m);
  bind_fresh(m);
  bind_actor(m);
}
