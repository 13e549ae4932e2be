// Python bindings of small policies: the list of operations, its weights, and the columns that it reads and writes.
#include "core/actor.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arguments.h"
#include "core/layers.h"
#include "core/philox.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// A call of this many multiplications releases the GIL: it takes some 20 microseconds.
constexpr std::int64_t kReleaseProducts = 1 << 20;

double as_double(PyObject* item) {
  const double value = PyFloat_AsDouble(item);
  if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

int as_int(PyObject* item) {
  const std::int64_t value = as_number(item);
  if (value < INT32_MIN || value > INT32_MAX) throw std::invalid_argument("actor: expected a small number");
  return static_cast<int>(value);
}

// The items of a tuple of `length` items.
std::vector<PyObject*> items_of(PyObject* tuple, Py_ssize_t length) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != length) {
    throw std::invalid_argument("actor: expected a tuple of " + std::to_string(length));
  }
  std::vector<PyObject*> items;
  for (Py_ssize_t k = 0; k < length; ++k) items.push_back(PyTuple_GET_ITEM(tuple, k));
  return items;
}

Operation operation_of(PyObject* item) {
  const auto part = items_of(item, 5);
  return {static_cast<Kind>(as_int(part[0])), as_int(part[1]), read_list<int>(part[2], as_int),
          read_list<std::int64_t>(part[3], as_number), read_list<double>(part[4], as_double)};
}

Output output_of(PyObject* item) {
  const auto part = items_of(item, 2);
  return {as_int(part[0]), static_cast<Dtype>(as_int(part[1]))};
}

ColumnPlace place_of(PyObject* item) {
  const auto part = items_of(item, 3);
  return {as_address<std::byte*>(part[0]), as_number(part[1]), as_number(part[2])};
}

Weight weight_of(PyObject* item) {
  const auto part = items_of(item, 2);
  return {as_address<const float*>(part[0]), as_number(part[1])};
}

// Whether this thread computes with numbers below 2^-126 as zeros; see torch.set_flush_denormal.
bool flushes_denormals() {
  volatile float tiny = 0x1p-130f;
  return tiny * 1.0f == 0.0f;
}

bool act(ActorProgram& self, std::int64_t t) {
  bool valid = false;
  run(self.num_products() >= kReleaseProducts, [&] { valid = self.act(t); });
  return valid;
}

}  // namespace

void bind_actor(nb::module_& m) {
  nb::class_<ActorProgram>(m, "ActorProgram", "A policy as a list of operations on rows; see cpp/core/actor.h.")
      .def(
          "__init__",
          [](ActorProgram* self, nb::handle slots, nb::handle operations, nb::handle outputs, int num_inputs,
             int num_weights) {
            new (self)
                ActorProgram(read_list<std::int64_t>(slots, as_number), read_list<Operation>(operations, operation_of),
                             read_list<Output>(outputs, output_of), num_inputs, num_weights);
          },
          "slots"_a, "operations"_a, "outputs"_a, "num_inputs"_a, "num_weights"_a)
      .def(
          "pack", [](ActorProgram& self, nb::handle weights) { self.pack(read_list<Weight>(weights, weight_of)); },
          "weights"_a, "Copy the weights, (address, number of floats) each.")
      .def(
          "bind",
          [](ActorProgram& self, nb::handle inputs, nb::handle outputs, std::int64_t num_parts, std::int64_t num_steps,
             std::uint64_t key, std::uint64_t step, std::uint64_t first) {
            self.bind(read_list<ColumnPlace>(inputs, place_of), read_list<ColumnPlace>(outputs, place_of), num_parts,
                      num_steps, key, step, first);
          },
          "inputs"_a, "outputs"_a, "num_parts"_a, "num_steps"_a, "key"_a, "step"_a, "first"_a,
          "Read and write these columns, (address, bytes to the next environment, bytes to the next step) each.")
      .def("act", &act, "t"_a, "Compute row t and write its outputs; False if torch has to compute it.")
      .def_prop_ro("next_step", &ActorProgram::next_step);
  m.def("layer_width", [] { return layers().width; }, "How many floats a layer computes at a time.");
  m.def("use_layer_width", &use_layer_width, "n"_a, "Compute n floats at a time, if the processor can.");
  m.def("flushes_denormals", &flushes_denormals, "Whether this thread takes numbers below 2^-126 for zeros.");
  m.def(
      "philox",
      [](std::uint64_t key, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
        const Counter words = philox(key, {a, b, c, d});
        return nb::make_tuple(words[0], words[1], words[2], words[3]);
      },
      "key"_a, "a"_a, "b"_a, "c"_a, "d"_a, "Four random 32-bit numbers of a key and a counter.");
}

}  // namespace gleanrl
