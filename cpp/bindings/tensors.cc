// Python bindings for tensors: writing a row of several columns in one call, and checks whether tensors have changed.
#include "core/tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "arguments.h"
#include "exchange.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

// The layout of a column: the row of environment p and step t is at data + p * part + t * step. If `step` is 0, all
// steps write the same row.
struct Place {
  std::byte* data;
  std::int64_t part;
  std::int64_t step;
};

// The description and the layout of one column.
struct Column {
  nb::object key;
  bool is_flag;
  dlpack::DataType dtype;
  std::vector<std::int64_t> shape;  // shape of a value: batch dimensions, then the leaf's dimensions
  std::int64_t item_bytes;
  std::int64_t row_bytes;  // bytes of one environment's row
  Place rows;
  std::optional<Place> root;  // layout of the root column, whose next row gets the same values
};

// Writes rows of columns ``[*batch, T, *leaf]`` on the CPU. All columns have the same batch size and number of steps.
//
// Lifetime.  The object holds references to the columns. Their memory must not move: after `set_` or `share_memory_`
//   the stored address would be invalid.
// Threads.   One caller at a time, with the GIL.
// Failure.   Every value is checked before the first byte is written.
// Overlap.   Values may be rows of the columns.
// Cost.      About 0.2 us for each value, most of it for reading the tensor's description from torch.
class TensorRows {
 public:
  TensorRows(nb::object exchange, nb::object tensor_class, nb::dict columns, nb::dict roots, nb::list flags,
             std::int32_t time_dim)
      : exchange_(exchange, tensor_class) {
    if (columns.size() == 0) throw std::invalid_argument("columns: expected one at least");
    for (const nb::object& kept : {nb::object(columns), nb::object(roots)}) kept_.append(kept);
    for (const auto [key, column] : columns) {
      const nb::object root = roots.contains(key) ? nb::object(roots[key]) : nb::none();
      const bool is_flag = PySequence_Contains(flags.ptr(), key.ptr()) == 1;
      columns_.push_back(column_of(key, is_flag, exchange_.view_of(column), time_dim));
      if (!root.is_none()) {
        columns_.back().root = root_of(columns_.back(), exchange_.view_of(column), exchange_.view_of(root), time_dim);
      }
    }
  }

  // Writes row t, and row t + 1 of the roots. Returns whether a flag is set; returns None and writes nothing if a value
  // isn't a plain tensor of the declared dtype and shape.
  nb::object write(std::int64_t t, nb::handle values, bool exactly) {
    if (t < 0 || t >= num_steps_) throw nb::index_error("write: no such row");
    nb::object given = nb::borrow(values);
    if (!PyDict_Check(values.ptr())) {  // a mapping that isn't a dict
      given = nb::steal(PyDict_New());
      if (PyDict_Update(given.ptr(), values.ptr()) != 0) throw nb::python_error();
    }
    const std::size_t count = columns_.size();
    if (exactly && static_cast<std::size_t>(PyDict_Size(given.ptr())) != count) return nb::none();
    Tensor few[kFew];
    std::vector<Tensor> many(count > kFew ? count : 0);
    Tensor* const views = count > kFew ? many.data() : few;
    // `is_plain` may run Python code, which may change values. So their views are read afterwards.
    for (const Column& column : columns_) {
      if (!exchange_.is_plain(value_at(given, column))) return nb::none();
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!fits(columns_[i], value_at(given, columns_[i]), views[i])) return nb::none();
    }
    stage(views, count);
    bool set = false;
    for (std::size_t i = 0; i < count; ++i) set |= put(columns_[i], views[i], t);
    return nb::bool_(set);
  }

 private:
  // Up to this number of views are stored on the stack.
  static constexpr std::size_t kFew = 32;
  // Non-contiguous values up to this number of bytes are copied here. Larger ones, such as transposed images, are
  // refused, so that the caller copies them by torch, which has fast kernels for this.
  static constexpr std::size_t kScattered = 1024;

  Column column_of(nb::handle key, bool is_flag, const Tensor& view, std::int32_t time_dim) {
    if (time_dim < 0 || view.ndim <= time_dim) throw std::invalid_argument("columns: expected a dimension of time");
    Column column{nb::borrow(key), is_flag, view.dtype, {}, dlpack::item_bytes(view.dtype), 0, {}, {}};
    std::int64_t num_parts = 1;
    column.row_bytes = column.item_bytes;
    for (std::int32_t dim = 0; dim < view.ndim; ++dim) {
      if (dim == time_dim) continue;
      column.shape.push_back(view.shape[dim]);
      (dim < time_dim ? num_parts : column.row_bytes) *= view.shape[dim];
    }
    if (columns_.empty()) {
      num_parts_ = num_parts;
      num_steps_ = view.shape[time_dim];
    } else if (num_parts != num_parts_ || view.shape[time_dim] != num_steps_) {
      throw std::invalid_argument("columns: expected the same batch and as many steps");
    }
    column.rows = place_of(view, time_dim, column.item_bytes);
    return column;
  }

  static Place root_of(const Column& column, const Tensor& view, const Tensor& behind, std::int32_t time_dim) {
    const bool alike = behind.dtype == view.dtype &&
                       std::equal(view.shape, view.shape + view.ndim, behind.shape, behind.shape + behind.ndim);
    if (!alike) throw std::invalid_argument("roots: expected columns like those whose rows they get");
    return place_of(behind, time_dim, column.item_bytes);
  }

  static Place place_of(const Tensor& column, std::int32_t time_dim, std::int64_t item_bytes) {
    auto* const data = const_cast<std::byte*>(dlpack::data_of(column));
    if (column.device.type != dlpack::kCpu) throw std::invalid_argument("columns: expected memory on the CPU");
    if (dlpack::is_empty(column)) return {data, 0, 0};
    const std::int64_t part = dlpack::innermost_stride(column, 0, time_dim);
    if (!dlpack::is_even(column, 0, time_dim, part) || !dlpack::is_even(column, time_dim + 1, column.ndim, 1)) {
      throw std::invalid_argument("columns: expected whole rows at equal distances");
    }
    return {data, part * item_bytes, column.strides[time_dim] * item_bytes};
  }

  // The value of a column; null if the mapping has no such key.
  static PyObject* value_at(const nb::object& values, const Column& column) {
    PyObject* const value = PyDict_GetItemWithError(values.ptr(), column.key.ptr());
    if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
    return value;
  }

  bool fits(const Column& column, PyObject* value, Tensor& view) const {
    if (!exchange_.shows(value, view)) return false;
    if (view.device.type != dlpack::kCpu || view.dtype != column.dtype ||
        static_cast<std::size_t>(view.ndim) != column.shape.size()) {
      return false;
    }
    for (std::size_t dim = 0; dim < column.shape.size(); ++dim) {
      if (view.shape[dim] != column.shape[dim]) return false;
    }
    if (dlpack::is_empty(view)) return true;
    if (view.data == nullptr) return false;  // lazy zeros (ZeroTensor) have no memory
    return value_bytes(column) <= kScattered || dlpack::is_contiguous(view);
  }

  // Copies values that aren't contiguous, and values in the memory of a column: writing another value could overwrite
  // them before they are read.
  void stage(Tensor* views, std::size_t count) {
    std::size_t used = 0;
    for (std::size_t i = 0; i < count; ++i) used += is_staged(views[i]) ? value_bytes(columns_[i]) : 0;
    if (used == 0) return;
    pieces_.resize(used);
    std::byte* to = pieces_.data();
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_staged(views[i])) continue;
      dlpack::copy_elements(to, views[i], columns_[i].item_bytes);
      views[i].data = to;
      views[i].byte_offset = 0;
      to += value_bytes(columns_[i]);
    }
  }

  std::size_t value_bytes(const Column& column) const {
    return static_cast<std::size_t>(column.row_bytes * num_parts_);
  }

  bool is_staged(const Tensor& view) const {
    if (dlpack::is_empty(view)) return false;
    if (!dlpack::is_contiguous(view)) return true;
    const std::byte* const data = dlpack::data_of(view);
    const auto stands_in = [&](const Place& rows) {
      return data >= rows.data && data <= rows.data + (num_parts_ - 1) * rows.part + (num_steps_ - 1) * rows.step;
    };
    return std::any_of(columns_.begin(), columns_.end(), [&](const Column& column) {
      return stands_in(column.rows) || (column.root && stands_in(*column.root));
    });
  }

  // Writes a value; returns whether its column is a flag with a True element.
  bool put(const Column& column, const Tensor& view, std::int64_t t) {
    const auto bytes = static_cast<std::size_t>(column.row_bytes);
    if (bytes == 0) return false;
    const std::byte* const from = dlpack::data_of(view);
    place(column.rows, t, from, bytes);
    if (column.root && t + 1 < num_steps_) place(*column.root, t + 1, from, bytes);
    const std::byte* const end = from + bytes * static_cast<std::size_t>(num_parts_);
    return column.is_flag && std::any_of(from, end, [](std::byte item) { return item != std::byte{0}; });
  }

  void place(const Place& rows, std::int64_t t, const std::byte* from, std::size_t bytes) const {
    std::byte* to = rows.data + t * rows.step;
    for (std::int64_t part = 0; part < num_parts_; ++part, from += bytes, to += rows.part) std::memcpy(to, from, bytes);
  }

  Exchange exchange_;
  nb::list kept_;  // keeps the columns alive, since `columns_` holds addresses
  std::vector<Column> columns_;
  std::vector<std::byte> pieces_;  // copies of values, made before the first write
  std::int64_t num_steps_ = 0;
  std::int64_t num_parts_ = 1;
};

// The addresses and version counters of tensors, to detect whether user code that got the tensors has changed them.
//
// Torch has one version counter for a tensor and all its views, the attribute `_version`. If DLPack can't show an
// object, its method `data_ptr` gives the address. So the class accepts any object that has both.
//
// Threads.   One caller at a time, with the GIL.
class TensorMarks {
 public:
  TensorMarks(nb::object exchange, nb::object tensor_class)
      : exchange_(exchange, tensor_class), version_(name_of("_version")), data_ptr_(name_of("data_ptr")) {}

  void take(nb::tuple tensors) {
    marks_.clear();
    for (const nb::handle tensor : tensors) marks_.push_back(mark_of(tensor.ptr()));
  }

  bool unchanged(nb::tuple tensors) const {
    if (tensors.size() != marks_.size()) return false;
    auto mark = marks_.begin();
    for (const nb::handle tensor : tensors) {
      if (!(mark_of(tensor.ptr()) == *mark++)) return false;
    }
    return true;
  }

  nb::list taken() const {
    nb::list found;
    for (const Mark& mark : marks_) found.append(nb::make_tuple(mark.version, mark.address));
    return found;
  }

 private:
  struct Mark {
    std::int64_t version;
    std::uintptr_t address;
    bool operator==(const Mark&) const = default;
  };

  Mark mark_of(PyObject* tensor) const {
    const std::int64_t version = as_number(attribute(tensor, version_).ptr());
    Tensor view{};
    if (exchange_.shows(tensor, view)) return {version, reinterpret_cast<std::uintptr_t>(dlpack::data_of(view))};
    return {version, as_address<std::uintptr_t>(call(tensor, data_ptr_).ptr())};
  }

  Exchange exchange_;
  nb::object version_, data_ptr_;
  std::vector<Mark> marks_;
};

// The addresses, shapes and strides of tensors. `unchanged` checks that they are still the same, and that the tensors
// have no gradients and no Python attributes.
//
// The object holds no references to the tensors; the caller keeps them.
//
// Threads.   One caller at a time, with the GIL.
// Cost.      About 0.1 us a tensor with warm caches. The first check creates the empty `__dict__` of each tensor. Later
//   checks allocate nothing.
class TensorForms {
 public:
  TensorForms(nb::object exchange, nb::object tensor_class, nb::list tensors)
      : exchange_(exchange, tensor_class), requires_grad_(name_of("requires_grad")), grad_(name_of("grad")) {
    for (const nb::handle tensor : tensors) {
      const Tensor view = exchange_.view_of(tensor);
      data_.push_back(dlpack::data_of(view));
      numbers_.push_back(view.ndim);
      numbers_.insert(numbers_.end(), view.shape, view.shape + view.ndim);
      numbers_.insert(numbers_.end(), view.strides, view.strides + view.ndim);
    }
  }

  bool unchanged(nb::list tensors) const {
    if (tensors.size() != data_.size()) return false;
    auto data = data_.begin();
    auto number = numbers_.begin();
    for (const nb::handle tensor : tensors) {
      Tensor view{};
      if (!exchange_.shows(tensor.ptr(), view)) return false;
      if (dlpack::data_of(view) != *data++ || view.ndim != *number++) return false;
      for (const std::int64_t* sizes : {view.shape, view.strides}) {
        if (!std::equal(sizes, sizes + view.ndim, number)) return false;
        number += view.ndim;
      }
      if (!is_bare(tensor.ptr())) return false;
    }
    return true;
  }

 private:
  bool is_bare(PyObject* tensor) const {
    if (attribute(tensor, requires_grad_).ptr() != Py_False || !attribute(tensor, grad_).is_none()) return false;
    const nb::object attributes = nb::steal(PyObject_GenericGetDict(tensor, nullptr));
    if (!attributes.is_valid()) throw nb::python_error();
    return PyDict_Size(attributes.ptr()) == 0;
  }

  Exchange exchange_;
  nb::object requires_grad_, grad_;
  std::vector<const std::byte*> data_;
  std::vector<std::int64_t> numbers_;  // for each tensor: number of dimensions, shape, strides
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
  nb::class_<TensorMarks>(m, "TensorMarks", "Where tensors are, and how often they were changed.")
      .def(nb::init<nb::object, nb::object>(), "exchange"_a, "tensor_class"_a)
      .def("take", &TensorMarks::take, "tensors"_a, "Store the addresses and versions of tensors.")
      .def("unchanged", &TensorMarks::unchanged, "tensors"_a, "Whether these are where they were, as often changed.")
      .def("taken", &TensorMarks::taken, "Return the stored version and address of each tensor.");
  nb::class_<TensorForms>(m, "TensorForms", "Where tensors are, their shapes and strides.")
      .def(nb::init<nb::object, nb::object, nb::list>(), "exchange"_a, "tensor_class"_a, "tensors"_a)
      .def("unchanged", &TensorForms::unchanged, "tensors"_a,
           "Whether these are where they were, in their shapes, without gradients or attributes.");
}

}  // namespace gleanrl
