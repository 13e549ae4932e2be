// The Python face of what works on whole arrays: one-hot rows, numbers that aren't finite, running sums, and arithmetic
// on rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "bindings.h"
#include "choices.h"
#include "finite.h"
#include "running.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// An object's memory by Python's buffer protocol, held; or none, and a Python error, if it isn't shown like this.
class Memory {
 public:
  Memory(nb::handle object, int how) { PyObject_GetBuffer(object.ptr(), &view_, how); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (is_held()) PyBuffer_Release(&view_);
  }

  bool is_held() const { return view_.obj != nullptr; }
  const Py_buffer* operator->() const { return &view_; }
  // The character of the items' type; 0 for none of one character.
  char kind() const { return std::strlen(view_.format) == 1 ? view_.format[0] : '\0'; }

 private:
  Py_buffer view_{};
};

// A contiguous NumPy array, held while its memory is used; or nothing.
class Contiguous {
 public:
  explicit Contiguous(nb::handle array, int more = 0) : memory_(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | more) {
    if (!memory_.is_held()) PyErr_Clear();
  }

  // The type's character; 0 for none of one character, and for items that aren't aligned.
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

// The rows of a NumPy array with time first, whose memory is held and stays where it is.
class HeldRows {
 public:
  HeldRows(const char* name, nb::handle array, int more) : memory_(array, PyBUF_STRIDES | PyBUF_FORMAT | more) {
    if (!memory_.is_held()) throw nb::python_error();
    if (memory_->ndim == 0) throw std::invalid_argument(std::string(name) + ": expected rows");
    grid_.data = static_cast<std::byte*>(memory_->buf);
    grid_.step = memory_->strides[0];
    grid_.elements = {0};
    for (int dim = 1; dim < memory_->ndim; ++dim) {
      std::vector<std::int64_t> elements;
      for (const auto offset : grid_.elements) {
        for (Py_ssize_t i = 0; i < memory_->shape[dim]; ++i) elements.push_back(offset + i * memory_->strides[dim]);
      }
      grid_.elements = std::move(elements);
    }
  }

  const RowGrid& grid() const { return grid_; }
  std::int64_t num_rows() const { return memory_->shape[0]; }
  char kind() const { return memory_.kind(); }
  Py_ssize_t item_size() const { return memory_->itemsize; }
  bool is_like(const HeldRows& other) const {
    return kind() == other.kind() && item_size() == other.item_size() && has_rows_like(other) &&
           num_rows() == other.num_rows();
  }
  // Whether a row has the same shape.
  bool has_rows_like(const HeldRows& other) const {
    return memory_->ndim == other.memory_->ndim &&
           std::equal(memory_->shape + 1, memory_->shape + memory_->ndim, other.memory_->shape + 1);
  }

 private:
  Memory memory_;
  RowGrid grid_;
};

// Sums of one column, which run on from row to row; see `run_on`. One caller at a time.
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

// Rows of some columns, each of which gets what arithmetic makes of a row of another one. One caller at a time.
class RowMaps {
 public:
  // Each map is (source, after, roots, operations): arrays, roots maybe None; each operation a name and an array of one
  // row, or None.
  explicit RowMaps(nb::list maps) {
    for (const nb::handle one : maps) maps_.push_back(map_of(nb::cast<nb::tuple>(one)));
  }
  RowMaps(const RowMaps&) = delete;
  RowMaps& operator=(const RowMaps&) = delete;

  // Writes row t, and row t + 1 of the roots.
  void run(std::int64_t t) const {
    for (const Map& map : maps_) {
      if (t < 0 || t >= map.num_rows) throw std::out_of_range("run: no such row, or none behind it");
    }
    for (const Map& map : maps_) {
      for (std::size_t e = 0; e < map.source.grid.elements.size(); ++e) {
        const double value = mapped(map.source, map.operations, t, e);
        map.after.put(t, e, value);
        if (map.roots) map.roots->put(t + 1, e, value);
      }
    }
  }

 private:
  struct Map {
    FloatRows source, after;
    std::optional<FloatRows> roots;
    std::vector<Operation> operations;
    std::int64_t num_rows;
  };

  Map map_of(const nb::tuple& given) {
    if (given.size() != 4) throw std::invalid_argument("row maps: expected source, after, roots and operations");
    const HeldRows& source = hold("source", given[0], 0);
    const HeldRows& after = hold("after", given[1], PyBUF_WRITABLE);
    Map map{floats(source), floats(after), {}, {}, std::min(source.num_rows(), after.num_rows())};
    if (!given[2].is_none()) {
      const HeldRows& roots = hold("roots", given[2], PyBUF_WRITABLE);
      if (!roots.is_like(after)) throw std::invalid_argument("row maps: expected `roots` like `after`");
      map.roots = floats(roots);
      map.num_rows = std::min(map.num_rows, roots.num_rows() - 1);
    }
    bool is_float = map.source.is_float;
    for (const nb::handle one : nb::cast<nb::list>(given[3])) {
      map.operations.push_back(operation_of(nb::cast<nb::tuple>(one), source, is_float));
      is_float = map.operations.back().is_float;
    }
    if (!source.has_rows_like(after) || map.after.is_float != is_float) {
      throw std::invalid_argument(
          "row maps: expected `after` with rows of the source's shape, in the dtype that operations end in");
    }
    return map;
  }

  // `is_float` is what the values are before it.
  Operation operation_of(const nb::tuple& given, const HeldRows& source, bool is_float) {
    if (given.size() != 2) throw std::invalid_argument("row maps: expected a name and an operand");
    const std::string name = nb::cast<nb::str>(given[0]).c_str();
    if (name == "float32" || name == "float64") return {Arithmetic::kConvert, {}, name == "float32"};
    constexpr std::pair<const char*, Arithmetic> kNames[] = {{"add", Arithmetic::kAdd},
                                                             {"subtract", Arithmetic::kSubtract},
                                                             {"multiply", Arithmetic::kMultiply},
                                                             {"divide", Arithmetic::kDivide}};
    for (const auto& [known, what] : kNames) {
      if (name != known) continue;
      const HeldRows& operand = hold("operand", given[1], 0);
      if (!operand.has_rows_like(source) || operand.num_rows() < 1 || floats(operand).is_float != is_float) {
        throw std::invalid_argument("row maps: expected an operand of " + name + " like a row at that point");
      }
      return {what, floats(operand), is_float};
    }
    throw std::invalid_argument("row maps: unknown operation " + name);
  }

  const HeldRows& hold(const char* name, nb::handle array, int more) { return held_.emplace_back(name, array, more); }

  static FloatRows floats(const HeldRows& rows) {
    if (rows.kind() != 'f' && rows.kind() != 'd') throw std::invalid_argument("row maps: expected float32 or float64");
    return {rows.grid(), rows.kind() == 'f'};
  }

  std::deque<HeldRows> held_;  // the memory behind the grids
  std::vector<Map> maps_;
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
  nb::class_<RowMaps>(m, "RowMaps", "Arithmetic on rows of columns.")
      .def(nb::init<nb::list>(), "maps"_a)
      .def("run", &RowMaps::run, "t"_a, "Write row t, and row t + 1 of the roots.");
}

}  // namespace gleanrl
