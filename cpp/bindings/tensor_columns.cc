// Python bindings of columns that are written from tensors. Reading tensors here takes a fraction of the time that it
// takes in Python.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "core/boundaries.h"
#include "core/columns.h"
#include "core/tensors.h"
#include "exchange.h"
#include "module.h"

namespace gleanrl {

using namespace nanobind::literals;

namespace {

using dlpack::Tensor;

// Writes rows of tensors into columns ``[rows, *leaf]``, and checks which tensors it can write.
//
// Lifetime.  The object holds references to the columns. Their memory must not move.
// Threads.   Any thread, with the GIL, which `write` releases for long copies. Other threads must not change the list
//   and its tensors until the call returns.
// Failure.   Every tensor is checked before the first byte is written.
// Overlap.   None: the caller copies leaves whose memory is part of a column.
// Cost.      `fits` and `write`: about 0.1 us a leaf, with warm caches. `seams`: 0.02 us for each leaf that it reads,
//   and the cost of find_seams.
class TensorColumns {
 public:
  TensorColumns(nb::object exchange, nb::object tensor_class, nb::list columns)
      : exchange_(exchange, tensor_class), kept_(columns), dtype_(name_of("dtype")), columns_(read(columns)) {}

  // Whether all leaves are plain, contiguous tensors ``[*lead, *leaf]`` of the columns' dtypes on the CPU.
  bool fits(nb::list leaves, nb::tuple lead) const {
    if (leaves.size() != forms_.size()) return false;
    const auto sizes = read_list<std::int64_t>(lead, as_number);
    // `is_plain` may run Python code, which may change tensors. So their views are read afterwards.
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      if (!is_plain(forms_[i], leaf_at(leaves, i))) return false;
    }
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      Tensor view{};
      if (!exchange_.shows(leaf_at(leaves, i), view) || !is_like(forms_[i], view, sizes)) return false;
    }
    return true;
  }

  // Writes n rows of each leaf to row `start` and the following rows, around the end of the ring. Returns false and
  // writes nothing if a leaf isn't n contiguous rows, or its memory is part of a column. Leaves must not be negated
  // lazily: `fits` checks this, `write` doesn't.
  bool write(std::int64_t start, std::int64_t n, nb::list leaves) const {
    if (leaves.size() != forms_.size()) return false;
    std::vector<const std::byte*> from(forms_.size());
    // The columns refuse other numbers of rows, without reading any.
    const bool is_number = n >= 0 && n <= columns_.num_rows();
    for (std::size_t i = 0; i < forms_.size() && is_number; ++i) {
      Tensor view{};
      if (!exchange_.shows(leaf_at(leaves, i), view) || !has_rows(forms_[i], view, n)) return false;
      from[i] = dlpack::data_of(view);
      if (stands_in_column(from[i])) return false;
    }
    run(is_long(n, columns_.bytes_per_row()), [&] { columns_.write(start, n, from); });
    return true;
  }

  // Sets the columns that `seams` reads: outcomes, the roots that repeat them one step later, and end flags.
  void watch(nb::list outcomes, nb::list roots, nb::list flags) {
    const auto from = read_list<std::int64_t>(outcomes, as_number), to = read_list<std::int64_t>(roots, as_number);
    const auto ends = read_list<std::int64_t>(flags, as_number);
    if (from.size() != to.size()) throw std::invalid_argument("watch: expected a root for each outcome");
    std::vector<Pair> twins;
    for (std::size_t i = 0; i < from.size(); ++i) {
      const Pair pair{static_cast<std::size_t>(from[i]), static_cast<std::size_t>(to[i])};
      if (forms_.at(pair.outcome).row_bytes != forms_.at(pair.root).row_bytes) {
        throw std::invalid_argument("watch: expected twins of one size");
      }
      twins.push_back(pair);
    }
    for (const std::int64_t flag : ends) static_cast<void>(forms_.at(static_cast<std::size_t>(flag)));
    twins_ = std::move(twins);
    flags_.assign(ends.begin(), ends.end());
  }

  // The streams in which the leaves don't continue the stored step whose rows begin at `newest`: a byte of 0 or 1 for
  // each stream. None if all streams continue, or it isn't known. `fits` or `ready` must have accepted the leaves.
  nb::object seams(std::int64_t newest, std::int64_t steps, std::int64_t streams, nb::list leaves) const {
    if (newest < 0 || steps < 1 || streams < 1 || newest > columns_.num_rows() - streams) {
      throw std::out_of_range("seams: expected a stored step, and steps to write");
    }
    const std::int64_t rows = steps * streams;
    bool goes_on = true;  // most writes continue all streams; one comparison of each root shows this
    for (const auto& [outcome, root] : twins_) {
      const std::byte* const roots = data_at(leaves, root, rows);
      if (roots == nullptr) return nb::none();
      const std::int64_t bytes = forms_[outcome].row_bytes;
      goes_on =
          std::memcmp(forms_[outcome].first + newest * bytes, roots, static_cast<std::size_t>(streams * bytes)) == 0;
      if (!goes_on) break;
    }
    if (goes_on) return nb::none();
    std::vector<Twin> twins;
    std::vector<EndFlag> flags;
    twins.reserve(twins_.size());
    flags.reserve(flags_.size());
    for (const auto& [outcome, root] : twins_) {
      const std::byte *const written = data_at(leaves, outcome, rows), *const roots = data_at(leaves, root, rows);
      if (written == nullptr || roots == nullptr) return nb::none();
      const Form& form = forms_[outcome];
      twins.push_back({form.first + newest * form.row_bytes, written, roots, form.row_bytes});
    }
    for (const std::size_t flag : flags_) {
      const std::byte* const written = data_at(leaves, flag, rows);
      if (written == nullptr) return nb::none();
      const std::byte* const stored = forms_[flag].first + newest * forms_[flag].row_bytes;
      flags.push_back({reinterpret_cast<const std::uint8_t*>(stored), reinterpret_cast<const std::uint8_t*>(written),
                       forms_[flag].row_bytes});
    }
    std::string begins(static_cast<std::size_t>(streams), '\0');
    bool any = false;
    run(streams >= kReleaseRows,
        [&] { any = find_seams(twins, flags, steps, streams, reinterpret_cast<std::uint8_t*>(begins.data())); });
    return any ? nb::object(nb::bytes(begins.data(), begins.size())) : nb::none();
  }

 private:
  struct Pair {
    std::size_t outcome, root;
  };

  // The address of a leaf with n rows; null if the leaf has another form.
  const std::byte* data_at(const nb::list& leaves, std::size_t i, std::int64_t n) const {
    Tensor view{};
    if (!exchange_.shows(leaf_at(leaves, i), view) || !has_rows(forms_[i], view, n)) return nullptr;
    return dlpack::data_of(view);
  }

  // The description of a column.
  struct Form {
    nb::object dtype;
    dlpack::DataType shown;           // the dtype as DLPack reports it; two torch dtypes can have the same one
    std::vector<std::int64_t> shape;  // shape of a leaf
    std::int64_t row_bytes;
    const std::byte* first;
    const std::byte* last;  // end of the last row
  };

  Columns read(nb::list columns) {
    std::vector<std::byte*> bases;
    std::vector<std::int64_t> row_bytes;
    std::int64_t num_rows = 0;
    for (const nb::handle column : columns) {
      const Tensor view = exchange_.view_of(column);
      if (view.ndim == 0 || !dlpack::is_readable(view)) {
        throw std::invalid_argument("columns: expected rows in one piece, on the CPU");
      }
      if (view.dtype.code == dlpack::kComplex)
        throw std::invalid_argument("columns: complex numbers may be conjugated");
      if (!forms_.empty() && view.shape[0] != num_rows) throw std::invalid_argument("columns: expected as many rows");
      num_rows = view.shape[0];
      auto* const data = const_cast<std::byte*>(dlpack::data_of(view));
      std::vector<std::int64_t> shape(view.shape + 1, view.shape + view.ndim);
      std::int64_t bytes = dlpack::item_bytes(view.dtype);
      for (const std::int64_t size : shape) bytes *= size;
      bases.push_back(data);
      row_bytes.push_back(bytes);
      forms_.push_back({.dtype = attribute(column.ptr(), dtype_),
                        .shown = view.dtype,
                        .shape = std::move(shape),
                        .row_bytes = bytes,
                        .first = data,
                        .last = data + bytes * num_rows});
    }
    return Columns(std::move(bases), std::move(row_bytes), num_rows);
  }

  // The leaf of a column; null if Python code has removed it from the list during the call.
  static PyObject* leaf_at(const nb::list& leaves, std::size_t i) {
    return i < leaves.size() ? PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(i)) : nullptr;
  }

  // Compares torch's dtype objects, because DLPack reports some dtypes as others. Python code may run and drop the leaf
  // from its list, so the call holds a reference.
  bool is_plain(const Form& form, PyObject* leaf) const {
    const nb::object held = nb::borrow(leaf);
    if (!exchange_.takes(leaf) || attribute(leaf, dtype_).ptr() != form.dtype.ptr()) return false;
    return !dlpack::is_float(form.shown) || exchange_.is_plain(leaf);
  }

  static bool is_like(const Form& form, const Tensor& view, const std::vector<std::int64_t>& lead) {
    const std::int64_t* const behind = view.shape + lead.size();
    return static_cast<std::size_t>(view.ndim) == lead.size() + form.shape.size() && dlpack::is_readable(view) &&
           std::equal(lead.begin(), lead.end(), view.shape) && std::equal(form.shape.begin(), form.shape.end(), behind);
  }

  static bool has_rows(const Form& form, const Tensor& view, std::int64_t n) {
    if (view.dtype != form.shown || !dlpack::is_readable(view)) return false;
    std::int64_t bytes = dlpack::item_bytes(view.dtype);
    for (std::int32_t dim = 0; dim < view.ndim; ++dim) bytes *= view.shape[dim];
    return bytes == form.row_bytes * n;
  }

  bool stands_in_column(const std::byte* data) const {
    return std::any_of(forms_.begin(), forms_.end(),
                       [data](const Form& form) { return form.first <= data && data < form.last; });
  }

  Exchange exchange_;
  nb::list kept_;  // keeps the columns alive, since `forms_` holds addresses
  nb::object dtype_;
  std::vector<Form> forms_;
  std::vector<Pair> twins_;
  std::vector<std::size_t> flags_;
  Columns columns_;
};

}  // namespace

void bind_tensor_columns(nb::module_& m) {
  nb::class_<TensorColumns>(m, "TensorColumns", "Columns [rows, *leaf] that are written from tensors.")
      .def(nb::init<nb::object, nb::object, nb::list>(), "exchange"_a, "tensor_class"_a, "columns"_a)
      .def("fits", &TensorColumns::fits, "leaves"_a, "lead"_a,
           "Whether all are plain tensors [*lead, *leaf] of the columns' dtypes, in one piece on the CPU.")
      .def("write", &TensorColumns::write, "start"_a, "n"_a, "leaves"_a,
           "Write n rows to start, start + 1, ..., around the end. Return False and write nothing if a leaf isn't n "
           "contiguous rows, or its memory is part of a column. Leaves must not be negated lazily.")
      .def("watch", &TensorColumns::watch, "outcomes"_a, "roots"_a, "flags"_a,
           "Set the columns that `seams` reads: outcomes, the roots that repeat them one step later, and flags.")
      .def("seams", &TensorColumns::seams, "newest"_a, "steps"_a, "streams"_a, "leaves"_a,
           "Return a byte for each stream, 1 if leaves don't continue the step in row `newest` and the following rows. "
           "None if all continue, or it isn't known.");
}

}  // namespace gleanrl
