// A queue in one contiguous ring buffer with access by position; std::deque would use several blocks.
//
// Threads.   Like any container: a change must not run together with another call.
// Cost.      push amortised O(1), everything else O(1). Memory: up to twice the largest size so far.
// Failure.   Only reserve and push can throw (std::bad_alloc); push doesn't after a sufficient reserve.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gleanrl {

template <class T>
class Fifo {
 public:
  std::int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // i in [0, size); 0 is the oldest.
  T& operator[](std::int64_t i) { return items_[place(i)]; }
  const T& operator[](std::int64_t i) const { return items_[place(i)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }
  const T& back() const { return (*this)[size_ - 1]; }

  void reserve(std::int64_t size) {
    if (static_cast<std::size_t>(size) <= items_.size()) return;
    std::vector<T> items(std::bit_ceil(static_cast<std::size_t>(size)));
    for (std::int64_t i = 0; i < size_; ++i) items[static_cast<std::size_t>(i)] = (*this)[i];
    items_ = std::move(items);
    head_ = 0;
  }
  void push(const T& item) {
    reserve(size_ + 1);
    items_[place(size_++)] = item;
  }
  void pop() {
    head_ = place(1);
    --size_;
  }
  void clear() { head_ = 0, size_ = 0; }

 private:
  // The size of items_ is a power of two (or 0).
  std::size_t place(std::int64_t i) const { return (head_ + static_cast<std::size_t>(i)) & (items_.size() - 1); }

  std::vector<T> items_;
  std::size_t head_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace gleanrl
