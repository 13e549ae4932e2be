// Python bindings of the classes that choose rows: generators, priorities, episodes.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "core/addresses.h"
#include "core/boundaries.h"
#include "core/episodes.h"
#include "core/priorities.h"
#include "core/random.h"
#include "core/sum_tree.h"
#include "core/tensors.h"
#include "core/weights.h"
#include "exchange.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

void update_tree(SumTree& self, std::uintptr_t index, std::uintptr_t value, std::int64_t n) {
  const auto rows = array_at<std::int64_t>("update", index, n);
  const auto values = array_at<double>("update", value, n);
  run(n >= kReleaseSearches, [&] { self.update(rows, values); });
}

void draw_rows(const SumTree& self, std::uintptr_t uniforms, std::int64_t n, std::uintptr_t index,
               std::uintptr_t value) {
  const auto from = array_at<double>("draw", uniforms, n);
  auto* rows = room_at<std::int64_t>("draw", index, n);
  auto* values = room_at<double>("draw", value, n);
  run(n >= kReleaseSearches, [&] { self.draw(from, rows, values); });
}

// value[i] = the result of `read` for row index[i].
template <class Self, void (Self::*read)(std::span<const std::int64_t>, double*) const>
void read_rows(const Self& self, std::uintptr_t index, std::int64_t n, std::uintptr_t value) {
  (self.*read)(array_at<std::int64_t>("get", index, n), room_at<double>("get", value, n));
}

void weigh(std::uintptr_t priority, std::int64_t n, double unit, double beta, std::uintptr_t out, bool normalise) {
  const auto priorities = array_at<double>("weights", priority, n);
  auto* weights = room_at<float>("weights", out, n);
  run(n >= kReleaseSearches, [&] { importance_weights(priorities, unit, beta, normalise, weights); });
}

std::int64_t update_priorities(Priorities& self, std::uintptr_t index, std::uintptr_t priority, std::int64_t n,
                               std::int64_t limit, std::uintptr_t written, std::uintptr_t expected, bool single) {
  const auto rows = array_at<std::int64_t>("update", index, n);
  const auto* counters = table_at<std::int64_t>("update", written);
  const auto* generations = expected == 0 ? nullptr : array_at<std::int64_t>("update", expected, n).data();
  std::int64_t dropped = 0;
  const auto update = [&](auto values) {
    run(n >= kReleaseSearches, [&] { dropped = self.update(rows, values, limit, counters, generations); });
  };
  single ? update(array_at<float>("update", priority, n)) : update(array_at<double>("update", priority, n));
  return dropped;
}

// Updates priorities from tensors of row numbers and priorities. Reading tensors here takes a fraction of the time that
// it takes in Python.
//
// Threads.   Any thread, with the GIL, which is released for many rows. Other threads must not change the tensors until
//   the call returns. No Python code runs.
class TensorUpdates {
 public:
  TensorUpdates(nb::object exchange, nb::object tensor_class) : exchange_(exchange, tensor_class) {}

  // Returns how many rows were dropped. All tensors must be contiguous vectors of one length on the CPU: int64 for rows
  // and generations, float32 or float64 for priorities. Otherwise nothing changes, and the result is None. Generations
  // may be None. Priorities must not be negated lazily; this isn't checked.
  nb::object update(Priorities& table, nb::handle index, nb::handle priority, nb::handle generation, std::int64_t limit,
                    std::uintptr_t written) const {
    dlpack::Tensor rows{}, raw{}, expected{};
    if (!shows_vector(index, rows) || !shows_vector(priority, raw)) return nb::none();
    const std::int64_t n = rows.shape[0];
    const bool single = raw.dtype == kFloat32;
    if (rows.dtype != kInt64 || raw.shape[0] != n || !(single || raw.dtype == kFloat64)) return nb::none();
    const bool timed = !generation.is_none();
    if (timed && (!shows_vector(generation, expected) || expected.dtype != kInt64 || expected.shape[0] != n)) {
      return nb::none();
    }
    return nb::int_(update_priorities(table, address_of(rows), address_of(raw), n, limit, written,
                                      timed ? address_of(expected) : 0, single));
  }

 private:
  static constexpr dlpack::DataType kInt64{dlpack::kInt, 64, 1}, kFloat32{dlpack::kFloat, 32, 1},
      kFloat64{dlpack::kFloat, 64, 1};

  bool shows_vector(nb::handle tensor, dlpack::Tensor& view) const {
    return exchange_.shows(tensor.ptr(), view) && view.ndim == 1 && dlpack::is_readable(view);
  }

  static std::uintptr_t address_of(const dlpack::Tensor& view) {
    return reinterpret_cast<std::uintptr_t>(dlpack::data_of(view));
  }

  Exchange exchange_;
};

void draw_priorities(Priorities& self, std::uintptr_t uniforms, std::int64_t n, double beta, bool by_batch,
                     std::uintptr_t written, std::uintptr_t index, std::uintptr_t weight, std::uintptr_t generation,
                     bool served) {
  const auto from = array_at<double>("draw", uniforms, n);
  const auto* counters = table_at<std::int64_t>("draw", written);
  auto* rows = room_at<std::int64_t>("draw", index, n);
  auto* weights = room_at<float>("draw", weight, n);
  auto* generations = room_at<std::int64_t>("draw", generation, n);
  run(n >= kReleaseSearches, [&] { self.draw(from, {beta, by_batch}, counters, rows, weights, generations, served); });
}

void draw_priorities_by(Priorities& self, Random& random, std::int64_t n, double beta, bool by_batch,
                        std::uintptr_t written, std::uintptr_t index, std::uintptr_t weight, std::uintptr_t generation,
                        bool served) {
  const auto* counters = table_at<std::int64_t>("draw", written);
  auto* rows = room_at<std::int64_t>("draw", index, n);
  auto* weights = room_at<float>("draw", weight, n);
  auto* generations = room_at<std::int64_t>("draw", generation, n);
  run(n >= kReleaseSearches,
      [&] { self.draw(random, n, {beta, by_batch}, counters, rows, weights, generations, served); });
}

void write_steps(Episodes& self, std::int64_t start, std::int64_t count, std::uintptr_t ends, nb::handle ids) {
  // The core refuses a count outside [0, capacity]. It is clamped here so that the product below fits 64 bits.
  const std::int64_t values = std::clamp<std::int64_t>(count, 0, self.capacity()) * self.num_streams();
  std::span<const std::uint8_t> flags;
  if (ends != 0) flags = array_at<std::uint8_t>("on_write", ends, values);
  std::vector<const std::int64_t*> columns;
  for (const auto address : read_list<std::uintptr_t>(
           ids, [](PyObject* item) { return reinterpret_cast<std::uintptr_t>(as_address<void*>(item)); })) {
    columns.push_back(array_at<std::int64_t>("on_write", address, values).data());
  }
  run(values >= kReleasePasses, [&] { self.on_write(start, count, flags, columns); });
}

std::int64_t draw_slices(Episodes& self, std::int64_t slice_len, std::int64_t n, std::uintptr_t uniforms,
                         std::uintptr_t first, std::uintptr_t length, bool strict, std::int64_t left,
                         std::int64_t right) {
  if (n < 0 || n > INT64_MAX / 2) throw std::invalid_argument("draw: expected 0 or more slices");
  const auto from = array_at<double>("draw", uniforms, 2 * n);
  auto* firsts = room_at<std::int64_t>("draw", first, n);
  auto* lengths = room_at<std::int64_t>("draw", length, n);
  std::int64_t total = 0;
  run(n >= kReleaseSearches, [&] { total = self.draw({slice_len, strict, left, right}, from, firsts, lengths); });
  return total;
}

std::int64_t list_runs(const Episodes& self, std::int64_t min_len, std::uintptr_t first, std::uintptr_t length,
                       std::int64_t n) {
  if (n != self.num_runs(min_len)) {
    throw std::invalid_argument("list_runs: expected room for num_runs(" + std::to_string(min_len) + "), got " +
                                std::to_string(n));
  }
  return self.list(min_len, room_at<std::int64_t>("list_runs", first, n),
                   room_at<std::int64_t>("list_runs", length, n));
}

void locate_slots(const Episodes& self, std::uintptr_t slot, std::int64_t n, std::uintptr_t before,
                  std::uintptr_t after) {
  const auto slots = array_at<std::int64_t>("locate", slot, n);
  auto* to_start = room_at<std::int64_t>("locate", before, n);
  auto* to_end = room_at<std::int64_t>("locate", after, n);
  run(n >= kReleaseSearches, [&] { self.locate(slots, to_start, to_end); });
}

void expand_slices(const Episodes& self, std::uintptr_t first, std::uintptr_t length, std::int64_t n,
                   std::uintptr_t slot, std::int64_t stride, std::uintptr_t last) {
  const auto firsts = array_at<std::int64_t>("expand", first, n);
  const auto lengths = array_at<std::int64_t>("expand", length, n);
  self.expand(firsts, lengths, stride, room_at<std::int64_t>("expand", slot, n),
              last == 0 ? nullptr : room_at<std::uint8_t>("expand", last, n));
}

// The columns that mark the ends of trajectories. Their memory must not move.
class EndColumns {
 public:
  EndColumns(nb::handle flags, nb::handle widths, nb::handle ids, nb::handle sizes, std::uintptr_t ahead,
             std::int64_t ahead_bytes)
      : ahead_{reinterpret_cast<const std::byte*>(ahead), ahead_bytes} {
    const auto flags_at = read_addresses<const std::uint8_t*>(flags);
    const auto widths_of = read_list<std::int64_t>(widths, as_number);
    const auto ids_at = read_addresses<const std::byte*>(ids);
    const auto sizes_of = read_list<std::int64_t>(sizes, as_number);
    if (flags_at.size() != widths_of.size() || ids_at.size() != sizes_of.size()) {
      throw std::invalid_argument("EndColumns: expected a size for each column");
    }
    for (const std::int64_t size : sizes_of) check_size(size);
    if (ahead != 0) check_size(ahead_bytes);
    for (std::size_t i = 0; i < flags_at.size(); ++i) flags_.push_back({flags_at[i], widths_of[i]});
    for (std::size_t i = 0; i < ids_at.size(); ++i) ids_.push_back({ids_at[i], sizes_of[i]});
  }

  bool inside(std::uintptr_t slot, std::int64_t n, std::uintptr_t inner) const {
    const auto slots = array_at<std::int64_t>("inside", slot, n);
    const auto marks = array_at<std::uint8_t>("inside", inner, n);
    if (n > 0 && marks[static_cast<std::size_t>(n) - 1] != 0) {
      throw std::invalid_argument("inside: expected the last row to be the last one of its slice");
    }
    bool found = false;
    run(n >= kReleaseSearches,
        [&] { found = ends_inside(slots, marks.data(), flags_, ids_, ahead_.first == nullptr ? nullptr : &ahead_); });
    return found;
  }

 private:
  static void check_size(std::int64_t size) {
    if (size != 1 && size != 2 && size != 4 && size != 8) {
      throw std::invalid_argument("EndColumns: expected whole numbers of 1, 2, 4 or 8 bytes");
    }
  }

  std::vector<FlagColumn> flags_;
  std::vector<IdColumn> ids_;
  IdColumn ahead_;
};

}  // namespace

void bind_draws(nb::module_& m) {
  nb::class_<EndColumns>(m, "EndColumns", "The columns that say where trajectories end.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, std::uintptr_t, std::int64_t>(), "flags"_a,
           "widths"_a, "ids"_a, "sizes"_a, "ahead"_a = 0, "ahead_bytes"_a = 0)
      .def("inside", &EndColumns::inside, "slot"_a, "n"_a, "inner"_a,
           "Whether a row slot[i] with inner[i] != 0 ends a trajectory.");

  nb::class_<SumTree>(m, "SumTree", "A sum tree of `capacity` priorities, all 0 at first.")
      .def(nb::init<std::int64_t>(), "capacity"_a)
      .def_prop_ro("capacity", &SumTree::capacity)
      .def_prop_ro("total", &SumTree::total)
      .def_prop_ro("min_positive", &SumTree::min_positive)
      .def("update", &update_tree, "index"_a, "value"_a, "n"_a,
           "Set the priorities of rows index[0:n]; of equal numbers the last one wins.")
      .def(
          "fill",
          [](SumTree& self, std::int64_t start, std::int64_t n, double value) {
            run(n >= kReleasePasses, [&] { self.fill(start, n, value); });
          },
          "start"_a, "n"_a, "value"_a, "Set the priority of rows start, start + 1, ..., around the end of the ring.")
      .def("draw", &draw_rows, "uniforms"_a, "n"_a, "index"_a, "value"_a,
           "Draw n rows in proportion to their priorities.")
      .def("get", &read_rows<SumTree, &SumTree::get>, "index"_a, "n"_a, "value"_a,
           "Read the priorities of rows index[0:n].")
      .def("check_valid", &SumTree::check_valid, "Raise RuntimeError if the tree contradicts itself.");

  nb::class_<Random>(m, "Random", "A random generator: xoshiro256++.")
      .def(nb::init<std::uint64_t>(), "seed"_a)
      .def(
          "uniforms",
          [](Random& self, std::uintptr_t out, std::int64_t n) {
            self.uniforms(room_at<double>("uniforms", out, n), n);
          },
          "out"_a, "n"_a, "Draw n float64 values from [0, 1).")
      .def(
          "integers",
          [](Random& self, std::int64_t high, std::uintptr_t out, std::int64_t n) {
            self.integers(high, room_at<std::int64_t>("integers", out, n), n);
          },
          "high"_a, "out"_a, "n"_a, "Draw n int64 values from [0, high).")
      .def(
          "permutation",
          [](Random& self, std::uintptr_t out, std::int64_t n) {
            self.permutation(room_at<std::int64_t>("permutation", out, n), n);
          },
          "out"_a, "n"_a, Unlocked(), "Write the numbers of [0, n) in random order.")
      .def(
          "save", [](const Random& self) { return nb::bytes(self.state().data(), sizeof(Random::State)); },
          "Return the state, four 64-bit numbers.")
      .def(
          "load",
          [](Random& self, const nb::bytes& state) {
            Random::State words;
            if (state.size() != sizeof words) throw std::invalid_argument("load: expected four 64-bit numbers");
            std::memcpy(words.data(), state.data(), sizeof words);
            self.set_state(words);
          },
          "state"_a, "Load a saved state.");

  nb::class_<Priorities>(m, "Priorities", "The priorities of `capacity` rows, none in use at first.")
      .def(nb::init<std::int64_t, bool>(), "capacity"_a, "single"_a)
      .def_prop_ro("capacity", &Priorities::capacity)
      .def_prop_ro("single", &Priorities::single)
      .def_prop_ro("largest", &Priorities::largest)
      .def_prop_ro("alpha", [](const Priorities& self) { return self.rule().alpha; })
      .def_prop_ro("eps", [](const Priorities& self) { return self.rule().eps; })
      .def_prop_ro("total", &Priorities::total)
      .def_prop_ro("min_positive", &Priorities::min_positive)
      .def_prop_ro("end", &Priorities::end)
      .def_prop_rw("max_seen", &Priorities::max_seen, &Priorities::set_max_seen, nb::for_setter("value"_a.none()))
      .def(
          "set_rule", [](Priorities& self, double alpha, double eps) { self.set_rule({alpha, eps}); }, "alpha"_a,
          "eps"_a, Unlocked(), "Compute leaves as (priority + eps) ** alpha from now on, also those there are.")
      .def(
          "fill",
          [](Priorities& self, std::int64_t start, std::int64_t n, double priority) {
            run(n >= kReleasePasses, [&] { self.fill(start, n, priority); });
          },
          "start"_a, "n"_a, "priority"_a, "Set the priority of rows start, start + 1, ..., around the end of the ring.")
      .def("default_priority", &Priorities::default_priority, "within"_a, "The priority for new rows.")
      .def("update", &update_priorities, "index"_a, "priority"_a, "n"_a, "limit"_a, "written"_a, "expected"_a = 0,
           "single"_a = false,
           "Set the priorities of rows index[0:n] that weren't written since; return how many were.")
      .def("draw", &draw_priorities_by, "uniforms"_a, "n"_a, "beta"_a, "by_batch"_a, "written"_a, "index"_a, "weight"_a,
           "generation"_a, "served"_a = false, "Draw n rows with the uniforms of a generator.")
      .def("draw", &draw_priorities, "uniforms"_a, "n"_a, "beta"_a, "by_batch"_a, "written"_a, "index"_a, "weight"_a,
           "generation"_a, "served"_a = false, "Draw n rows, with weights and generations.")
      .def(
          "remember",
          [](Priorities& self, std::uintptr_t index, std::int64_t n, std::uintptr_t generation) {
            self.remember(array_at<std::int64_t>("remember", index, n),
                          array_at<std::int64_t>("remember", generation, n).data());
          },
          "index"_a, "n"_a, "generation"_a,
          "Store generation[0:n] as the generations at the last draws of rows index[0:n].")
      .def(
          "block",
          [](Priorities& self, std::uintptr_t index, std::int64_t n, std::uintptr_t flags) {
            self.block(array_at<std::int64_t>("block", index, n), array_at<std::uint8_t>("block", flags, n).data());
          },
          "index"_a, "n"_a, "flags"_a, "Block rows index[0:n] whose flag isn't 0, unblock others.")
      .def("get", &read_rows<Priorities, &Priorities::get>, "index"_a, "n"_a, "value"_a,
           "Read the priorities of rows index[0:n].")
      .def("leaves", &read_rows<Priorities, &Priorities::get_leaves>, "index"_a, "n"_a, "value"_a,
           "Read the leaves of rows index[0:n].")
      .def("clear", &Priorities::clear, Unlocked(), "Forget everything but the rule.")
      .def(
          "save",
          [](const Priorities& self, std::uintptr_t priority, std::uintptr_t mark) {
            self.save(room_at<double>("save", priority, self.end()), room_at<std::uint32_t>("save", mark, self.end()));
          },
          "priority"_a, "mark"_a, Unlocked(), "Write the priorities and marks of the rows below `end`.")
      .def(
          "load",
          [](Priorities& self, std::uintptr_t priority, std::uintptr_t mark, std::int64_t n) {
            self.load(array_at<double>("load", priority, n), array_at<std::uint32_t>("load", mark, n).data());
          },
          "priority"_a, "mark"_a, "n"_a, Unlocked(), "Load n saved rows.")
      .def("check_valid", &Priorities::check_valid, "Raise RuntimeError if anything contradicts the rest.");

  nb::class_<TensorUpdates>(m, "TensorUpdates", "Gives priorities to rows, both in tensors.")
      .def(nb::init<nb::object, nb::object>(), "exchange"_a, "tensor_class"_a)
      .def("update", &TensorUpdates::update, "table"_a, "index"_a, "priority"_a, "generation"_a.none(), "limit"_a,
           "written"_a,
           "Set the priorities of rows that weren't written since; return how many were. None, and nothing has "
           "changed, unless all are vectors of one length on the CPU, in one piece, of the right types.");

  m.def("importance_weights", &weigh, "priority"_a, "n"_a, "unit"_a, "beta"_a, "out"_a, "normalise"_a,
        "Write (priority / unit) ** -beta as float32; with `normalise` the unit is the smallest priority.");

  nb::class_<Episodes>(m, "Episodes", "Which stored steps belong to which trajectory, in a ring of several streams.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), "capacity"_a, "num_streams"_a = 1, "now"_a = 0)
      .def_prop_ro("capacity", &Episodes::capacity)
      .def_prop_ro("num_streams", &Episodes::num_streams)
      .def_prop_ro("now", &Episodes::now)
      .def_prop_ro("stored", &Episodes::stored)
      .def_prop_ro("cursor", &Episodes::cursor)
      .def("on_write", &write_steps, "start"_a, "count"_a, "ends"_a = 0, "ids"_a = nb::make_tuple(),
           "Learn that steps start, start + 1, ... of every stream were written.")
      .def("clear", &Episodes::clear, "Forget everything.")
      .def("num_runs", &Episodes::num_runs, "min_len"_a = 1, "Count the trajectories of min_len steps and more.")
      .def("list_runs", &list_runs, "min_len"_a, "first"_a, "length"_a, "n"_a,
           "Write first slot and length of the n trajectories of min_len steps and more.")
      .def("draw", &draw_slices, "slice_len"_a, "n"_a, "uniforms"_a, "first"_a, "length"_a, "strict"_a = true,
           "left"_a = 0, "right"_a = 0, "Draw n slices; return the sum of their lengths.")
      .def("locate", &locate_slots, "slot"_a, "n"_a, "before"_a, "after"_a,
           "Write how many steps the trajectory of each slot has before it, and from it on.")
      .def("expand", &expand_slices, "first"_a, "length"_a, "n"_a, "slot"_a, "stride"_a = 0, "last"_a = 0,
           "Write the slots of n slices, one after the other.")
      .def("check_valid", &Episodes::check_valid, "Raise RuntimeError if the table contradicts itself.");
}

}  // namespace gleanrl
