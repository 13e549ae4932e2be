// Zeroed memory for tables that are read at random places.
//
// Pages.   Large blocks ask for huge pages: a random row then costs a cache miss, not one of the address cache and a
//   walk through the page tables beside it. A page that was never touched is not backed by memory; where the system has
//   no huge pages, or they are turned off, ordinary ones serve.
// Failure. std::bad_alloc if the address space or the memory can't be had.
// Threads. The memory belongs to one object; nothing is shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gleanrl {

class Pages {
 public:
  Pages() = default;
  // `bytes` zero bytes, the first one at a multiple of 64.
  explicit Pages(std::size_t bytes) {
#if defined(__linux__)
    if (bytes >= kLeast) {
      // Newer Linux aligns what is a multiple of huge pages; other blocks begin and end with hundreds of small ones.
      bytes_ = (bytes + kHuge - 1) / kHuge * kHuge;
      void* block = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED) throw std::bad_alloc();
      ::madvise(block, bytes_, MADV_HUGEPAGE);  // only advice: whether it is taken changes nothing but the speed
      block_ = data_ = block;
      mapped_ = true;
      return;
    }
#endif
    block_ = std::calloc(bytes + kLine, 1);
    if (!block_) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(block_);
    data_ = reinterpret_cast<void*>((address + kLine - 1) / kLine * kLine);
  }
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Pages() {
#if defined(__linux__)
    if (mapped_) {
      ::munmap(block_, bytes_);
      return;
    }
#endif
    std::free(block_);
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  static constexpr std::size_t kLine = 64, kHuge = std::size_t{2} << 20, kLeast = 2 * kHuge;

  void swap(Pages& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }

  void* block_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;  // of what is mapped
  bool mapped_ = false;
};

}  // namespace gleanrl
