// The Python face of what reads and checks bytes for checkpoints.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "checksum.h"
#include "files.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// Buffers as Python's protocol gives them: their memory stays where it is until this ends.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (auto& view : views_) PyBuffer_Release(&view);
  }

  const Py_buffer& add(PyObject* object, int flags) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, flags) != 0) throw nb::python_error();
    views_.push_back(view);
    return views_.back();
  }

  const std::vector<Py_buffer>& all() const { return views_; }

 private:
  std::vector<Py_buffer> views_;
};

std::uint32_t checksum(nb::handle pieces, std::uint32_t before) {
  Buffers held;
  std::int64_t total = 0;
  for (const nb::handle piece : pieces) total += held.add(piece.ptr(), PyBUF_SIMPLE).len;
  run(is_long(1, total), [&] {
    for (const auto& view : held.all()) {
      before = crc32({static_cast<const std::byte*>(view.buf), static_cast<std::size_t>(view.len)}, before);
    }
  });
  return before;
}

// A piece is a buffer to be filled, or a number of bytes that nobody wants.
Piece piece_of(PyObject* item, Buffers& held) {
  if (PyLong_Check(item)) {
    const std::int64_t bytes = as_number(item);
    if (bytes < 0) throw std::invalid_argument("read_files: a negative number of bytes");
    return {nullptr, static_cast<std::size_t>(bytes)};
  }
  const Py_buffer& view = held.add(item, PyBUF_WRITABLE);
  return {static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len)};
}

nb::object read_all(nb::list files, std::int64_t block, int threads) {
  if (block < 1) throw std::invalid_argument("read_files: expected blocks of 1 byte or more");
  Buffers held;
  std::vector<Reading> readings;
  for (const nb::handle file : files) {
    const nb::tuple parts = nb::cast<nb::tuple>(file);
    if (parts.size() != 3) throw std::invalid_argument("read_files: expected path, pieces and checksums");
    const char* path = PyBytes_AsString(parts[0].ptr());
    if (path == nullptr) throw nb::python_error();
    readings.push_back({path, read_list<Piece>(parts[1], [&](PyObject* item) { return piece_of(item, held); }),
                        read_list<std::uint32_t>(
                            parts[2], [](PyObject* item) { return static_cast<std::uint32_t>(as_number(item)); })});
  }
  std::optional<Damage> damage;
  run(true, [&] { damage = read_files(readings, static_cast<std::size_t>(block), threads); });
  if (!damage) return nb::none();
  return nb::make_tuple(damage->file, static_cast<int>(damage->kind), damage->detail);
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def("crc32", &checksum, "pieces"_a, "before"_a = 0,
        "CRC-32, as zlib's, of the bytes of contiguous buffers, one after the other, behind those of the checksum "
        "before.");
  m.def("read_files", &read_all, "files"_a, "block"_a, "threads"_a,
        "Read a list of (path, pieces, checksums of each block of bytes); None, or (file, kind, detail) of the first "
        "damage: kind 0 with errno, 1 with where the file ends, 2 with where a block begins that has another checksum. "
        "A piece is a buffer, or a number of bytes that nobody wants; no checksums, no comparing.");
}

}  // namespace gleanrl
