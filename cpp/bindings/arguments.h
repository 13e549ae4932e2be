// Helpers shared by the Python bindings: conversion of integers and addresses, and the rule for releasing the GIL.
//
// Python passes addresses as ints. Lists of them are converted by hand: a call with eleven columns costs about a
// microsecond, while nanobind's caster for vectors costs more than the copy of the rows.
//
// The GIL is released around copies of at least `kReleaseBytes` or `kReleaseRows`. A shorter copy, such as one added
// row, takes less time than releasing the lock. And if another Python thread is busy, the thread gets the lock back
// only after the switch interval of 5 ms. For the same reason the trees and the episode table keep the GIL for up to
// `kReleaseSearches` rows, or a pass over `kReleasePasses` rows. A draw of a batch takes some microseconds, and its
// caller usually holds the buffer's lock, which other threads wait for.
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

// Releases the GIL for the whole call; for rare and long calls.
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

// The items of a sequence, each converted by `read`. A sequence that isn't a list or tuple is converted to a list
// first.
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

}  // namespace gleanrl
