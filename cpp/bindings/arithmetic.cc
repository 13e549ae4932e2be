// Python bindings of arithmetic on rows of columns, with operands from tensors.
#include "core/arithmetic.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "exchange.h"
#include "held_rows.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

template <class Kind>
Kind as_kind(nb::handle object, const char* what) {
  if (!nb::isinstance<Kind>(object)) throw nb::type_error(what);
  return nb::borrow<Kind>(object);
}

FloatRows floats(const HeldRows& rows) {
  if (rows.kind() != 'f' && rows.kind() != 'd') throw std::invalid_argument("row maps: expected float32 or float64");
  return {rows.grid(), rows.kind() == 'f'};
}

// The operand that a dictionary holds under a name. Each use looks it up again, because the tensor may be replaced or
// moved.
class Numbers {
 public:
  Numbers(nb::dict holder, nb::handle name, bool is_float) : holder_(holder), name_(nb::borrow(name)) {
    dtype_ = {dlpack::kFloat, static_cast<std::uint8_t>(is_float ? 32 : 64), 1};
  }

  // Stores shape and strides of the present tensor; returns the byte offset of its number for each element of a row.
  // Throws std::invalid_argument if there is no tensor that broadcasts with rows of this shape.
  std::vector<std::int64_t> elements(const Exchange& exchange, const std::vector<std::int64_t>& row) {
    Tensor view{};
    if (!is_plain(exchange) || !is_shown(exchange, view) || static_cast<std::size_t>(view.ndim) > row.size()) refuse();
    shape_.assign(view.shape, view.shape + view.ndim);
    strides_.assign(view.strides, view.strides + view.ndim);
    std::vector<std::int64_t> found{0};
    const std::size_t more = row.size() - shape_.size();
    for (std::size_t dim = 0; dim < row.size(); ++dim) {
      const std::int64_t size = dim < more ? 1 : shape_[dim - more];
      if (size != 1 && size != row[dim]) refuse();
      add_dimension(found, row[dim], size == 1 ? 0 : strides_[dim - more] * dtype_.bits / 8);
    }
    return found;
  }

  // Whether the entry is a tensor whose bytes are its values (see Exchange::is_plain). Python code may run.
  bool is_plain(const Exchange& exchange) const { return exchange.is_plain(found()); }

  // The present address of a plain tensor's numbers; null if its shape or strides have changed.
  std::byte* data(const Exchange& exchange) const {
    Tensor view{};
    if (!is_shown(exchange, view) || static_cast<std::size_t>(view.ndim) != shape_.size()) return nullptr;
    const bool alike = std::equal(shape_.begin(), shape_.end(), view.shape) &&
                       std::equal(strides_.begin(), strides_.end(), view.strides);
    return alike ? const_cast<std::byte*>(dlpack::data_of(view)) : nullptr;
  }

 private:
  // The entry of the dictionary; null if the name is missing.
  PyObject* found() const {
    PyObject* const object = PyDict_GetItemWithError(holder_.ptr(), name_.ptr());
    if (object == nullptr && PyErr_Occurred()) throw nb::python_error();
    return object;
  }

  // Whether the entry is a tensor of the expected dtype with memory on the CPU.
  bool is_shown(const Exchange& exchange, Tensor& view) const {
    return exchange.shows(found(), view) && view.device.type == dlpack::kCpu && view.dtype == dtype_ &&
           view.data != nullptr;
  }

  [[noreturn]] void refuse() const {
    throw std::invalid_argument(
        std::string("row maps: expected a tensor that broadcasts with a row, in the dtype at ") + "that point, under " +
        nb::repr(name_).c_str());
  }

  nb::dict holder_;
  nb::object name_;
  dlpack::DataType dtype_;
  std::vector<std::int64_t> shape_, strides_;
};

// Computes rows of columns by arithmetic on rows of other columns.
//
// Lifetime.  The object holds references to arrays and dictionaries. Tensors in the dictionaries may be replaced or
//   moved, so each call looks up their addresses.
// Threads.   One caller at a time, with the GIL.
// Cost.      About 0.1 us for each tensor of numbers, and some nanoseconds for each value.
class RowMaps {
 public:
  // Each map is (source, after, roots, operations). The first three are arrays; roots may be None. An operation is
  // (name, dictionary of tensors, key in it), or (name, None, None).
  RowMaps(nb::object exchange, nb::object tensor_class, nb::list maps) {
    if (!exchange.is_none()) exchange_.emplace(exchange, tensor_class);
    for (const nb::handle one : maps) maps_.push_back(map_of(as_kind<nb::tuple>(one, "row maps: expected tuples")));
  }
  RowMaps(const RowMaps&) = delete;
  RowMaps& operator=(const RowMaps&) = delete;

  // Writes row t, and row t + 1 of the roots. Returns false and writes nothing if shape or strides of a tensor changed.
  bool run(std::int64_t t) {
    for (const Map& map : maps_) {
      if (t < 0 || t >= map.num_rows) throw std::out_of_range("run: no such row, or none behind it");
    }
    // `is_plain` may run Python code, which may move tensors. So the addresses are read afterwards.
    for (const auto& [numbers, place] : numbers_) {
      if (!numbers.is_plain(*exchange_)) return false;
    }
    for (const auto& [numbers, place] : numbers_) {
      std::byte* const data = numbers.data(*exchange_);
      if (data == nullptr) return false;
      maps_[place.map].operations[place.operation].operand.grid.data = data;
    }
    for (const Map& map : maps_) {
      for (std::size_t e = 0; e < map.source.grid.elements.size(); ++e) {
        const double value = mapped(map.source, map.operations, t, e);
        map.after.put(t, e, value);
        if (map.roots) map.roots->put(t + 1, e, value);
      }
    }
    return true;
  }

 private:
  struct Map {
    FloatRows source, after;
    std::optional<FloatRows> roots;
    std::vector<Operation> operations;
    std::int64_t num_rows;
  };

  // The position of an operand: the map, and the operation in it.
  struct Place {
    std::size_t map, operation;
  };

  Map map_of(const nb::tuple& given) {
    if (given.size() != 4) throw std::invalid_argument("row maps: expected source, after, roots and operations");
    const HeldRows& source = hold("source", given[0], 0);
    const HeldRows& after = hold("after", given[1], PyBUF_WRITABLE);
    Map map{floats(source), floats(after), {}, {}, std::min(source.num_rows(), after.num_rows())};
    if (!given[2].is_none()) {
      const HeldRows& roots = hold("roots", given[2], PyBUF_WRITABLE);
      if (!roots.is_like(after)) throw std::invalid_argument("row maps: expected `roots` like `after`");
      map.roots = floats(roots);
      map.num_rows = std::min(map.num_rows, roots.num_rows() - 1);
    }
    bool is_float = map.source.is_float;
    for (const nb::handle one : as_kind<nb::list>(given[3], "row maps: expected a list of operations")) {
      const auto parts = as_kind<nb::tuple>(one, "row maps: expected operations that are tuples");
      map.operations.push_back(operation_of(parts, source.row_shape(), is_float, map.operations.size()));
      is_float = map.operations.back().is_float;
    }
    if (!source.has_rows_like(after) || map.after.is_float != is_float) {
      throw std::invalid_argument(
          "row maps: expected `after` with rows of the source's shape, in the dtype that operations end in");
    }
    return map;
  }

  // `is_float`: whether the values before the operation are float32; `at`: the operation's position.
  Operation operation_of(const nb::tuple& given, const std::vector<std::int64_t>& row, bool is_float, std::size_t at) {
    if (given.size() != 3) throw std::invalid_argument("row maps: expected a name, and where its numbers are");
    const auto name = as_kind<nb::str>(given[0], "row maps: expected names of operations");
    const auto is = [&](const char* known) { return PyUnicode_CompareWithASCIIString(name.ptr(), known) == 0; };
    if (is("float32") || is("float64")) return {Arithmetic::kConvert, {}, is("float32")};
    constexpr std::pair<const char*, Arithmetic> kNames[] = {{"add", Arithmetic::kAdd},
                                                             {"subtract", Arithmetic::kSubtract},
                                                             {"multiply", Arithmetic::kMultiply},
                                                             {"divide", Arithmetic::kDivide}};
    const auto* const known =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& one) { return is(one.first); });
    if (known == std::end(kNames)) {
      throw std::invalid_argument(std::string("row maps: unknown operation ") + nb::repr(name).c_str());
    }
    if (!exchange_) throw std::invalid_argument("row maps: numbers are read by DLPack's exchange interface");
    Numbers numbers(as_kind<nb::dict>(given[1], "row maps: expected a dictionary of tensors"), given[2], is_float);
    const FloatRows operand{{nullptr, 0, numbers.elements(*exchange_, row)}, is_float};
    numbers_.push_back({std::move(numbers), {maps_.size(), at}});
    return {known->second, operand, is_float};
  }

  const HeldRows& hold(const char* name, nb::handle array, int more) { return held_.emplace_back(name, array, more); }

  std::optional<Exchange> exchange_;
  std::deque<HeldRows> held_;  // the memory behind the grids
  std::vector<Map> maps_;
  std::vector<std::pair<Numbers, Place>> numbers_;
};

}  // namespace

void bind_arithmetic(nb::module_& m) {
  nb::class_<RowMaps>(m, "RowMaps", "Arithmetic on rows of columns.")
      .def(nb::init<nb::object, nb::object, nb::list>(), "exchange"_a.none(), "tensor_class"_a, "maps"_a)
      .def("run", &RowMaps::run, "t"_a,
           "Write row t, and row t + 1 of the roots; False, and nothing is written, if numbers have another form now.");
}

}  // namespace gleanrl
