// The Python face of what looks at whole arrays: one-hot rows, and numbers that aren't finite.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "finite.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// A contiguous NumPy array, held while its memory is used; or nothing.
class Contiguous {
 public:
  explicit Contiguous(nb::handle array, int more = 0) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | more) != 0) PyErr_Clear();
  }
  Contiguous(const Contiguous&) = delete;
  Contiguous& operator=(const Contiguous&) = delete;
  ~Contiguous() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // The type's character; 0 for none of one character, and for items that aren't aligned.
  char kind() const {
    if (view_.obj == nullptr || std::strlen(view_.format) != 1 || view_.itemsize <= 0) return '\0';
    const auto start = reinterpret_cast<std::uintptr_t>(view_.buf);
    return start % static_cast<std::uintptr_t>(view_.itemsize) == 0 ? view_.format[0] : '\0';
  }
  int ndim() const { return view_.ndim; }
  std::int64_t size(int dim) const { return view_.shape[dim]; }
  std::int64_t num_items() const { return view_.len / view_.itemsize; }
  Py_ssize_t item_size() const { return view_.itemsize; }
  void* data() const { return view_.buf; }

 private:
  Py_buffer view_{};
};

// Calls `use` with the array's items as unsigned integers of their size, and what 1 is among them; false if it can't be
// told.
template <class Use>
bool with_items(const Contiguous& array, Use use) {
  switch (array.kind()) {
    case '?':
    case 'b':
    case 'B':
      return use(static_cast<std::uint8_t*>(array.data()), std::uint8_t{1});
    case 'h':
    case 'H':
      return use(static_cast<std::uint16_t*>(array.data()), std::uint16_t{1});
    case 'e':
      return use(static_cast<std::uint16_t*>(array.data()), std::uint16_t{0x3c00});
    case 'i':
    case 'I':
      return use(static_cast<std::uint32_t*>(array.data()), std::uint32_t{1});
    case 'f':
      return use(static_cast<std::uint32_t*>(array.data()), std::uint32_t{0x3f800000});
    case 'l':
    case 'L':
    case 'q':
    case 'Q':
      if (array.item_size() != 8) return false;
      return use(static_cast<std::uint64_t*>(array.data()), std::uint64_t{1});
    case 'd':
      return use(static_cast<std::uint64_t*>(array.data()), std::uint64_t{0x3ff0000000000000});
    default:
      return false;
  }
}

nb::object positions_of_ones(nb::handle column) {
  const Contiguous rows(column);
  if (rows.kind() == '\0' || rows.ndim() != 2) return nb::none();
  std::vector<std::int64_t> found(static_cast<std::size_t>(rows.size(0)));
  const bool known = with_items(rows, [&](const auto* items, auto one) {
    return find_ones(items, rows.size(0), rows.size(1), one, found.data());
  });
  if (!known) return nb::none();
  nb::list positions;
  for (const auto position : found) positions.append(position);
  return positions;
}

bool write_ones(nb::handle positions, nb::handle column) {
  const Contiguous at(positions), rows(column, PyBUF_WRITABLE);
  const bool is_long = (at.kind() == 'l' || at.kind() == 'q') && at.item_size() == 8;
  if (!is_long || at.ndim() != 1 || rows.kind() == '\0' || rows.ndim() != 2 || rows.size(0) != at.size(0)) {
    return false;
  }
  return with_items(rows, [&](auto* items, auto one) {
    return put_ones(static_cast<const std::int64_t*>(at.data()), rows.size(0), rows.size(1), one, items);
  });
}

bool is_finite(const Contiguous& values) {
  const std::int64_t n = values.num_items();
  std::int64_t first = 0;
  run(is_long(n, 1), [&] {
    first = values.kind() == 'f' ? first_nonfinite(static_cast<const float*>(values.data()), n)
                                 : first_nonfinite(static_cast<const double*>(values.data()), n);
  });
  return first < 0;
}

bool are_finite(nb::handle arrays) {
  for (const nb::handle array : arrays) {
    const Contiguous values(array);
    if ((values.kind() != 'f' && values.kind() != 'd') || !is_finite(values)) return false;
  }
  return true;
}

}  // namespace

void bind_arrays(nb::module_& m) {
  m.def("positions_of_ones", &positions_of_ones, "column"_a,
        "Where each row of (T, n) has its single 1 among zeros; None if one isn't so, or it can't be told.");
  m.def("write_ones", &write_ones, "positions"_a, "column"_a,
        "Make the rows of (T, n) one-hot vectors; False, and nothing is written, if they can't be.");
  m.def("are_finite", &are_finite, "arrays"_a,
        "Whether arrays hold finite float32 and float64 numbers only; False also where it can't be told.");
}

}  // namespace gleanrl
