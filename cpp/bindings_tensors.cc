// The Python face of what takes tensors as they are: rows of several columns, written by one call, and whether tensors
// have stayed what they were.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "exchange.h"
#include "tensors.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

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

// Writes rows of some columns ``[*batch, T, *leaf]`` on the CPU, all of one batch and as many steps.
//
// Lifetime.  The columns are held. Their memory must stay where it is: a column that is moved (`set_`, `share_memory_`)
//   leaves an address that nobody has.
// Threads.   One caller at a time, under the interpreter lock.
// Failure.   Every value is looked at before the first byte is written.
// Overlap.   Values may be rows of the columns.
// Cost.      About 0.2 us for each value, most of it for asking torch what it is.
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

  // Writes row t, and row t + 1 of the roots; none, and nothing is written, if a value isn't a plain tensor as declared.
  // Returns whether a flag is set.
  nb::object write(std::int64_t t, nb::handle values, bool exactly) {
    if (t < 0 || t >= num_steps_) throw nb::index_error("write: no such row");
    nb::object given = nb::borrow(values);
    if (!PyDict_Check(values.ptr())) {  // another mapping
      given = nb::steal(PyDict_New());
      if (PyDict_Update(given.ptr(), values.ptr()) != 0) throw nb::python_error();
    }
    const std::size_t count = columns_.size();
    if (exactly && static_cast<std::size_t>(PyDict_Size(given.ptr())) != count) return nb::none();
    Tensor few[kFew];
    std::vector<Tensor> many(count > kFew ? count : 0);
    Tensor* const views = count > kFew ? many.data() : few;
    // Where Python may run, values may change: they are looked at afterwards.
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
  static constexpr std::size_t kFew = 32;          // of these the views stand on the stack
  static constexpr std::size_t kScattered = 1024;  // bytes up to which values in several pieces are copied here: images
                                                   // that were transposed, say, are for those who have kernels for that

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

  // The value of a column; null if there is none.
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
    if (view.data == nullptr) return false;  // zeros that were never made
    return value_bytes(column) <= kScattered || dlpack::is_contiguous(view);
  }

  // Copies values that aren't in one piece, or that stand in a column: another value may be written over them.
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

  // Returns whether it's a flag that is set.
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
  nb::list kept_;  // the memory behind the addresses
  std::vector<Column> columns_;
  std::vector<std::byte> pieces_;  // values that had to be copied before the first was written
  std::int64_t num_steps_ = 0;
  std::int64_t num_parts_ = 1;
};

// Where some tensors are, and how often they were changed: to be asked before and after somebody else gets them.
//
// Torch counts the changes of a tensor and of all its views together. What has no memory that it could show is asked by
// its methods, as are things that are no tensors but have these.
//
// Threads.   One caller at a time, under the interpreter lock.
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

// Where some tensors are, their shapes and strides: are they that still, without gradients or attributes?
//
// The tensors aren't held: who asks has them.
//
// Threads.   One caller at a time, under the interpreter lock.
// Cost.      About 0.1 us a tensor with warm caches. The first question makes each tensor's empty `__dict__`, later ones
//   allocate nothing, which matters where much was allocated before.
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
  std::vector<std::int64_t> numbers_;  // of each tensor: dimensions, shape, strides
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
      .def("take", &TensorMarks::take, "tensors"_a, "Remember where these are, and how often they were changed.")
      .def("unchanged", &TensorMarks::unchanged, "tensors"_a, "Whether these are where they were, as often changed.")
      .def("taken", &TensorMarks::taken, "What was remembered: number of changes and address of each.");
  nb::class_<TensorForms>(m, "TensorForms", "Where tensors are, their shapes and strides.")
      .def(nb::init<nb::object, nb::object, nb::list>(), "exchange"_a, "tensor_class"_a, "tensors"_a)
      .def("unchanged", &TensorForms::unchanged, "tensors"_a,
           "Whether these are where they were, in their shapes, without gradients or attributes.");
}

}  // namespace gleanrl
