// The Python face of what takes tensors as they are: rows of several columns, written by one call.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "tensors.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

const dlpack::Exchange& exchange_of(nb::handle capsule) {
  const auto* exchange = dlpack::exchange_in(capsule.ptr());
  if (exchange == nullptr) throw std::invalid_argument("exchange: expected a capsule of DLPack's interface, version 1");
  return *exchange;
}

// Whether the elements lie back to back.
bool is_contiguous(const Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t dim = tensor.ndim; dim-- > 0;) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

const std::byte* data_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
}

// What the rows of one column are, and where they stand.
struct Column {
  dlpack::DataType dtype;
  std::vector<std::int64_t> shape;  // of a value: batch dimensions, then those of the leaf
  std::int64_t item_bytes;
  std::int64_t row_bytes;  // of one environment
  std::byte* data;
  std::byte* root;  // of the column whose next row gets the same values; null for none
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

// Writes rows of some columns ``[*batch, T, *leaf]``, each of which is one piece of memory on the CPU.
class TensorRows {
 public:
  TensorRows(nb::object exchange, nb::object tensor_class, nb::object columns, nb::object roots, std::int32_t time_dim)
      : exchange_(exchange_of(exchange)), class_(tensor_class), is_neg_(nb::steal(PyUnicode_InternFromString("is_neg"))) {
    const auto objects = {exchange, columns, roots};
    for (const nb::object& kept : objects) kept_.append(kept);
    std::size_t number = 0;
    for (const nb::handle column : columns) {
      const nb::object root = roots[number++];
      columns_.push_back(column_of(column, root, time_dim));
    }
  }

  // Writes row t, and row t + 1 of the roots; false, and nothing is written, if a value isn't a plain tensor as declared.
  bool write(std::int64_t t, nb::handle values) {
    if (t < 0 || t >= num_steps_) throw std::out_of_range("write: no such row");
    const nb::object fast = nb::steal(PySequence_Fast(values.ptr(), "write: expected a list or tuple of tensors"));
    if (!fast.is_valid()) throw nb::python_error();
    const std::size_t count = columns_.size();
    if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())) < count) {
      throw std::invalid_argument("write: expected a value for each column");
    }
    PyObject** const items = PySequence_Fast_ITEMS(fast.ptr());
    Tensor views[kMost];
    for (std::size_t i = 0; i < count; ++i) {
      if (!fits(columns_[i], items[i], views[i])) return false;
    }
    for (std::size_t i = 0; i < count; ++i) put(columns_[i], views[i], t);
    return true;
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
    if (view.device.type != dlpack::kCpu || !is_contiguous(view) || view.ndim <= time_dim) {
      throw std::invalid_argument("columns: expected one piece of memory on the CPU for each");
    }
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
    column.data = const_cast<std::byte*>(data_of(view));
    if (!root.is_none()) {
      const Tensor behind = view_of(root);
      const bool alike = behind.ndim == view.ndim && behind.dtype == view.dtype && is_contiguous(behind) &&
                         behind.device.type == dlpack::kCpu &&
                         std::memcmp(behind.shape, view.shape, sizeof(std::int64_t) * static_cast<std::size_t>(view.ndim)) == 0;
      if (!alike) throw std::invalid_argument("roots: expected columns like those whose rows they get");
      column.root = const_cast<std::byte*>(data_of(behind));
    }
    return column;
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

  void put(const Column& column, const Tensor& view, std::int64_t t) {
    const auto bytes = static_cast<std::size_t>(column.row_bytes);
    if (bytes == 0) return;
    const std::byte* from = data_of(view);
    if (!is_contiguous(view)) {
      pieces_.resize(bytes * static_cast<std::size_t>(num_parts_));
      if (num_parts_ != 0) copy_elements(pieces_.data(), view, column.item_bytes);
      from = pieces_.data();
    }
    for (std::int64_t part = 0; part < num_parts_; ++part, from += bytes) {
      const std::int64_t row = (part * num_steps_ + t) * column.row_bytes;
      std::memcpy(column.data + row, from, bytes);
      if (column.root != nullptr && t + 1 < num_steps_) std::memcpy(column.root + row + bytes, from, bytes);
    }
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
      "knows_exchange", [](nb::handle capsule) { return dlpack::exchange_in(capsule.ptr()) != nullptr; }, "capsule"_a,
      "Whether a capsule holds DLPack's exchange interface in a version that is known here.");
  nb::class_<TensorRows>(m, "TensorRows", "Rows of columns [*batch, T, *leaf], written from tensors.")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, std::int32_t>(), "exchange"_a, "tensor_class"_a,
           "columns"_a, "roots"_a, "time_dim"_a)
      .def("write", &TensorRows::write, "t"_a, "values"_a,
           "Write row t, and row t + 1 of the roots; False, and nothing is written, if a value isn't as declared.");
}

}  // namespace gleanrl
