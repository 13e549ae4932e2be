// Conversion of addresses that Python passes as integers to arrays.
//
// Failure.   std::invalid_argument for a negative length, a null address of an array that isn't empty, and an address
//   that isn't aligned. The message starts with `call`. Nothing else about an address can be checked.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace gleanrl {

// n values of T at an address.
template <class T>
std::span<const T> array_at(const char* call, std::uintptr_t address, std::int64_t n) {
  if (n < 0) throw std::invalid_argument(std::string(call) + ": expected 0 or more values, got " + std::to_string(n));
  if (address == 0 && n > 0) throw std::invalid_argument(std::string(call) + ": null address");
  if (address % alignof(T) != 0) throw std::invalid_argument(std::string(call) + ": address isn't aligned");
  return {reinterpret_cast<const T*>(address), static_cast<std::size_t>(n)};
}

// Writable memory for n values of T at an address.
template <class T>
T* room_at(const char* call, std::uintptr_t address, std::int64_t n) {
  return const_cast<T*>(array_at<T>(call, address, n).data());
}

// An array at an address with one value of T for each row of a ring. Its length isn't checked.
template <class T>
const T* table_at(const char* call, std::uintptr_t address) {
  return array_at<T>(call, address, 1).data();
}

}  // namespace gleanrl
