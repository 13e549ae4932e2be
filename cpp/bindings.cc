// The Python face of the core, `gleanrl._core`: the only file that knows nanobind and Python.
//
// Addresses come as Python ints. Lists of them are read by hand: a call with eleven columns costs about a
// microsecond, and a caster that builds vectors element by element costs more than the copy.
//
// The interpreter lock is released around copies of `kReleaseBytes` or `kReleaseRows` and more. Shorter ones (one
// added row) take less time than handing the lock over, and a thread that gives it up beside a busy Python thread
// gets it back only after that thread's switch interval, 5 ms.
//
// Errors: std::out_of_range becomes IndexError, std::invalid_argument ValueError, anything that isn't an int where
// an int is due TypeError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "finite.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gleanrl {
namespace {

constexpr std::int64_t kReleaseBytes = 16 * 1024;
constexpr std::int64_t kReleaseRows = 64;

std::int64_t as_number(PyObject* item) {
  const long long value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

template <class Pointer>
Pointer as_address(PyObject* item) {
  const std::size_t value = PyLong_AsSize_t(item);
  if (value == static_cast<std::size_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return reinterpret_cast<Pointer>(value);
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

// n values of T at an address.
template <class T>
std::span<const T> array_at(const char* call, std::uintptr_t address, std::int64_t n) {
  if (n < 0) throw std::invalid_argument(std::string(call) + ": expected 0 or more values, got " + std::to_string(n));
  if (address == 0 && n > 0) throw std::invalid_argument(std::string(call) + ": null address");
  if (address % alignof(T) != 0) throw std::invalid_argument(std::string(call) + ": address isn't aligned");
  return {reinterpret_cast<const T*>(address), static_cast<std::size_t>(n)};
}

// bytes_per_row * rows >= kReleaseBytes without the product, which may overflow before the arguments are checked.
bool is_long(std::int64_t rows, std::int64_t bytes_per_row) {
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

void gather_rows(const Columns& self, std::uintptr_t index, std::int64_t n, nb::handle out, nb::handle wanted,
                 std::optional<std::int64_t> limit) {
  const auto rows = array_at<std::int64_t>("gather", index, n);
  const auto to = read_addresses<std::byte*>(out);
  std::vector<std::int64_t> some;
  if (!wanted.is_none()) some = read_list<std::int64_t>(wanted, as_number);
  const std::span<const std::int64_t> columns = wanted.is_none() ? self.all_columns() : some;
  run(is_long(n, self.bytes_per_row(columns)),
      [&] { self.gather(rows, to, columns, limit.value_or(self.num_rows())); });
}

void write_rows(const Columns& self, std::int64_t start, std::int64_t n, nb::handle src) {
  const auto from = read_addresses<const std::byte*>(src);
  run(is_long(n, self.bytes_per_row()), [&] { self.write(start, n, from); });
}

void put_rows(const Columns& self, std::uintptr_t index, std::int64_t n, nb::handle src) {
  const auto rows = array_at<std::int64_t>("put", index, n);
  const auto from = read_addresses<const std::byte*>(src);
  run(is_long(n, self.bytes_per_row()), [&] { self.put(rows, from); });
}

template <class Float>
std::int64_t find_nonfinite(std::uintptr_t address, std::int64_t n) {
  const auto values = array_at<Float>("first_nonfinite", address, n);
  std::int64_t first = -1;
  run(is_long(n, 1), [&] { first = first_nonfinite(values.data(), n); });
  return first;
}

std::int64_t* counters_at(const char* call, std::uintptr_t address, std::int64_t num_rows) {
  return const_cast<std::int64_t*>(array_at<std::int64_t>(call, address, num_rows).data());
}

}  // namespace
}  // namespace gleanrl

NB_MODULE(_core, m) {
  using namespace gleanrl;
  m.doc() = "Bytes and row numbers in, bytes and row numbers out; see the headers in cpp/.";

  nb::class_<Columns>(m, "Columns", "k columns of num_rows rows at addresses that the caller keeps alive.")
      .def(
          "__init__",
          [](Columns* self, nb::handle pointers, nb::handle row_bytes, std::int64_t num_rows) {
            new (self)
                Columns(read_addresses<std::byte*>(pointers), read_list<std::int64_t>(row_bytes, as_number), num_rows);
          },
          "pointers"_a, "row_bytes"_a, "num_rows"_a)
      .def_prop_ro("num_rows", &Columns::num_rows)
      .def_prop_ro("num_columns", &Columns::num_columns)
      .def("gather", &gather_rows, "index"_a, "n"_a, "out"_a, "wanted"_a = nb::none(), "limit"_a = nb::none(),
           "Copy rows index[0:n] of the wanted columns (all by default) into the arrays at `out`.")
      .def("write", &write_rows, "start"_a, "n"_a, "src"_a,
           "Write n rows from the arrays at `src` to start, start + 1, ..., around the end of the ring.")
      .def("put", &put_rows, "index"_a, "n"_a, "src"_a,
           "Write n rows from the arrays at `src` to rows index[0:n]; of equal numbers the last one wins.");

  m.def("first_nonfinite_f32", &find_nonfinite<float>, "address"_a, "n"_a,
        "Position of the first NaN or infinity among n float32 values, or -1.");
  m.def("first_nonfinite_f64", &find_nonfinite<double>, "address"_a, "n"_a,
        "Position of the first NaN or infinity among n float64 values, or -1.");
  m.def(
      "bump",
      [](std::uintptr_t counters, std::int64_t start, std::int64_t n, std::int64_t num_rows) {
        bump(counters_at("bump", counters, num_rows), start, n, num_rows);
      },
      "counters"_a, "start"_a, "n"_a, "num_rows"_a, "Add 1 to n int64 counters of a ring from `start` on.");
  m.def(
      "bump_at",
      [](std::uintptr_t counters, std::uintptr_t index, std::int64_t n, std::int64_t num_rows) {
        const auto rows = array_at<std::int64_t>("bump_at", index, n);
        bump_at(counters_at("bump_at", counters, num_rows), rows.data(), n, num_rows);
      },
      "counters"_a, "index"_a, "n"_a, "num_rows"_a, "Add 1 to the int64 counters index[0:n].");
}
