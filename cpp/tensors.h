// Tensors of another library as the DLPack exchange interface shows them: where their memory is and what stands there.
//
// What is declared here is the part of DLPack's C interface, major version 1, that is used; names, order and widths of
// fields are that interface's. A library hands it out as a capsule, an attribute of its tensor class. Asking a tensor
// through it takes a tenth of what asking its Python attributes does.
//
// Lifetime.  A view is valid as long as its tensor is, and nothing else has happened to that. Managed memory belongs to
//   the tensor that is made of it, which calls `give_back` once, from any thread.
// Threads.   Views are asked for under the interpreter lock, which this header knows nothing of: objects are `void*`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gleanrl {

namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; where there are dimensions, there are strides, since version 1.2
  std::uint64_t byte_offset;
};

// A tensor and its memory, which whoever holds it gives back by calling `give_back`.
struct Managed {
  struct Version {
    std::uint32_t major;
    std::uint32_t minor;
  } version;
  void* context;
  void (*give_back)(Managed* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeHeader* previous;
};

struct Exchange {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  int (*object_of_managed)(Managed* managed, void** out);  // takes it over; 0, or -1 and a Python error
  int (*view_of_object)(void* object, Tensor* out);        // 0, or -1 and a Python error
  void* current_stream;
};

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint8_t kInt = 0;
inline constexpr std::uint8_t kFloat = 2;
inline constexpr std::uint8_t kBrainFloat = 4;
inline constexpr std::uint8_t kComplex = 5;
inline constexpr std::uint32_t kMajor = 1;
inline constexpr const char* kCapsule = "dlpack_exchange_api";

inline const std::byte* data_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
}

inline std::int64_t item_bytes(const DataType& dtype) { return dtype.bits * dtype.lanes / 8; }

// Whether numbers are of a kind that torch may have negated lazily; smaller floats have codes of their own.
inline bool is_float(const DataType& dtype) { return dtype.code == kFloat || dtype.code == kBrainFloat; }

inline bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

// How far the elements of the innermost of dimensions [first, stop) lie apart that has several; 0 if none has.
inline std::int64_t innermost_stride(const Tensor& tensor, std::int32_t first, std::int32_t stop) {
  while (stop-- > first) {
    if (tensor.shape[stop] != 1) return tensor.strides[stop];
  }
  return 0;
}

// Whether dimensions [first, stop), of a tensor that isn't empty, are like one whose elements lie `stride` apart.
inline bool is_even(const Tensor& tensor, std::int32_t first, std::int32_t stop, std::int64_t stride) {
  while (stop-- > first) {
    if (tensor.shape[stop] == 1) continue;
    if (tensor.strides[stop] != stride) return false;
    stride *= tensor.shape[stop];
  }
  return true;
}

// Whether the elements lie back to back.
inline bool is_contiguous(const Tensor& tensor) { return is_empty(tensor) || is_even(tensor, 0, tensor.ndim, 1); }

// Whether the elements lie back to back on the CPU. Zeros that were never made have no memory.
inline bool is_readable(const Tensor& tensor) {
  return tensor.device.type == kCpu && is_contiguous(tensor) && (tensor.data != nullptr || is_empty(tensor));
}

// Copies the elements of a tensor that isn't empty to one piece of memory, one after the other, in order.
inline void copy_elements(std::byte* to, const Tensor& from, std::int64_t item_bytes) {
  std::vector<std::int64_t> at(static_cast<std::size_t>(from.ndim));
  const std::byte* const data = data_of(from);
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

}  // namespace dlpack
}  // namespace gleanrl
