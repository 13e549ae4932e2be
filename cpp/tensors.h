// Tensors of another library as the DLPack exchange interface shows them: where their memory is and what stands there.
//
// What is declared here is the part of DLPack's C interface, major version 1, that is used; names, order and widths of
// fields are that interface's. A library hands it out as a capsule, an attribute of its tensor class. Asking a tensor
// through it takes a tenth of what asking its Python attributes does.
//
// Lifetime.  A view is valid as long as its tensor is, and nothing else has happened to that.
// Threads.   Views are asked for under the interpreter lock, which this header knows nothing of: objects are `void*`.
#pragma once

#include <cstdint>

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

struct ExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeHeader* previous;
};

struct Exchange {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*view_of_object)(void* object, Tensor* out);  // 0, or -1 and a Python error
  void* current_stream;
};

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint32_t kMajor = 1;
inline constexpr const char* kCapsule = "dlpack_exchange_api";

}  // namespace dlpack
}  // namespace gleanrl
