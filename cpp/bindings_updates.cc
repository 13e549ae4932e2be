// The Python face of priorities that come as tensors: these are looked at here, in a fraction of the time that asking
// them from Python takes.
#include <cstdint>
#include <span>

#include "addresses.h"
#include "bindings.h"
#include "exchange.h"
#include "priorities.h"
#include "tensors.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

constexpr dlpack::DataType kInt64{dlpack::kInt, 64, 1}, kFloat32{dlpack::kFloat, 32, 1},
    kFloat64{dlpack::kFloat, 64, 1};

// Gives priorities to rows, both in tensors.
//
// Threads.   Any, under the interpreter lock, which is released for many rows: the tensors belong to the call until it
//   returns.
// Failure.   That of `Priorities::update`: nothing has changed.
class TensorUpdates {
 public:
  TensorUpdates(nb::object exchange, nb::object tensor_class) : exchange_(exchange, tensor_class) {}

  // Returns how many rows were dropped; none, and nothing has changed, unless all are plain vectors of one length on the
  // CPU: rows and generations of int64, priorities of float32 or float64. Generations may be none.
  nb::object update(Priorities& table, nb::handle index, nb::handle priority, nb::handle generation, std::int64_t limit,
                    std::uintptr_t written) const {
    if (!exchange_.is_plain(priority.ptr())) return nb::none();  // Python may run: others are looked at afterwards
    dlpack::Tensor rows{}, raw{}, expected{};
    if (!shows_vector(index, rows) || !shows_vector(priority, raw) || rows.dtype != kInt64) return nb::none();
    const std::int64_t n = rows.shape[0];
    const bool single = raw.dtype == kFloat32;
    if (raw.shape[0] != n || !(single || raw.dtype == kFloat64)) return nb::none();
    if (!generation.is_none()) {
      if (!shows_vector(generation, expected) || expected.dtype != kInt64 || expected.shape[0] != n) return nb::none();
    }
    std::int64_t dropped = 0;
    const auto update = [&](auto values) {
      const auto* const counters = table_at<std::int64_t>("update", written);
      const auto* const generations = generation.is_none() ? nullptr : values_of<std::int64_t>(expected).data();
      run(n >= kReleaseSearches,
          [&] { dropped = table.update(values_of<std::int64_t>(rows), values, limit, counters, generations); });
    };
    single ? update(values_of<float>(raw)) : update(values_of<double>(raw));
    return nb::int_(dropped);
  }

 private:
  bool shows_vector(nb::handle tensor, dlpack::Tensor& view) const {
    return exchange_.shows(tensor.ptr(), view) && view.ndim == 1 && dlpack::is_readable(view);
  }

  template <class Value>
  static std::span<const Value> values_of(const dlpack::Tensor& view) {
    return array_at<Value>("update", reinterpret_cast<std::uintptr_t>(dlpack::data_of(view)), view.shape[0]);
  }

  Exchange exchange_;
};

}  // namespace

void bind_updates(nb::module_& m) {
  nb::class_<TensorUpdates>(m, "TensorUpdates", "Gives priorities to rows, both in tensors.")
      .def(nb::init<nb::object, nb::object>(), "exchange"_a, "tensor_class"_a)
      .def("update", &TensorUpdates::update, "table"_a, "index"_a, "priority"_a, "generation"_a.none(), "limit"_a,
           "written"_a,
           "Set the priorities of rows that weren't written since; return how many were. None, and nothing has "
           "changed, unless all are plain vectors of one length on the CPU, of the table's types.");
}

}  // namespace gleanrl
