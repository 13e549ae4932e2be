// Zero-initialised memory for tables with random access.
//
// Pages.   Large blocks request huge pages. Then a random access costs a cache miss, but no TLB miss and no walk
//   through the page tables. A page without an access isn't backed by memory. Without huge pages, ordinary pages are
//   used.
// Failure. std::bad_alloc if the address space or the memory isn't available.
// Threads. The memory belongs to one object and isn't shared.
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
      // Newer Linux aligns a mapping whose size is a multiple of huge pages. Otherwise its ends use hundreds of small
      // pages.
      bytes_ = (bytes + kHuge - 1) / kHuge * kHuge;
      void* block = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED) throw std::bad_alloc();
      ::madvise(block, bytes_, MADV_HUGEPAGE);  // only advice for speed, so its result isn't checked
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
  std::size_t bytes_ = 0;  // size of the mapping
  bool mapped_ = false;
};

}  // namespace gleanrl
