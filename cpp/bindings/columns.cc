// Python bindings of columns of rows, their counters, and the search for NaN and infinity.
#include "core/columns.h"

#include <array>
#include <span>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "core/addresses.h"
#include "core/finite.h"
#include "core/kernels.h"
#include "core/shared_rows.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

void gather_rows(const Columns& self, std::uintptr_t index, std::int64_t n, nb::handle out, nb::handle wanted) {
  const std::array indices{array_at<std::int64_t>("gather", index, n)};
  const auto to = read_addresses<std::byte*>(out);
  std::vector<Columns::Leaf> chosen;
  if (!wanted.is_none()) {
    for (const auto column : read_list<std::int64_t>(wanted, as_number)) chosen.push_back({column, 0});
  }
  const std::span<const Columns::Leaf> leaves = wanted.is_none() ? self.all_leaves() : chosen;
  run(is_long(n, self.bytes_per_row(leaves)), [&] { self.gather(indices, to, leaves); });
}

void write_rows(const Columns& self, std::int64_t start, std::int64_t n, nb::handle src) {
  const auto from = read_addresses<const std::byte*>(src);
  run(is_long(n, self.bytes_per_row()), [&] { self.write(start, n, from); });
}

void put_rows(const Columns& self, std::uintptr_t index, std::int64_t n, nb::handle src) {
  const auto rows = array_at<std::int64_t>("put", index, n);
  const auto from = read_addresses<const std::byte*>(src);
  run(is_long(n, self.bytes_per_row()), [&] { self.put(rows, from); });
}

std::vector<SharedRows::Pair> read_pairs(nb::handle outcomes, nb::handle roots) {
  const auto from = read_list<std::int64_t>(outcomes, as_number), to = read_list<std::int64_t>(roots, as_number);
  if (from.size() != to.size()) throw std::invalid_argument("SharedRows: expected a root for each outcome");
  std::vector<SharedRows::Pair> pairs;
  for (std::size_t i = 0; i < from.size(); ++i) {
    pairs.push_back({static_cast<std::size_t>(from[i]), static_cast<std::size_t>(to[i])});
  }
  return pairs;
}

bool write_shared(SharedRows& self, std::int64_t start, std::int64_t n, nb::handle src, bool in_place) {
  const auto from = read_addresses<const std::byte*>(src);
  if (!in_place && self.overlaps(from)) return false;
  run(is_long(n, self.row_bytes()), [&] { self.write(start, n, from, in_place); });
  return true;
}

bool put_shared(SharedRows& self, std::uintptr_t index, std::int64_t n, nb::handle src) {
  const auto rows = array_at<std::int64_t>("put", index, n);
  const auto from = read_addresses<const std::byte*>(src);
  if (self.overlaps(from)) return false;
  run(is_long(n, self.row_bytes()), [&] { self.put(rows, from); });
  return true;
}

void gather_shared(const SharedRows& self, std::uintptr_t index, std::int64_t n, nb::handle out, nb::handle wanted) {
  const auto rows = array_at<std::int64_t>("gather", index, n);
  const auto to = read_addresses<std::byte*>(out);
  if (wanted.is_none()) {
    run(is_long(n, self.row_bytes()), [&] { self.gather(rows, to, self.all_leaves()); });
  } else {
    const auto leaves = read_list<std::int64_t>(wanted, as_number);
    run(is_long(n, self.row_bytes()), [&] { self.gather(rows, to, leaves); });
  }
}

std::vector<SharedRows::Stack> read_stacks(nb::handle frames, nb::handle pieces) {
  const auto counts = read_list<std::int64_t>(frames, as_number), parts = read_list<std::int64_t>(pieces, as_number);
  if (counts.size() != parts.size()) throw std::invalid_argument("SharedRows: frames and pieces differ in length");
  std::vector<SharedRows::Stack> stacks;
  for (std::size_t i = 0; i < counts.size(); ++i) stacks.push_back({counts[i], parts[i]});
  return stacks;
}

nb::object shared_seams(const SharedRows& self, std::int64_t newest, std::int64_t steps, std::int64_t streams,
                        nb::handle src) {
  const auto from = read_addresses<const std::byte*>(src);
  std::string begins(static_cast<std::size_t>(streams), '\0');
  const bool any = self.seams(newest, steps, from, reinterpret_cast<std::uint8_t*>(begins.data()));
  return any ? nb::object(nb::bytes(begins.data(), begins.size())) : nb::none();
}

template <class Float>
std::int64_t find_nonfinite(std::uintptr_t address, std::int64_t n) {
  const auto values = array_at<Float>("first_nonfinite", address, n);
  std::int64_t first = -1;
  run(is_long(n, 1), [&] { first = first_nonfinite(values.data(), n); });
  return first;
}

}  // namespace

void bind_columns(nb::module_& m) {
  nb::class_<Columns>(m, "Columns", "k columns of num_rows rows at addresses that the caller keeps alive.")
      .def(
          "__init__",
          [](Columns* self, nb::handle pointers, nb::handle row_bytes, std::int64_t num_rows) {
            new (self)
                Columns(read_addresses<std::byte*>(pointers), read_list<std::int64_t>(row_bytes, as_number), num_rows);
          },
          "pointers"_a, "row_bytes"_a, "num_rows"_a)
      .def_prop_ro("num_rows", &Columns::num_rows)
      .def_prop_ro("num_columns", &Columns::num_columns)
      .def("gather", &gather_rows, "index"_a, "n"_a, "out"_a, "wanted"_a = nb::none(),
           "Copy rows index[0:n] of the wanted columns (all by default) into the arrays at `out`.")
      .def("write", &write_rows, "start"_a, "n"_a, "src"_a,
           "Write n rows from the arrays at `src` to start, start + 1, ..., around the end of the ring.")
      .def("put", &put_rows, "index"_a, "n"_a, "src"_a,
           "Write n rows from the arrays at `src` to rows index[0:n]; of equal numbers the last one wins.")
      .def_static(
          "sharing",
          [](nb::handle bases, nb::handle row_bytes, nb::handle outcomes, nb::handle roots, nb::handle frames,
             nb::handle pieces, std::int64_t num_slots, std::int64_t streams, std::uintptr_t places,
             std::uintptr_t heads) {
            return SharedRows(read_addresses<std::byte*>(bases), read_list<std::int64_t>(row_bytes, as_number),
                              read_pairs(outcomes, roots), read_stacks(frames, pieces), num_slots, streams,
                              room_at<std::uint32_t>("places", places, num_slots),
                              heads == 0 ? nullptr : room_at<std::uint32_t>("heads", heads, num_slots));
          },
          "bases"_a, "row_bytes"_a, "outcomes"_a, "roots"_a, "frames"_a, "pieces"_a, "num_slots"_a, "streams"_a,
          "places"_a, "heads"_a, "Return rows in which an outcome that the following root repeats is stored once.")
      .def_static("sharing_limit", &SharedRows::limit, "num_slots"_a, "streams"_a, "stacks"_a,
                  "The row after the last one that shared rows may ever use.");

  nb::class_<SharedRows>(m, "_SharedRows", "Rows in which an outcome that the following root repeats is stored once.")
      .def_prop_ro("num_apart", &SharedRows::num_apart)
      .def_prop_ro("used", &SharedRows::used)
      .def("free",
           [](const SharedRows& self) {
             nb::list rows;
             for (const std::uint32_t row : self.free()) rows.append(row);
             return rows;
           })
      .def("reach", &SharedRows::reach, "n"_a, "by_slot"_a = false,
           "The row after the last one that a write, or with `by_slot` a put, of n rows may use.")
      .def(
          "reach_of",
          [](const SharedRows& self, std::int64_t start, std::int64_t n, nb::handle src) {
            const auto from = read_addresses<const std::byte*>(src);
            std::int64_t row = 0;
            run(is_long(n, self.row_bytes()), [&] { row = self.reach_of(start, n, from); });
            return row;
          },
          "start"_a, "n"_a, "src"_a, "The row after the last one that a write of these rows may use.")
      .def("write", &write_shared, "start"_a, "n"_a, "src"_a, "in_place"_a = false,
           "Write n rows from the arrays at `src` to the slots start, start + 1, ..., around the end of the ring. "
           "Return "
           "False and write nothing if an array is part of a column.")
      .def("put", &put_shared, "index"_a, "n"_a, "src"_a,
           "Write n rows from the arrays at `src` to the slots index[0:n]; of equal numbers the last one wins. Return "
           "False and write nothing if an array is part of a column.")
      .def("gather", &gather_shared, "index"_a, "n"_a, "out"_a, "wanted"_a = nb::none(),
           "Copy rows index[0:n] of the wanted leaves (all by default) into the arrays at `out`.")
      .def("forget", &SharedRows::forget, "Forget all rows.")
      .def("recount", &SharedRows::recount, "Find the free spare rows anew, after a fork during a write.")
      .def(
          "watch",
          [](SharedRows& self, nb::handle outcomes, nb::handle roots, nb::handle flags) {
            const auto ends = read_list<std::int64_t>(flags, as_number);
            self.watch(read_pairs(outcomes, roots), {ends.begin(), ends.end()});
          },
          "outcomes"_a, "roots"_a, "flags"_a, "Set the leaves that `seams` reads.")
      .def(
          "seams", &shared_seams, "newest"_a, "steps"_a, "streams"_a, "src"_a,
          "Return a byte for each stream, 1 if the arrays at `src` don't continue the step at slot `newest`; or None.");

  m.def("first_nonfinite_f32", &find_nonfinite<float>, "address"_a, "n"_a,
        "Position of the first NaN or infinity among n float32 values, or -1.");
  m.def("first_nonfinite_f64", &find_nonfinite<double>, "address"_a, "n"_a,
        "Position of the first NaN or infinity among n float64 values, or -1.");
  m.def(
      "bump",
      [](std::uintptr_t counters, std::int64_t start, std::int64_t n, std::int64_t num_rows) {
        bump(room_at<std::int64_t>("bump", counters, num_rows), start, n, num_rows);
      },
      "counters"_a, "start"_a, "n"_a, "num_rows"_a, "Add 1 to n int64 counters of a ring from `start` on.");
  m.def(
      "bump_at",
      [](std::uintptr_t counters, std::uintptr_t index, std::int64_t n, std::int64_t num_rows) {
        const auto rows = array_at<std::int64_t>("bump_at", index, n);
        bump_at(room_at<std::int64_t>("bump_at", counters, num_rows), rows.data(), n, num_rows);
      },
      "counters"_a, "index"_a, "n"_a, "num_rows"_a, "Add 1 to the int64 counters index[0:n].");
}

}  // namespace gleanrl
