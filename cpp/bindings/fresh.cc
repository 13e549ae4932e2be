// Python bindings for new tensors: the core allocates memory, and torch makes tensors of it through DLPack.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arguments.h"
#include "core/tensors.h"
#include "exchange.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// The elements begin at a cache line.
constexpr std::size_t kLine = 64;

struct Free {
  void operator()(dlpack::Managed* block) const { std::free(block); }
};
using Block = std::unique_ptr<dlpack::Managed, Free>;

// The number of bytes of contiguous elements; the check also covers the strides of an empty tensor. An expanded tensor
// may be larger than the address space, and torch ends the process for a tensor whose size in bytes overflows.
std::size_t bytes_of(const std::vector<std::int64_t>& shape, std::int64_t item_bytes) {
  constexpr std::int64_t kMost = PTRDIFF_MAX / 2;
  std::int64_t whole = std::max<std::int64_t>(item_bytes, 1);
  bool is_empty = false;
  for (const std::int64_t size : shape) {
    is_empty |= size == 0;
    if (size > 1 && whole > kMost / size) {
      throw std::invalid_argument("like: expected tensors of at most 2**62 bytes, got a larger one");
    }
    whole *= std::max<std::int64_t>(size, 1);
  }
  return is_empty ? 0 : static_cast<std::size_t>(whole);
}

// Allocates one block for a tensor: its description, then shape and strides, then its elements.
Block new_block(const dlpack::Managed& like, const std::vector<std::int64_t>& shape, std::size_t bytes) {
  const std::size_t head = sizeof(dlpack::Managed) + 2 * shape.size() * sizeof(std::int64_t);
  void* const block = std::malloc(head + kLine + bytes);  // aligned_alloc is several times slower
  if (block == nullptr) throw std::bad_alloc();
  auto* const made = new (block) dlpack::Managed(like);
  auto* const sizes = reinterpret_cast<std::int64_t*>(made + 1);
  auto* const strides = sizes + shape.size();
  std::int64_t stride = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    sizes[dim] = shape[dim];
    strides[dim] = stride;
    stride *= std::max<std::int64_t>(shape[dim], 1);
  }
  made->tensor.shape = sizes;
  made->tensor.strides = strides;
  const std::uintptr_t behind = reinterpret_cast<std::uintptr_t>(block) + head;
  made->tensor.data = reinterpret_cast<void*>((behind + kLine - 1) / kLine * kLine);
  return Block(made);
}

// Makes uninitialised tensors on the CPU with dtypes and shapes of given tensors; each call makes new ones.
//
// Lifetime.  Each tensor has separate memory, which is freed with the tensor.
// Threads.   Any thread, with the GIL. Memory may be freed without the GIL.
// Cost.      About 0.35 us a tensor; torch.from_numpy(numpy.empty()) takes 0.75.
class FreshTensors {
 public:
  FreshTensors(nb::object exchange, nb::object tensor_class, nb::list like) : exchange_(exchange, tensor_class) {
    for (const nb::handle tensor : like) {
      const dlpack::Tensor view = exchange_.view_of(tensor);
      if (view.device.type != dlpack::kCpu) throw std::invalid_argument("like: expected tensors on the CPU");
      Form form{{}, {view.shape, view.shape + view.ndim}, 0};
      form.bytes = bytes_of(form.shape, dlpack::item_bytes(view.dtype));
      form.like.version = {dlpack::kMajor, 0};
      form.like.give_back = [](dlpack::Managed* block) { Free()(block); };
      form.like.tensor = {nullptr, view.device, view.ndim, view.dtype, nullptr, nullptr, 0};
      forms_.push_back(std::move(form));
    }
  }

  // The new tensors, and the addresses of their memory.
  nb::tuple make() const {
    const auto count = static_cast<Py_ssize_t>(forms_.size());
    nb::object tensors = nb::steal(PyList_New(count)), addresses = nb::steal(PyList_New(count));
    if (!tensors.is_valid() || !addresses.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Form& form = forms_[static_cast<std::size_t>(i)];
      Block block = new_block(form.like, form.shape, form.bytes);
      const nb::int_ address(reinterpret_cast<std::uintptr_t>(block->tensor.data));
      PyList_SET_ITEM(tensors.ptr(), i, exchange_.object_of(block.release()).release().ptr());
      PyList_SET_ITEM(addresses.ptr(), i, nb::object(address).release().ptr());
    }
    return nb::make_tuple(std::move(tensors), std::move(addresses));
  }

 private:
  struct Form {
    dlpack::Managed like;
    std::vector<std::int64_t> shape;
    std::size_t bytes;
  };

  Exchange exchange_;
  std::vector<Form> forms_;
};

}  // namespace

void bind_fresh(nb::module_& m) {
  nb::class_<FreshTensors>(m, "FreshTensors", "Makes uninitialised tensors, like some there are.")
      .def(nb::init<nb::object, nb::object, nb::list>(), "exchange"_a, "tensor_class"_a, "like"_a)
      .def("make", &FreshTensors::make, "New ones, and where their memory is.");
}

}  // namespace gleanrl
