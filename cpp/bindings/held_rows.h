// Memory of Python objects through the buffer protocol; a held buffer isn't moved or freed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "core/running.h"

namespace gleanrl {

// Holds an object's memory through the buffer protocol. If the object doesn't support it, no memory is held and a
// Python error is set.
class Memory {
 public:
  Memory(nb::handle object, int how) { PyObject_GetBuffer(object.ptr(), &view_, how); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (is_held()) PyBuffer_Release(&view_);
  }

  bool is_held() const { return view_.obj != nullptr; }
  const Py_buffer* operator->() const { return &view_; }
  // The type character of the items; 0 for a longer type code.
  char kind() const { return std::strlen(view_.format) == 1 ? view_.format[0] : '\0'; }

 private:
  Py_buffer view_{};
};

// The rows of a NumPy array with time as first dimension. The object holds the array's memory.
class HeldRows {
 public:
  HeldRows(const char* name, nb::handle array, int more) : memory_(array, PyBUF_STRIDES | PyBUF_FORMAT | more) {
    if (!memory_.is_held()) throw nb::python_error();
    if (memory_->ndim == 0 || memory_->strides == nullptr) {  // ctypes arrays give no strides, even if requested
      throw std::invalid_argument(std::string(name) + ": expected rows of a NumPy array");
    }
    grid_.data = static_cast<std::byte*>(memory_->buf);
    grid_.step = memory_->strides[0];
    grid_.elements = {0};
    for (int dim = 1; dim < memory_->ndim; ++dim) {
      add_dimension(grid_.elements, memory_->shape[dim], memory_->strides[dim]);
    }
  }

  const RowGrid& grid() const { return grid_; }
  std::int64_t num_rows() const { return memory_->shape[0]; }
  char kind() const { return memory_.kind(); }
  Py_ssize_t item_size() const { return memory_->itemsize; }
  std::vector<std::int64_t> row_shape() const { return {memory_->shape + 1, memory_->shape + memory_->ndim}; }
  bool is_like(const HeldRows& other) const {
    return kind() == other.kind() && item_size() == other.item_size() && has_rows_like(other) &&
           num_rows() == other.num_rows();
  }
  // Whether the rows of both arrays have the same shape.
  bool has_rows_like(const HeldRows& other) const {
    return memory_->ndim == other.memory_->ndim &&
           std::equal(memory_->shape + 1, memory_->shape + memory_->ndim, other.memory_->shape + 1);
  }

 private:
  Memory memory_;
  RowGrid grid_;
};

}  // namespace gleanrl
