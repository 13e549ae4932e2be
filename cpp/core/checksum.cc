#include "checksum.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define GLEANRL_FOLDS 1
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace gleanrl {
namespace {

static_assert(std::endian::native == std::endian::little);

// Bit 31 - i of a number is the coefficient of x^i. The polynomial's x^32 is implied.
constexpr std::uint32_t kPolynomial = 0xedb88320u;

constexpr std::uint32_t times_x(std::uint32_t value) { return (value >> 1) ^ (value & 1 ? kPolynomial : 0); }

// kTables[k][b]: the remainder of byte b followed by k zero bytes.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto value = tables[k - 1][byte];
      tables[k][byte] = tables[0][value & 0xff] ^ (value >> 8);
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

template <class Word>
Word load(const std::byte* at) {
  Word word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

// In the functions below `crc` is a plain remainder; `crc32` inverts it at both ends.
std::uint32_t by_words(const std::byte* at, std::size_t count, std::uint32_t crc) {
#if defined(__ARM_FEATURE_CRC32)
  for (; count >= 8; at += 8, count -= 8) crc = __crc32d(crc, load<std::uint64_t>(at));
#else
  for (; count >= 8; at += 8, count -= 8) {
    const auto word = load<std::uint64_t>(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
#endif
  for (; count > 0; ++at, --count) {
    crc = kTables[0][(crc ^ std::to_integer<std::uint32_t>(*at)) & 0xff] ^ (crc >> 8);
  }
  return crc;
}

#if defined(GLEANRL_FOLDS)
// x^n modulo the polynomial, shifted by one bit, because the carry-less product of two bit-reversed numbers is one bit
// short.
constexpr std::int64_t power(int n) {
  std::uint32_t value = 0x80000000u;
  for (; n > 0; --n) value = times_x(value);
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(value) << 1);
}

constexpr std::size_t kRegister = 16, kLanes = 4, kStride = kLanes * kRegister, kWideStride = 4 * kStride;

// Moves the 16 bytes `from` ahead by the number of bits that `by` encodes, and adds them to `into`. The remainder of
// the whole sequence doesn't change.
__attribute__((target("pclmul"))) inline __m128i fold(__m128i from, __m128i by, __m128i into) {
  const __m128i low = _mm_clmulepi64_si128(from, by, 0x00), high = _mm_clmulepi64_si128(from, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), into);
}

__attribute__((target("pclmul"))) inline __m128i load_register(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// Folds four registers in parallel, then folds them into one whose 16 bytes have the same remainder. count >= kStride.
// Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009).
__attribute__((target("pclmul"))) std::uint32_t by_folding(const std::byte* at, std::size_t count, std::uint32_t crc) {
  const __m128i far = _mm_set_epi64x(power(8 * kStride - 32), power(8 * kStride + 32));
  const __m128i near = _mm_set_epi64x(power(8 * kRegister - 32), power(8 * kRegister + 32));
  __m128i lanes[kLanes];
  for (std::size_t k = 0; k < kLanes; ++k) lanes[k] = load_register(at + k * kRegister);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (at += kStride, count -= kStride; count >= kStride; at += kStride, count -= kStride) {
    for (std::size_t k = 0; k < kLanes; ++k) lanes[k] = fold(lanes[k], far, load_register(at + k * kRegister));
  }
  for (std::size_t k = 1; k < kLanes; ++k) lanes[k] = fold(lanes[k - 1], near, lanes[k]);
  std::byte rest[kRegister];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), lanes[kLanes - 1]);
  return by_words(at, count, by_words(rest, kRegister, 0));
}

// The remainder of wide lanes that were stored to memory, and of the bytes after them.
std::uint32_t rest_of(const std::byte* lanes, const std::byte* at, std::size_t count) {
  const std::uint32_t crc = by_folding(lanes, kWideStride, 0);
  return count >= kStride ? by_folding(at, count, crc) : by_words(at, count, crc);
}

__attribute__((target("avx2"))) inline __m256i load_double(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// The same as by_folding with 256-bit registers, and twice as many of them. count >= kWideStride.
__attribute__((target("avx2,vpclmulqdq"))) std::uint32_t by_double_folding(const std::byte* at, std::size_t count,
                                                                           std::uint32_t crc) {
  constexpr std::size_t width = 2 * kRegister, lanes_count = kWideStride / width;
  const std::int64_t high_by = power(8 * kWideStride - 32), low_by = power(8 * kWideStride + 32);
  const __m256i far = _mm256_set_epi64x(high_by, low_by, high_by, low_by);
  __m256i lanes[lanes_count];
  for (std::size_t k = 0; k < lanes_count; ++k) lanes[k] = load_double(at + k * width);
  lanes[0] = _mm256_xor_si256(lanes[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (at += kWideStride, count -= kWideStride; count >= kWideStride; at += kWideStride, count -= kWideStride) {
    for (std::size_t k = 0; k < lanes_count; ++k) {
      const __m256i low = _mm256_clmulepi64_epi128(lanes[k], far, 0x00);
      const __m256i high = _mm256_clmulepi64_epi128(lanes[k], far, 0x11);
      lanes[k] = _mm256_xor_si256(_mm256_xor_si256(low, high), load_double(at + k * width));
    }
  }
  std::byte rest[kWideStride];
  for (std::size_t k = 0; k < lanes_count; ++k) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest + k * width), lanes[k]);
  }
  return rest_of(rest, at, count);
}

// The same as by_folding with 512-bit registers. count >= kWideStride.
__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t by_wide_folding(const std::byte* at, std::size_t count,
                                                                            std::uint32_t crc) {
  const std::int64_t high_by = power(8 * kWideStride - 32), low_by = power(8 * kWideStride + 32);
  const __m512i far = _mm512_set4_epi64(high_by, low_by, high_by, low_by);
  __m512i lanes[kLanes];
  for (std::size_t k = 0; k < kLanes; ++k) lanes[k] = _mm512_loadu_si512(at + k * kStride);
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (at += kWideStride, count -= kWideStride; count >= kWideStride; at += kWideStride, count -= kWideStride) {
    for (std::size_t k = 0; k < kLanes; ++k) {
      const __m512i low = _mm512_clmulepi64_epi128(lanes[k], far, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(lanes[k], far, 0x11);
      lanes[k] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + k * kStride), 0x96);  // all three xored
    }
  }
  std::byte rest[kWideStride];
  for (std::size_t k = 0; k < kLanes; ++k) _mm512_storeu_si512(rest + k * kStride, lanes[k]);
  return rest_of(rest, at, count);
}
#endif

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) {
#if defined(GLEANRL_FOLDS)
  static const bool folds = __builtin_cpu_supports("pclmul");
  static const bool wide = folds && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
  static const bool widest = wide && __builtin_cpu_supports("avx512f");
  if (widest && bytes.size() >= kWideStride) return ~by_wide_folding(bytes.data(), bytes.size(), ~before);
  if (wide && bytes.size() >= kWideStride) return ~by_double_folding(bytes.data(), bytes.size(), ~before);
  if (folds && bytes.size() >= kStride) return ~by_folding(bytes.data(), bytes.size(), ~before);
#endif
  return ~by_words(bytes.data(), bytes.size(), ~before);
}

}  // namespace gleanrl
