// Python bindings of functions over whole arrays: one-hot rows, search for NaN and infinity, and running sums.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "arguments.h"
#include "core/choices.h"
#include "core/finite.h"
#include "core/running.h"
#include "held_rows.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// A contiguous NumPy array whose memory is held while it is used; or no array.
class Contiguous {
 public:
  explicit Contiguous(nb::handle array, int more = 0) : memory_(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | more) {
    if (!memory_.is_held()) PyErr_Clear();
  }

  // The type's character in the buffer protocol; 0 for a longer type code, and for items that aren't aligned.
  char kind() const {
    if (!memory_.is_held() || memory_->itemsize <= 0) return '\0';
    const auto start = reinterpret_cast<std::uintptr_t>(memory_->buf);
    return start % static_cast<std::uintptr_t>(memory_->itemsize) == 0 ? memory_.kind() : '\0';
  }
  int ndim() const { return memory_->ndim; }
  std::int64_t size(int dim) const { return memory_->shape[dim]; }
  std::int64_t num_items() const { return memory_->len / memory_->itemsize; }
  Py_ssize_t item_size() const { return memory_->itemsize; }
  void* data() const { return memory_->buf; }

 private:
  Memory memory_;
};

// Calls `use` with the array's items as unsigned integers of their size, and with the bits of the number 1. Returns
// false for a type whose bits of 1 aren't known.
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

// Running sums over the rows of one column; see `run_on`. One caller at a time.
class RunningSums {
 public:
  RunningSums(nb::handle after, nb::handle roots, nb::handle addends)
      : after_("after", after, PyBUF_WRITABLE), roots_("roots", roots, PyBUF_WRITABLE) {
    if (!addends.is_none()) addends_.emplace("addends", addends, 0);
    if (!after_.is_like(roots_) || (addends_ && !after_.is_like(*addends_))) {
      throw std::invalid_argument("running sums: expected arrays of one shape and type");
    }
    call_ = call_for(after_);
    if (call_ == nullptr) {
      throw std::invalid_argument("running sums: expected uint8, signed integers, float32 or float64");
    }
  }

  void run_on(std::int64_t first, std::int64_t n) {
    if (first < 0 || n < 0 || n >= after_.num_rows() - first) {
      throw std::out_of_range("run_on: expected rows of the array, and one behind them");
    }
    const RowGrid* const addends = addends_ ? &addends_->grid() : nullptr;
    const bool is_much = n > 0 && static_cast<std::int64_t>(after_.grid().elements.size()) > kReleasePasses / n;
    run(is_much, [&] { call_(after_.grid(), roots_.grid(), addends, first, n); });
  }

 private:
  using Call = void (*)(const RowGrid&, const RowGrid&, const RowGrid*, std::int64_t, std::int64_t);

  static Call call_for(const HeldRows& rows) {
    switch (rows.kind()) {
      case 'B':
        return &gleanrl::run_on<std::uint8_t>;
      case 'b':
      case 'h':
      case 'i':
      case 'l':
      case 'q':
        return call_for_signed(rows.item_size());
      case 'f':
        return &gleanrl::run_on<float>;
      case 'd':
        return &gleanrl::run_on<double>;
      default:
        return nullptr;
    }
  }

  static Call call_for_signed(Py_ssize_t bytes) {
    if (bytes == 1) return &gleanrl::run_on<std::int8_t>;
    if (bytes == 2) return &gleanrl::run_on<std::int16_t>;
    return bytes == 4 ? &gleanrl::run_on<std::int32_t> : &gleanrl::run_on<std::int64_t>;
  }

  HeldRows after_, roots_;
  std::optional<HeldRows> addends_;
  Call call_ = nullptr;
};

}  // namespace

void bind_arrays(nb::module_& m) {
  m.def("positions_of_ones", &positions_of_ones, "column"_a,
        "Where each row of (T, n) has its single 1 among zeros; None if one isn't so, or it can't be told.");
  m.def("write_ones", &write_ones, "positions"_a, "column"_a,
        "Make the rows of (T, n) one-hot vectors; False, and nothing is written, if they can't be.");
  m.def("are_finite", &are_finite, "arrays"_a,
        "Whether arrays hold finite float32 and float64 numbers only; False also where it can't be told.");
  nb::class_<RunningSums>(m, "RunningSums", "Sums that run on from row to row of a column.")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), "after"_a, "roots"_a, "addends"_a.none() = nb::none())
      .def("run_on", &RunningSums::run_on, "first"_a, "n"_a,
           "Write n rows from `first` on, and the roots behind them.");
}

}  // namespace gleanrl
