// What the parts of the Python face share: numbers and addresses out of Python, and when the interpreter lock is released.
//
// Addresses come as Python ints. Lists of them are read by hand: a call with eleven columns costs about a
// microsecond, and a caster that builds vectors element by element costs more than the copy.
//
// The interpreter lock is released around copies of `kReleaseBytes` or `kReleaseRows` and more. Shorter ones (one
// added row) take less time than handing the lock over, and a thread that gives it up beside a busy Python thread
// gets it back only after that thread's switch interval, 5 ms. The trees and the episode table keep it up to
// `kReleaseSearches` rows (or a pass over `kReleasePasses`) for the same reason: a batch's draw takes some microseconds,
// and its caller mostly holds a lock that others wait for.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace gleanrl {

namespace nb = nanobind;

inline constexpr std::int64_t kReleaseBytes = 16 * 1024;
inline constexpr std::int64_t kReleaseRows = 64;
inline constexpr std::int64_t kReleaseSearches = 1024;
inline constexpr std::int64_t kReleasePasses = 16 * 1024;

// Of calls that are rare and long.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

inline std::int64_t as_number(PyObject* item) {
  const long long value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

template <class Pointer>
Pointer as_address(PyObject* item) {
  const std::size_t value = PyLong_AsSize_t(item);
  if (value == static_cast<std::size_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  if constexpr (std::is_pointer_v<Pointer>) {
    return reinterpret_cast<Pointer>(value);
  } else {
    return value;
  }
}

// The items of a list or tuple (anything else is listed first), each read by `read`.
template <class Value, class Read>
std::vector<Value> read_list(nb::handle sequence, Read read) {
  const nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "expected a list or tuple of ints"));
  if (!fast.is_valid()) throw nb::python_error();
  const Py_ssize_t length = PySequence_Fast_GET_SIZE(fast.ptr());
  std::vector<Value> values;
  values.reserve(static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) values.push_back(read(PySequence_Fast_GET_ITEM(fast.ptr(), i)));
  return values;
}

template <class Pointer>
std::vector<Pointer> read_addresses(nb::handle sequence) {
  return read_list<Pointer>(sequence, as_address<Pointer>);
}

// bytes_per_row * rows >= kReleaseBytes without the product, which may overflow before the arguments are checked.
inline bool is_long(std::int64_t rows, std::int64_t bytes_per_row) {
  return rows >= kReleaseRows || (rows > 0 && bytes_per_row >= kReleaseBytes / rows);
}

template <class Call>
void run(bool without_lock, Call call) {
  if (without_lock) {
    const nb::gil_scoped_release released;
    call();
  } else {
    call();
  }
}

// The classes that decide which rows to draw.
void bind_draws(nb::module_& m);

// What numbers the frames of a batch.
void bind_trajectories(nb::module_& m);

// What does arithmetic on rows.
void bind_arithmetic(nb::module_& m);

// What works on whole arrays.
void bind_arrays(nb::module_& m);

// What takes tensors.
void bind_tensors(nb::module_& m);

// What writes columns from tensors.
void bind_tensor_columns(nb::module_& m);

// What makes tensors.
void bind_fresh(nb::module_& m);

// What reads and checks files.
void bind_files(nb::module_& m);

}  // namespace gleanrl
