// Rows of a ring in which an outcome that the following step's root repeats is stored once.
//
// A leaf is an outcome, its root, or any other entry. Each leaf but the outcomes has a column. The columns of roots have
// three parts: the slots of the ring, one row of zeros, and spare rows. places[slot] is the row of the slot's outcomes in
// the columns of their roots: the slot of the following step, or a spare row. In a slot that was never written it is the
// row of zeros. One number serves all outcomes of a slot: if any of them differs from its root, all of them are stored
// in the spare row.
//
// Rule.      Rows are equal if all their bits are. The outcomes of the last step of a write are stored in spare rows,
//   until a later write proves that its first step repeats them. So each row can be read without knowing which slot is
//   the newest.
// Lifetime.  The caller keeps the memory at every address alive and in place.
// Threads.   One thread writes. Others may read places and columns at the same time, and find rows of the write, and
//   outcomes of the step before it, torn: the caller tells them which rows these are. At each moment, all other rows can
//   be read, and also after a fork at that moment.
// Repeats.   A write may be repeated at once, with the same arguments; the second one changes nothing.
// Overlap.   Sources overlap no column: see overlaps.
// Room.      reach(n) is the row after the last spare row that a write of n rows may use. There must be memory up to
//   there. No write needs more than 1 + num_slots + streams rows behind the ring.
// Failure.   Every argument is checked before the first byte is written: std::out_of_range for a row outside its range,
//   std::invalid_argument for all other errors.
// Cost.      write: the copies of Columns::write without the outcomes, and a comparison of each outcome with the root
//   behind it, which ends at the first difference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gleanrl {

class SharedRows {
 public:
  // The positions of an outcome and of its root among the leaves.
  struct Pair {
    std::size_t outcome, root;
  };
  using Sources = std::span<const std::byte* const>;

  // bases[i] and row_bytes[i] describe the column of leaf i; the bases of outcomes are ignored. `places` has num_slots
  // numbers, which become the ones of an empty ring.
  SharedRows(std::vector<std::byte*> bases, std::vector<std::int64_t> row_bytes, std::vector<Pair> pairs,
             std::int64_t num_slots, std::int64_t streams, std::uint32_t* places);

  std::int64_t num_slots() const { return size_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  // The number of slots whose outcomes are in spare rows.
  std::int64_t num_apart() const { return used_ - size_ - 1 - static_cast<std::int64_t>(free_.size()); }
  std::int64_t used() const { return used_; }
  const std::vector<std::uint32_t>& free() const { return free_; }
  std::int64_t reach(std::int64_t n) const;
  // Whether a source begins inside of a column.
  bool overlaps(Sources src) const;

  // Slot (start + i) % num_slots of each leaf j = src[j][i], for i in [0, n). n <= num_slots. With `in_place`, the
  // columns hold the rows already, where no row shared them before, and only outcomes are stored.
  void write(std::int64_t start, std::int64_t n, Sources src, bool in_place = false);
  // Slot index[i] of each leaf j = src[j][i], for i in [0, n), in that order.
  void put(std::span<const std::int64_t> index, Sources src);
  // out[i] = places[index[i]].
  void find(std::span<const std::int64_t> index, std::int64_t* out) const;
  // Removes all rows.
  void forget();

  // Sets the twins and flags of `seams`, by their leaves.
  void watch(std::vector<Pair> twins, std::vector<std::size_t> flags);
  // Like find_seams, for a newest step that begins at slot `newest`: begins[s] = 1 for each stream s with a seam.
  bool seams(std::int64_t newest, std::int64_t steps, Sources src, std::uint8_t* begins) const;

 private:
  std::byte* row(std::size_t leaf, std::int64_t number) const { return bases_[leaf] + number * bytes_[leaf]; }
  void check(std::int64_t n, Sources src) const;
  void make_room(std::int64_t n);
  std::int64_t spare();
  // Whether the outcomes at `place` equal row i of the written roots.
  bool continues(std::int64_t place, Sources src, std::int64_t i) const;
  // Prepares a slot for an overwrite of the following one by row i. Returns whether its outcomes get a new place there.
  bool leave(std::int64_t slot, Sources src, std::int64_t i);
  void share(std::int64_t slot);
  // Stores the outcomes of written row i of a slot in its spare row, or in a new one.
  void keep_apart(std::int64_t slot, Sources src, std::int64_t i);
  std::int64_t following(std::int64_t slot) const { return (slot + streams_) % size_; }

  std::vector<std::byte*> bases_;
  std::vector<std::int64_t> bytes_;
  std::vector<Pair> pairs_, twins_;
  std::vector<std::size_t> stored_, flags_;
  std::int64_t size_, streams_, row_bytes_ = 0;
  std::vector<const std::byte*> ends_;  // of the columns
  const std::byte *low_ = nullptr, *high_ = nullptr;
  std::uint32_t* places_;
  std::vector<std::uint32_t> free_;
  std::int64_t used_;
};

}  // namespace gleanrl
