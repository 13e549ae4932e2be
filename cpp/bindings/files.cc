// Python bindings of reading and checking bytes for checkpoints.
#include "core/files.h"

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arguments.h"
#include "core/addresses.h"
#include "core/checksum.h"
#include "held_rows.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// Memory of several objects, each held until the list is destroyed.
using HeldMemory = std::deque<Memory>;

const Memory& hold(HeldMemory& held, nb::handle object) {
  const Memory& memory = held.emplace_back(object, PyBUF_SIMPLE);
  if (!memory.is_held()) throw nb::python_error();
  return memory;
}

std::uint32_t checksum(nb::handle pieces, std::uint32_t before) {
  HeldMemory held;
  std::int64_t total = 0;
  for (const nb::handle piece : pieces) total += hold(held, piece)->len;
  run(is_long(1, total), [&] {
    for (const auto& memory : held) {
      before = crc32({static_cast<const std::byte*>(memory->buf), static_cast<std::size_t>(memory->len)}, before);
    }
  });
  return before;
}

// An array in the caller's memory.
template <class Value>
std::span<const Value> table(const char* call, nb::handle address, nb::handle count) {
  return array_at<Value>(call, as_address<std::uintptr_t>(address.ptr()), as_number(count.ptr()));
}

nb::tuple parts_of(nb::handle item, std::size_t count, const char* what) {
  const nb::tuple parts = nb::cast<nb::tuple>(item);
  if (parts.size() != count) throw std::invalid_argument(what);
  return parts;
}

Target target_of(const char* call, nb::handle item) {
  const nb::tuple parts = parts_of(item, 5, "expected address, stride, from, to and their number");
  const auto from = table<std::int64_t>(call, parts[2], parts[4]), to = table<std::int64_t>(call, parts[3], parts[4]);
  const std::int64_t stride = as_number(parts[1].ptr());
  if (from.empty() || from[0] != 0 || stride < 1) {
    throw std::invalid_argument("expected runs of rows from row 0 on, and a stride of 1 or more");
  }
  return {as_address<std::byte*>(parts[0].ptr()), static_cast<std::size_t>(stride), from, to};
}

Rows rows_of(const char* call, nb::handle item) {
  const nb::tuple parts = parts_of(item, 4, "expected bytes of a row, those before, how many, and targets");
  std::array<std::int64_t, 3> sizes;
  for (std::size_t k = 0; k < 3; ++k) sizes[k] = as_number(parts[k].ptr());
  if (sizes[0] < 1 || sizes[1] < 0 || sizes[2] < 0) throw std::invalid_argument("expected rows of 1 byte or more");
  Rows rows{
      static_cast<std::size_t>(sizes[0]), static_cast<std::size_t>(sizes[1]), static_cast<std::size_t>(sizes[2]), {}};
  for (const nb::handle target : parts[3]) rows.targets.push_back(target_of(call, target));
  return rows;
}

std::span<const Piece> pieces_of(const char* call, const Memory& table) {
  constexpr auto pair = static_cast<Py_ssize_t>(sizeof(Piece));
  static_assert(sizeof(Piece) == 2 * sizeof(std::int64_t));
  if (table->itemsize != sizeof(std::int64_t) || table->len % pair != 0) {
    throw std::invalid_argument("read_files: expected pieces as pairs of int64");
  }
  const auto pieces = array_at<Piece>(call, reinterpret_cast<std::uintptr_t>(table->buf), table->len / pair);
  for (const Piece& piece : pieces) {
    if (static_cast<std::int64_t>(piece.bytes) < 0)
      throw std::invalid_argument("read_files: a negative number of bytes");
  }
  return pieces;
}

nb::object read_all(nb::list files, std::int64_t block, int threads) {
  const char* const call = "read_files";
  if (block < 1) throw std::invalid_argument("read_files: expected blocks of 1 byte or more");
  std::vector<Reading> readings;
  std::vector<nb::object> paths;
  HeldMemory tables;
  readings.reserve(files.size());
  for (const nb::handle file : files) {
    const nb::tuple parts = parts_of(file, 4, "read_files: expected path, offset, memory and checksums");
    Reading& reading = readings.emplace_back();
    PyObject* path = nullptr;
    if (PyUnicode_FSConverter(parts[0].ptr(), &path) == 0) throw nb::python_error();
    paths.push_back(nb::steal(path));
    reading.path = PyBytes_AS_STRING(path);
    const std::int64_t offset = as_number(parts[1].ptr());
    if (offset < 0) throw std::invalid_argument("read_files: expected an offset of 0 or more");
    reading.offset = static_cast<std::size_t>(offset);
    if (nb::isinstance<nb::tuple>(parts[2])) {
      reading.rows = rows_of(call, parts[2]);
    } else {
      reading.pieces = pieces_of(call, hold(tables, parts[2]));
    }
    reading.checksums =
        read_list<std::uint32_t>(parts[3], [](PyObject* item) { return static_cast<std::uint32_t>(as_number(item)); });
  }
  std::optional<Damage> damage;
  run(true, [&] { damage = read_files(readings, static_cast<std::size_t>(block), threads); });
  if (!damage) return nb::none();
  return nb::make_tuple(damage->number, static_cast<int>(damage->kind), damage->detail);
}

void spread_all(nb::list columns, int threads) {
  const char* const call = "spread_rows";
  std::vector<Source> sources;
  std::int64_t total = 0;
  for (const nb::handle column : columns) {
    const nb::tuple parts = parts_of(column, 2, "spread_rows: expected address and rows");
    Rows rows = rows_of(call, parts[1]);
    const auto size = static_cast<std::int64_t>(rows.bytes);
    const auto bytes = array_at<std::byte>(call, as_address<std::uintptr_t>(parts[0].ptr()), size);
    sources.push_back({bytes.data(), std::move(rows)});
    total += size;
  }
  run(is_long(1, total), [&] { spread_rows(sources, threads); });
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def("crc32", &checksum, "pieces"_a, "before"_a = 0,
        "CRC-32 as in zlib of a sequence: the bytes with the checksum `before`, then the bytes of contiguous buffers.");
  m.def("read_files", &read_all, "files"_a, "block"_a, "threads"_a,
        "Read a list of (path, offset, memory, checksums of each block of bytes), the memory as int64 addresses and "
        "sizes in a contiguous buffer, or as a tuple for rows; None, or (number, kind, detail) of the first "
        "damage: kind 0 with errno, 1 with where the file ends, 2 with where a block begins that has another checksum. "
        "No checksums, no comparing.");
  m.def("spread_rows", &spread_all, "columns"_a, "threads"_a,
        "Copy rows in memory to where they go: a list of (address, rows).");
}

}  // namespace gleanrl
