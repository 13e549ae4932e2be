// The parts of the module `gleanrl._core`. Each function adds the names of its file.
#pragma once

#include <nanobind/nanobind.h>

namespace gleanrl {

namespace nb = nanobind;

// Columns: gathered, written and put rows, counters, and a search for NaN.
void bind_columns(nb::module_& m);

// Generators, priorities and episodes: the classes that choose rows.
void bind_draws(nb::module_& m);

// Trajectory ids and step counts of a batch.
void bind_trajectories(nb::module_& m);

// Arithmetic on rows.
void bind_arithmetic(nb::module_& m);

// Functions over whole arrays: one-hot rows, checks for NaN, running sums.
void bind_arrays(nb::module_& m);

// Rows written from tensors, and checks whether tensors have changed.
void bind_tensors(nb::module_& m);

// Columns written from tensors.
void bind_tensor_columns(nb::module_& m);

// Small policies on rows of columns.
void bind_actor(nb::module_& m);

// New tensors with uninitialised memory.
void bind_fresh(nb::module_& m);

// Reading of files with checksums.
void bind_files(nb::module_& m);

}  // namespace gleanrl
