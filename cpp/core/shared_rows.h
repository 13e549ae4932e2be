// Rows of a ring in which an outcome that the following step's root repeats is stored once, and so is each frame of a
// stack.
//
// A leaf is an outcome, its root, or any other entry. Each leaf but the outcomes has a column. The columns of roots have
// three parts: the slots of the ring, one row of zeros, and spare rows. places[slot] is the row of the slot's outcomes in
// the columns of their roots: the slot of the following step, or a spare row. In a slot that was never written it is the
// row of zeros. One number serves all outcomes of a slot: if any of them differs from its root, all of them are stored
// in the spare row.
//
// A root may be a stack of frames, the newest one last. A slot then holds only the newest frame, and heads[slot] tells
// where the others are: in the slots of the steps before, or the whole stack is in a spare row. One number serves all
// stacks of a slot. Spare rows hold the frames one after the other, also if they alternate piece by piece in a row, as
// in stacks along the last dimension of an image.
//
// Rule.      Rows are equal if all their bits are. The outcomes of the last step of a write are stored in spare rows,
//   until a later write proves that its first step repeats them. So each row can be read without knowing which slot is
//   the newest. Before a frame changes, the later stacks that need it move to spare rows.
// Lifetime.  The caller keeps the memory at every address alive and in place.
// Threads.   One thread writes. Others may gather at the same time, and find rows of the write, outcomes of the step
//   before it, and stacks of the steps behind it, torn: the caller tells them which rows these are. At each moment, all
//   other rows can be read, and also after a fork at that moment.
// Repeats.   A write may be repeated at once, with the same arguments; the second one changes nothing.
// Overlap.   Sources overlap no column: see overlaps.
// Room.      reach(n) is the row after the last spare row that a write of n rows may use. There must be memory up to
//   there. No write needs rows from `limit` on.
// Failure.   Every argument is checked before the first byte is written: std::out_of_range for a row outside its range,
//   std::invalid_argument for all other errors.
// Cost.      write: the copies of Columns::write without the outcomes and the older frames, and a comparison of each of
//   these with the rows that repeat it, which ends at the first difference. gather: as Columns::gather.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "columns.h"

namespace gleanrl {

class SharedRows {
 public:
  // The positions of an outcome and of its root among the leaves.
  struct Pair {
    std::size_t outcome, root;
  };
  // The number of frames of a root, and of the pieces of each frame in a row. 1 frame: not a stack.
  struct Stack {
    std::int64_t frames, pieces;
  };
  using Sources = std::span<const std::byte* const>;

  // bases[i] and row_bytes[i] describe the column of leaf i, and stacks[i] its frames; the entries of outcomes are
  // ignored. `places` and, if there are stacks, `heads` have num_slots numbers, which become the ones of an empty ring.
  SharedRows(std::vector<std::byte*> bases, std::vector<std::int64_t> row_bytes, std::vector<Pair> pairs,
             std::vector<Stack> stacks, std::int64_t num_slots, std::int64_t streams, std::uint32_t* places,
             std::uint32_t* heads);

  // The row after the last spare row that may ever be used.
  static std::int64_t limit(std::int64_t num_slots, std::int64_t streams, bool stacks) {
    return (stacks ? 3 : 2) * num_slots + 1 + streams;
  }

  std::int64_t num_slots() const { return size_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  // The number of spare rows in use.
  std::int64_t num_apart() const { return used_ - size_ - 1 - static_cast<std::int64_t>(free_.size()); }
  std::int64_t used() const { return used_; }
  const std::vector<std::uint32_t>& free() const { return free_; }
  // See Room. `by_slot`: for `put`.
  std::int64_t reach(std::int64_t n, bool by_slot) const;
  // The same after a look at the rows: most of them usually need no spare row.
  std::int64_t reach_of(std::int64_t start, std::int64_t n, Sources src) const;
  // Whether a source begins inside of a column.
  bool overlaps(Sources src) const;

  // Slot (start + i) % num_slots of each leaf j = src[j][i], for i in [0, n). n <= num_slots. With `in_place`, the
  // columns that aren't stacks hold the rows already, where no row shared them before.
  void write(std::int64_t start, std::int64_t n, Sources src, bool in_place = false);
  // Slot index[i] of each leaf j = src[j][i], for i in [0, n), in that order.
  void put(std::span<const std::int64_t> index, Sources src);
  // out[p][i] = row index[i] of leaf leaves[p].
  void gather(std::span<const std::int64_t> index, std::span<std::byte* const> out,
              std::span<const std::int64_t> leaves) const;
  // All leaves in order.
  std::span<const std::int64_t> all_leaves() const { return all_leaves_; }
  // Removes all rows.
  void forget();
  // Finds the free spare rows anew; for a process that was forked during a write.
  void recount();

  // Sets the twins and flags of `seams`, by their leaves.
  void watch(std::vector<Pair> twins, std::vector<std::size_t> flags);
  // Like find_seams, for a newest step that begins at slot `newest`: begins[s] = 1 for each stream s with a seam.
  bool seams(std::int64_t newest, std::int64_t steps, Sources src, std::uint8_t* begins) const;

 private:
  // A root with its outcome, and their rows.
  struct Root {
    std::byte* base;
    std::int64_t bytes, frames, pieces, frame_bytes;
    std::size_t leaf, outcome;
    // Where the newest frame begins in a row whose frames follow each other.
    std::int64_t newest() const { return bytes - frame_bytes; }
  };
  // Copies of sources.
  struct Made {
    std::vector<const std::byte*> leaves;
    std::vector<std::vector<std::byte>> rows;
  };

  std::byte* row(std::size_t leaf, std::int64_t number) const { return bases_[leaf] + number * bytes_[leaf]; }
  const Root* root_of(std::size_t leaf) const {
    const std::int64_t root = root_of_.at(leaf);
    return root < 0 ? nullptr : &roots_[static_cast<std::size_t>(root)];
  }
  std::byte* spare_row(const Root& root, std::int64_t number) const {
    return root.base + size_ * root.frame_bytes + (number - size_) * root.bytes;
  }
  // The frame `back` steps before the newest one, of a row of the ring or a spare row.
  const std::byte* frame(const Root& root, std::int64_t number, std::int64_t back) const {
    return root.base + frame_number(root, number, back) * root.frame_bytes;
  }
  std::int64_t frame_number(const Root& root, std::int64_t number, std::int64_t back) const;
  bool equals(const Root& root, std::int64_t number, const std::byte* frames) const;
  // Copies a row, with its frames one after the other.
  void copy_frames(const Root& root, std::int64_t number, std::byte* to) const;
  void copy_rows(const Root& root, std::span<const std::int64_t> rows, std::byte* to) const;
  void copy_to_spare(std::int64_t number, std::int64_t to) const;

  void check(std::int64_t n, Sources src) const;
  void check(std::int64_t start, std::int64_t n, Sources src) const;
  std::int64_t reach_by(std::int64_t needed) const;
  // Returns the sources with the frames of each row one after the other.
  Sources by_frames(Sources src, std::int64_t n, Made& made) const;
  // Allocates memory for all spare rows of a write, so that it can't fail later.
  void make_room(std::int64_t n, bool by_slot);
  std::int64_t spare();
  // Whether the outcomes at `place` equal row i of the written roots.
  bool continues(std::int64_t place, Sources src, std::int64_t i) const;
  // Prepares a slot for an overwrite of the following one by row i. Returns whether its outcomes get a new place there.
  bool leave(std::int64_t slot, Sources src, std::int64_t i);
  void share(std::int64_t slot);
  // Stores the outcomes of written row i of a slot in its spare row, or in a new one.
  void keep_apart(std::int64_t slot, Sources src, std::int64_t i);
  // Whether the following roots repeat the outcomes of written row i: the roots of the write, or with `looks_behind`
  // also stored ones.
  bool is_repeated(std::int64_t start, std::int64_t n, Sources src, std::int64_t i, bool looks_behind) const;
  // Moves stacks behind a write to spare rows, if they need a frame that changes.
  void detach(std::int64_t start, std::int64_t n, Sources src);
  // The head of written row i, if its older frames are in the slots before; 0 if they aren't.
  std::uint32_t head(std::int64_t start, std::int64_t n, Sources src, std::int64_t i) const;
  void write_stacks(std::int64_t start, std::int64_t n, Sources src);
  void write_rows(std::int64_t start, std::int64_t n, Sources src, bool in_place, bool looks_behind);
  std::int64_t following(std::int64_t slot) const { return wrapped(slot + streams_); }
  // A slot from a number in [-num_slots, 2 * num_slots), and from any number.
  std::int64_t wrapped(std::int64_t number) const {
    return number < 0 ? number + size_ : number < size_ ? number : number - size_;
  }
  std::int64_t around(std::int64_t number) const { return (number % size_ + size_) % size_; }

  std::vector<std::byte*> bases_;
  std::vector<std::int64_t> bytes_;
  std::vector<Root> roots_;
  std::vector<std::int64_t> root_of_;  // the position of each outcome's and each root's root among roots_, or -1
  std::vector<Pair> twins_;
  std::vector<std::size_t> whole_, flags_;  // leaves with a row for each slot; end flags
  std::vector<std::int64_t> all_leaves_;
  std::int64_t size_, streams_, limit_, row_bytes_ = 0, most_ = 1;     // most_: of frames
  std::vector<std::pair<const std::byte*, const std::byte*>> memory_;  // of the columns
  const std::byte *low_ = nullptr, *high_ = nullptr;
  bool alternate_ = false;  // whether pieces of some frames alternate
  std::uint32_t *places_, *heads_;
  std::vector<std::uint32_t> free_;
  std::int64_t used_;
  Columns columns_;  // of the leaves that aren't stacks, each outcome as its root
};

}  // namespace gleanrl
