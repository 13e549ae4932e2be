// The Python face of what takes tensors as they are: rows of several columns, written by one call.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "tensors.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

// The interface in a capsule; null if it is none, or of another major version.
const dlpack::Exchange* exchange_in(nb::handle capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) return nullptr;
  auto* found = static_cast<const dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  while (found != nullptr && found->major != dlpack::kMajor) found = found->previous;
  const auto* exchange = reinterpret_cast<const dlpack::Exchange*>(found);
  return exchange == nullptr || exchange->view_of_object == nullptr ? nullptr : exchange;
}

const dlpack::Exchange& exchange_of(nb::handle capsule) {
  const auto* exchange = exchange_in(capsule);
  if (exchange == nullptr) throw std::invalid_argument("exchange: expected a capsule of DLPack's interface, version 1");
  return *exchange;
}

bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

// Whether dimensions [first, stop), of a tensor that isn't empty, are like one whose elements lie `distance` apart; -1
// becomes what it is, and stays where there is only one element.
bool is_even(const Tensor& tensor, std::int32_t first, std::int32_t stop, std::int64_t& distance) {
  std::int64_t expected = distance;
  for (std::int32_t dim = stop; dim-- > first;) {
    if (tensor.shape[dim] == 1) continue;
    if (distance < 0) distance = expected = tensor.strides[dim];
    if (tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

// Whether the elements lie back to back.
bool is_contiguous(const Tensor& tensor) {
  std::int64_t distance = 1;
  return is_empty(tensor) || is_even(tensor, 0, tensor.ndim, distance);
}

const std::byte* data_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
}

// Where the rows of a column stand: that of environment p and step t at data + p * part + t * step. A step of 0 is that
// of a single row which all steps write.
struct Place {
  std::byte* data;
  std::int64_t part;
  std::int64_t step;
};

// What the rows of one column are, and where they stand.
struct Column {
  nb::object key;
  bool is_flag;
  dlpack::DataType dtype;
  std::vector<std::int64_t> shape;  // of a value: batch dimensions, then those of the leaf
  std::int64_t item_bytes;
  std::int64_t row_bytes;  // of one environment
  Place rows;
  std::optional<Place> root;  // of the column whose next row gets the same values
};

// Copies what isn't in one piece: an element after the other, in order.
void copy_elements(std::byte* to, const Tensor& from, std::int64_t item_bytes) {
  std::vector<std::int64_t> at(static_cast<std::size_t>(from.ndim));
  const std::byte* data = data_of(from);
  for (;;) {
    std::int64_t offset = 0;
    for (std::int32_t dim = 0; dim < from.ndim; ++dim) offset += at[static_cast<std::size_t>(dim)] * from.strides[dim];
    std::memcpy(to, data + offset * item_bytes, static_cast<std::size_t>(item_bytes));
    to += item_bytes;
    std::int32_t dim = from.ndim;
    while (dim-- > 0 && ++at[static_cast<std::size_t>(dim)] == from.shape[dim]) at[static_cast<std::size_t>(dim)] = 0;
    if (dim < 0) return;
  }
}

// Writes rows of some columns ``[*batch, T, *leaf]`` on the CPU.
class TensorRows {
 public:
  TensorRows(nb::object exchange, nb::object tensor_class, nb::dict columns, nb::dict roots, nb::list flags,
             std::int32_t time_dim)
      : exchange_(exchange_of(exchange)),
        class_(tensor_class),
        is_neg_(nb::steal(PyUnicode_InternFromString("is_neg"))) {
    const auto objects = {exchange, nb::object(columns), nb::object(roots)};
    for (const nb::object& kept : objects) kept_.append(kept);
    for (const auto [key, column] : columns) {
      const nb::object root = roots.contains(key) ? nb::object(roots[key]) : nb::none();
      columns_.push_back(column_of(column, root, time_dim));
      columns_.back().key = nb::borrow(key);
      columns_.back().is_flag = PySequence_Contains(flags.ptr(), key.ptr()) == 1;
    }
  }

  // Writes row t, and row t + 1 of the roots; none, and nothing is written, if a value isn't a plain tensor as declared.
  // Returns whether a flag is set.
  nb::object write(std::int64_t t, nb::dict values, bool exactly) {
    if (t < 0 || t >= num_steps_) throw nb::index_error("write: no such row");
    const std::size_t count = columns_.size();
    if (exactly && values.size() != count) return nb::none();
    Tensor views[kMost];
    for (std::size_t i = 0; i < count; ++i) {
      PyObject* const value = PyDict_GetItemWithError(values.ptr(), columns_[i].key.ptr());
      if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
      if (value == nullptr || !fits(columns_[i], value, views[i])) return nb::none();
    }
    bool set = false;
    for (std::size_t i = 0; i < count; ++i) set |= put(columns_[i], views[i], t);
    return nb::bool_(set);
  }

 private:
  static constexpr std::size_t kMost = 64;

  Tensor view_of(nb::handle tensor) const {
    Tensor view{};
    if (exchange_.view_of_object(tensor.ptr(), &view) != 0) throw nb::python_error();
    return view;
  }

  Column column_of(nb::handle object, nb::handle root, std::int32_t time_dim) {
    if (columns_.size() == kMost) throw std::invalid_argument("columns: too many");
    const Tensor view = view_of(object);
    if (view.ndim <= time_dim) throw std::invalid_argument("columns: expected a dimension of time");
    Column column{};
    column.dtype = view.dtype;
    column.item_bytes = view.dtype.bits * view.dtype.lanes / 8;
    column.row_bytes = column.item_bytes;
    num_parts_ = 1;
    for (std::int32_t dim = 0; dim < view.ndim; ++dim) {
      if (dim == time_dim) continue;
      column.shape.push_back(view.shape[dim]);
      (dim < time_dim ? num_parts_ : column.row_bytes) *= view.shape[dim];
    }
    num_steps_ = view.shape[time_dim];
    column.rows = place_of(view, time_dim, column.item_bytes);
    if (!root.is_none()) {
      const Tensor behind = view_of(root);
      const bool alike = behind.dtype == view.dtype &&
                         std::equal(view.shape, view.shape + view.ndim, behind.shape, behind.shape + behind.ndim);
      if (!alike) throw std::invalid_argument("roots: expected columns like those whose rows they get");
      column.root = place_of(behind, time_dim, column.item_bytes);
    }
    return column;
  }

  static Place place_of(const Tensor& column, std::int32_t time_dim, std::int64_t item_bytes) {
    auto* const data = const_cast<std::byte*>(data_of(column));
    if (column.device.type != dlpack::kCpu) throw std::invalid_argument("columns: expected memory on the CPU");
    if (is_empty(column)) return {data, 0, 0};
    std::int64_t part = -1;
    std::int64_t item = 1;
    if (!is_even(column, 0, time_dim, part) || !is_even(column, time_dim + 1, column.ndim, item)) {
      throw std::invalid_argument("columns: expected whole rows at equal distances");
    }
    return {data, std::max<std::int64_t>(part, 0) * item_bytes, column.strides[time_dim] * item_bytes};
  }

  bool fits(const Column& column, PyObject* value, Tensor& view) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != class_.ptr()) return false;
    if (exchange_.view_of_object(value, &view) != 0) {
      PyErr_Clear();  // it has no memory that could be shown
      return false;
    }
    if (view.device.type != dlpack::kCpu || view.dtype != column.dtype ||
        static_cast<std::size_t>(view.ndim) != column.shape.size()) {
      return false;
    }
    for (std::size_t dim = 0; dim < column.shape.size(); ++dim) {
      if (view.shape[dim] != column.shape[dim]) return false;
    }
    PyObject* const args[] = {value};
    const nb::object negative =
        nb::steal(PyObject_VectorcallMethod(is_neg_.ptr(), args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!negative.is_valid()) throw nb::python_error();
    return negative.ptr() == Py_False;  // lazily: it has other bytes
  }

  // Returns whether it's a flag that is set.
  bool put(const Column& column, const Tensor& view, std::int64_t t) {
    const auto bytes = static_cast<std::size_t>(column.row_bytes);
    if (bytes == 0) return false;
    const std::byte* from = data_of(view);
    if (!is_contiguous(view)) {
      pieces_.resize(bytes * static_cast<std::size_t>(num_parts_));
      if (num_parts_ != 0) copy_elements(pieces_.data(), view, column.item_bytes);
      from = pieces_.data();
    }
    place(column.rows, t, from, bytes);
    if (column.root && t + 1 < num_steps_) place(*column.root, t + 1, from, bytes);
    const std::byte* const end = from + bytes * static_cast<std::size_t>(num_parts_);
    return column.is_flag && std::any_of(from, end, [](std::byte item) { return item != std::byte{0}; });
  }

  void place(const Place& rows, std::int64_t t, const std::byte* from, std::size_t bytes) const {
    std::byte* to = rows.data + t * rows.step;
    for (std::int64_t part = 0; part < num_parts_; ++part, from += bytes, to += rows.part) std::memcpy(to, from, bytes);
  }

  const dlpack::Exchange& exchange_;
  nb::object class_;
  nb::object is_neg_;
  nb::list kept_;  // the memory behind the addresses
  std::vector<Column> columns_;
  std::vector<std::byte> pieces_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_parts_ = 1;
};

}  // namespace

void bind_tensors(nb::module_& m) {
  m.def(
      "knows_exchange", [](nb::handle capsule) { return exchange_in(capsule) != nullptr; }, "capsule"_a,
      "Whether a capsule holds DLPack's exchange interface in a version that is known here.");
  nb::class_<TensorRows>(m, "TensorRows", "Rows of columns [*batch, T, *leaf], written from tensors.")
      .def(nb::init<nb::object, nb::object, nb::dict, nb::dict, nb::list, std::int32_t>(), "exchange"_a,
           "tensor_class"_a, "columns"_a, "roots"_a, "flags"_a, "time_dim"_a)
      .def("write", &TensorRows::write, "t"_a, "values"_a, "exactly"_a = false,
           "Write row t, and row t + 1 of the roots; None, and nothing is written, if a value isn't as declared.");
}

}  // namespace gleanrl
