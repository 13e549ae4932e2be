#include "boundaries.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace gleanrl {
namespace {

using std::int64_t;

bool is_set(const std::uint8_t* row, int64_t width) {
  return std::any_of(row, row + width, [](std::uint8_t value) { return value != 0; });
}

bool equal(const std::byte* left, const std::byte* right, int64_t bytes) {
  return std::memcmp(left, right, static_cast<std::size_t>(bytes)) == 0;
}

bool is_over(std::span<const EndFlag> flags, int64_t row) {
  return std::any_of(flags.begin(), flags.end(),
                     [row](const EndFlag& flag) { return is_set(flag.written + row * flag.width, flag.width); });
}

// Whether the written steps chain (see find_seams). Sets changes[i] = 1 for twins that change from one step to the
// next.
bool chain(std::span<const Twin> twins, std::span<const EndFlag> flags, int64_t steps, int64_t streams,
           std::vector<std::uint8_t>& changes) {
  bool any = false;
  for (int64_t row = 0; row < (steps - 1) * streams; ++row) {
    if (is_over(flags, row)) continue;
    any = true;
    for (std::size_t i = 0; i < twins.size(); ++i) {
      const Twin& twin = twins[i];
      const std::byte* const behind = twin.root + (row + streams) * twin.row_bytes;
      if (!equal(twin.outcome + row * twin.row_bytes, behind, twin.row_bytes)) return false;
      if (changes[i] == 0) changes[i] = !equal(twin.root + row * twin.row_bytes, behind, twin.row_bytes);
    }
  }
  return any;
}

int64_t number_at(const IdColumn& column, int64_t slot) {
  int64_t value = 0;  // shorter numbers fill the low bytes: all supported machines are little-endian
  std::memcpy(&value, column.first + slot * column.row_bytes, static_cast<std::size_t>(column.row_bytes));
  return value;
}

}  // namespace

bool find_seams(std::span<const Twin> twins, std::span<const EndFlag> flags, int64_t steps, int64_t streams,
                std::uint8_t* begins) {
  const auto differs = [&](const Twin& twin, int64_t s) {
    return !equal(twin.newest + s * twin.row_bytes, twin.root + s * twin.row_bytes, twin.row_bytes);
  };
  const auto is_open = [&](int64_t s) {
    return std::none_of(flags.begin(), flags.end(),
                        [s](const EndFlag& flag) { return is_set(flag.newest + s * flag.width, flag.width); });
  };
  bool any = false;
  for (int64_t s = 0; s < streams; ++s) {
    begins[s] =
        std::any_of(twins.begin(), twins.end(), [&](const Twin& twin) { return differs(twin, s); }) && is_open(s);
    any |= begins[s] != 0;
  }
  std::vector<std::uint8_t> changes(twins.size(), 0);
  if (!any || !chain(twins, flags, steps, streams, changes)) return false;
  if (std::none_of(changes.begin(), changes.end(), [](std::uint8_t value) { return value != 0; })) return true;
  any = false;
  for (int64_t s = 0; s < streams; ++s) {
    if (begins[s] == 0) continue;
    begins[s] = 0;
    for (std::size_t i = 0; i < twins.size(); ++i) begins[s] |= changes[i] != 0 && differs(twins[i], s);
    any |= begins[s] != 0;
  }
  return any;
}

bool ends_inside(std::span<const int64_t> slot, const std::uint8_t* inner, std::span<const FlagColumn> flags,
                 std::span<const IdColumn> ids, const IdColumn* ahead) {
  for (std::size_t i = 0; i < slot.size(); ++i) {
    if (inner[i] == 0) continue;
    if (ahead == nullptr || number_at(*ahead, slot[i]) == 1) {
      for (const FlagColumn& flag : flags) {
        if (is_set(flag.first + slot[i] * flag.width, flag.width)) return true;
      }
    }
    for (const IdColumn& id : ids) {
      if (number_at(id, slot[i]) != number_at(id, slot[i + 1])) return true;
    }
  }
  return false;
}

}  // namespace gleanrl
