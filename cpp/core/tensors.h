// Declarations of DLPack's exchange interface, and helpers for the tensors that it describes.
//
// This header declares the part of DLPack's C interface (major version 1) that the core uses, with the interface's
// order and widths of fields. A library provides the interface as a capsule, in an attribute of its tensor class.
// Reading a tensor's description through it takes a tenth of the time of reading Python attributes.
//
// Lifetime.  A view is valid while its tensor lives and isn't changed. Managed memory belongs to the tensor that is
//   made of it. The tensor calls `give_back` once, from any thread.
// Threads.   Callers hold the GIL to get views. This header doesn't depend on Python: objects are `void*`.
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
  std::int64_t* strides;  // in elements; since version 1.2 not null for a tensor with dimensions
  std::uint64_t byte_offset;
};

// A tensor and its memory. The holder frees the memory by calling `give_back`.
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
  int (*object_of_managed)(Managed* managed, void** out);  // takes ownership; returns 0, or -1 and sets a Python error
  int (*view_of_object)(void* object, Tensor* out);        // returns 0, or -1 and sets a Python error
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

// Whether torch may negate tensors of this dtype lazily. Smaller floats have other codes and aren't negated lazily.
inline bool is_float(const DataType& dtype) { return dtype.code == kFloat || dtype.code == kBrainFloat; }

inline bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

// The stride of the innermost dimension in [first, stop) whose size isn't 1; 0 if all have size 1.
inline std::int64_t innermost_stride(const Tensor& tensor, std::int32_t first, std::int32_t stop) {
  while (stop-- > first) {
    if (tensor.shape[stop] != 1) return tensor.strides[stop];
  }
  return 0;
}

// Whether the dimensions [first, stop) of a non-empty tensor can be merged into one dimension with this stride.
inline bool is_even(const Tensor& tensor, std::int32_t first, std::int32_t stop, std::int64_t stride) {
  while (stop-- > first) {
    if (tensor.shape[stop] == 1) continue;
    if (tensor.strides[stop] != stride) return false;
    stride *= tensor.shape[stop];
  }
  return true;
}

// Whether the elements are contiguous.
inline bool is_contiguous(const Tensor& tensor) { return is_empty(tensor) || is_even(tensor, 0, tensor.ndim, 1); }

// Whether the elements are contiguous memory on the CPU. Lazy zeros (ZeroTensor) have no memory.
inline bool is_readable(const Tensor& tensor) {
  return tensor.device.type == kCpu && is_contiguous(tensor) && (tensor.data != nullptr || is_empty(tensor));
}

// Copies the elements of a non-empty tensor to contiguous memory, in order.
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
