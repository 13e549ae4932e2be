// Access to torch's tensors through DLPack's exchange interface: views of tensors, new tensors of the core's memory,
// and the few Python attributes that the core reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "arguments.h"
#include "core/tensors.h"

namespace gleanrl {

// The interface in a capsule; null if the object isn't such a capsule, or has another major version.
inline const dlpack::Exchange* exchange_in(nb::handle capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) return nullptr;
  auto* found = static_cast<const dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  while (found != nullptr && found->major != dlpack::kMajor) found = found->previous;
  const auto* exchange = reinterpret_cast<const dlpack::Exchange*>(found);
  const bool whole =
      exchange != nullptr && exchange->view_of_object != nullptr && exchange->object_of_managed != nullptr;
  return whole ? exchange : nullptr;
}

// An interned string for an attribute that is looked up often: Python compares interned strings by their addresses.
inline nb::object name_of(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

inline nb::object attribute(PyObject* object, const nb::object& name) {
  nb::object found = nb::steal(PyObject_GetAttr(object, name.ptr()));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

inline nb::object call(PyObject* object, const nb::object& method) {
  PyObject* const args[] = {object};
  nb::object out =
      nb::steal(PyObject_VectorcallMethod(method.ptr(), args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  if (!out.is_valid()) throw nb::python_error();
  return out;
}

// The exchange interface of one tensor class. The object holds a reference to the capsule.
class Exchange {
 public:
  Exchange(nb::object capsule, nb::object tensor_class)
      : capsule_(capsule), class_(tensor_class), is_neg_(name_of("is_neg")) {
    interface_ = exchange_in(capsule);
    if (interface_ == nullptr) {
      throw std::invalid_argument("exchange: expected a capsule of DLPack's interface, version 1");
    }
  }

  dlpack::Tensor view_of(nb::handle tensor) const {
    dlpack::Tensor view{};
    if (interface_->view_of_object(tensor.ptr(), &view) != 0) throw nb::python_error();
    return view;
  }

  // Makes a tensor of managed memory, which it frees at its end. If this throws, it isn't known whether torch has freed
  // the memory, so the caller must not free it (a leak is better than a double free).
  nb::object object_of(dlpack::Managed* managed) const {
    void* made = nullptr;
    if (interface_->object_of_managed(managed, &made) != 0) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(made));
  }

  // Writes a view of a tensor. Returns false if the object isn't exactly of the tensor class, or has no memory to show.
  bool shows(PyObject* object, dlpack::Tensor& view) const {
    if (!takes(object)) return false;
    if (interface_->view_of_object(object, &view) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // Whether an object is exactly of the tensor class and its bytes are its values. The bytes of a lazily negated tensor
  // are not its values. Python code may run.
  bool is_plain(PyObject* object) const { return takes(object) && call(object, is_neg_).ptr() == Py_False; }

  bool takes(PyObject* object) const {
    return object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) == class_.ptr();
  }

 private:
  nb::object capsule_, class_, is_neg_;
  const dlpack::Exchange* interface_;
};

}  // namespace gleanrl
