// Python bindings of `record`: trajectory ids and step counts of a batch.
#include "core/trajectories.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "held_rows.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

// A NumPy array whose memory is held while it is used.
class Array {
 public:
  // `kinds`: the accepted type characters of the buffer protocol. The array may be None unless it is `needed`.
  Array(const char* name, nb::handle array, const char* kinds, Py_ssize_t item_size, int ndim, bool written,
        bool needed = true) {
    if (!needed && array.is_none()) return;
    memory_.emplace(array, PyBUF_STRIDES | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0));
    if (!memory_->is_held()) throw nb::python_error();
    if (!fits(*memory_, kinds, item_size, ndim)) {
      throw std::invalid_argument(std::string("record: expected another array of ") + name);
    }
  }

  std::int64_t size(int dim) const { return (*memory_)->shape[dim]; }

  void require(const char* name, std::int64_t rows, std::int64_t row_length) const {
    if (!memory_) return;
    const Memory& view = *memory_;
    if (view->shape[0] != rows || (view->ndim == 2 && view->shape[1] != row_length)) {
      throw std::invalid_argument(std::string("record: done and ") + name + " differ in shape");
    }
  }

  template <class Value>
  Rows<Value> rows() const {
    if (!memory_) return {};
    const Memory& view = *memory_;
    return {static_cast<Value*>(view->buf), view->strides[0] / view->itemsize};
  }

 private:
  // There may be gaps between rows, but not between the values of a row.
  static bool fits(const Memory& view, const char* kinds, Py_ssize_t item_size, int ndim) {
    if (view.kind() == '\0' || std::strchr(kinds, view.kind()) == nullptr) return false;
    if (view->itemsize != item_size || view->ndim != ndim || view->strides[0] % item_size != 0) return false;
    if (reinterpret_cast<std::uintptr_t>(view->buf) % static_cast<std::uintptr_t>(item_size) != 0) return false;
    return view->shape[ndim - 1] <= 1 || view->strides[ndim - 1] == item_size;
  }

  std::optional<Memory> memory_;  // empty if the array is None
};

nb::tuple record_steps(nb::handle done, nb::handle reward, nb::handle mask, nb::handle ids, nb::handle counts,
                       nb::handle own_ids, nb::handle own_steps, nb::handle own_returns, std::int64_t next_id,
                       std::int64_t factor, std::int64_t offset) {
  const bool is_single = !reward.is_none() && nb::cast<Py_ssize_t>(reward.attr("itemsize")) == sizeof(float);
  const Array flags("done", done, "?", 1, 2, false), frames("mask", mask, "?", 1, 2, false, false);
  const Array rewards("reward", reward, is_single ? "f" : "d", is_single ? 4 : 8, 2, false, false);
  const Array names("ids", ids, "lq", 8, 2, true), before("counts", counts, "lq", 8, 2, true, false);
  const Array id("own ids", own_ids, "lq", 8, 1, true), count("own steps", own_steps, "lq", 8, 1, true);
  const Array sum("own returns", own_returns, "d", 8, 1, true);
  const std::int64_t num_envs = flags.size(0), num_steps = flags.size(1);
  frames.require("mask", num_envs, num_steps);
  rewards.require("reward", num_envs, num_steps);
  names.require("ids", num_envs, num_steps);
  before.require("counts", num_envs, num_steps);
  for (const Array* own : {&id, &count, &sum}) own->require("own_ids, own_steps or own_returns", num_envs, 0);
  const Steps steps{num_envs,
                    num_steps,
                    flags.rows<const std::uint8_t>(),
                    frames.rows<const std::uint8_t>(),
                    names.rows<std::int64_t>(),
                    before.rows<std::int64_t>()};
  UnderWay now{id.rows<std::int64_t>().first, count.rows<std::int64_t>().first, sum.rows<double>().first, next_id};
  Ended ended;
  run(num_envs * num_steps >= kReleaseBytes, [&] {
    ended = is_single ? record(steps, rewards.rows<const float>(), now, {factor, offset})
                      : record(steps, rewards.rows<const double>(), now, {factor, offset});
  });
  nb::list lengths, returns;
  for (const auto length : ended.lengths) lengths.append(length);
  for (const auto total : ended.returns) returns.append(total);
  return nb::make_tuple(lengths, returns);
}

}  // namespace

void bind_trajectories(nb::module_& m) {
  m.def("record", &record_steps, "done"_a, "reward"_a.none(), "mask"_a.none(), "ids"_a, "counts"_a.none(), "own_ids"_a,
        "own_steps"_a, "own_returns"_a, "next_id"_a, "factor"_a, "offset"_a,
        "Number the frames of a batch; return lengths and returns of the trajectories that ended.");
}

}  // namespace gleanrl
