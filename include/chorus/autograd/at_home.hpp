#pragma once
/// What parameters and buffers have in common: a home for their numbers, which policies move, into flat buffers and to
/// other devices.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/split.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace chorus {

namespace detail {

/// The same numbers, dense, with a home of their own.
template <class T, int Rank, class D>
Tensor<T, Rank, D> at_home(const Tensor<T, Rank, D>& numbers) {
  if (!numbers.defined()) return numbers;
  const auto dense = contiguous(numbers);
  return {Storage<D>::home_in(dense.storage(), dense.data(), dense.bytes()), dense.data(), dense.shape(),
          row_major(dense.shape())};
}

/// What a parameter or a buffer has that does not depend on its type: a home, whose numbers are written and moved; and
/// what whole it is a part of, where this process has a part of it.
template <Device D>
class AtHome {
 public:
  virtual ~AtHome() = default;
  virtual DType dtype() const = 0;
  /// The whole one's, also where a part of it, or nothing, is here.
  virtual std::span<const Index> extents() const = 0;
  /// The shape of what is here: some entries of the axis that ranks share out, or a run of numbers.
  virtual std::span<const Index> extents_here() const { return extents(); }
  virtual D where() const = 0;
  /// Where the numbers are, for library code: to read, or to write and then call `touch`. Throws UsageError where they
  /// are not there, under a policy that keeps a part of them on each rank.
  void* memory() const {
    if (!is_here() || !storage().present()) [[unlikely]]
      check_readable();
    return place();
  }
  /// The same, whether they are there or not.
  virtual void* place() const = 0;
  /// The home.
  virtual const Storage<D>& storage() const = 0;
  /// Where the numbers are, for anybody: from the first call on, what is written through it on the CPU is found by
  /// comparing the numbers with what they were. On a GPU each call counts as one write.
  void* watched_memory() const {
    if constexpr (std::is_same_v<D, Cpu>) {
      if (is_here()) storage().watch();
    } else if (auto* const writes = storage().writes()) {
      writes->add();
    }
    return memory();
  }
  /// Grows whenever the numbers change, so that copies know that they are old.
  std::uint64_t version() const { return storage().version(); }
  /// To be called by library code that writes into the memory.
  void touch() const {
    if (auto* const writes = storage().writes()) writes->add();
  }
  /// The same where the program says what is to be written, as in `assign` and when a file is read.
  void touch_by_hand() const {
    if (auto* const writes = storage().writes()) writes->add_by_hand();
  }
  /// The path in the model, for messages; the longest one known.
  void set_name(std::string_view name) const {
    if (auto* const writes = storage().writes(); writes != nullptr && name.size() > writes->name.size())
      writes->name = name;
  }

  /// Whether the numbers are this process's.
  bool is_here() const {
    const auto* const writes = storage().writes();
    return writes == nullptr || writes->elsewhere.empty();
  }
  /// Throws UsageError where they are another one's.
  void check_here() const {
    if (const auto* const writes = storage().writes()) writes->check_here();
  }
  /// How many numbers there are at `place()`: where this is a part, fewer than a tensor of `extents()` has.
  Index count() const { return numel(extents_here()); }
  /// Whether it is a run of a parameter's numbers, of which other processes have the rest, or all.
  virtual bool is_part() const { return false; }
  /// Where the run begins among the numbers of the parameter, in elements.
  virtual Index part_begin() const { return 0; }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }

 protected:
  /// Moves the numbers to `to`, within `whole`.
  void move_numbers(const Storage<D>& whole, void* to) const {
    const Storage<D>& home = storage();
    if (!promised(to)) copy_bytes(whole.device(), to, where(), memory(), size_bytes());
    home.move_home(whole, to);
    if (home.owners() == 1) home.writes()->end_watch();  // pointers to where they were are no good any more
  }
  // Whether the numbers are yet to be drawn: then they will be at `to`.
  bool promised([[maybe_unused]] void* to) const {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const promises = PromisedNumbers::current())
        return promises->move(place(), to);
    return false;
  }
  // What a process has of a part it has at all times.
  [[gnu::noinline, gnu::cold]] void check_readable() const {
    if (is_part()) return;
    check_here();
    const auto* const writes = storage().writes();
    fail<UsageError>("parameter '", writes == nullptr ? "" : writes->name,
                     "': it is sharded, and this rank holds one part: read it within the net's forward pass, or while "
                     "net.gathered() lives, which all ranks call");
  }
  /// Moves them to memory of their own on another device.
  void move_numbers(D device) const {
    const MemoryScope scope(trace::Memory::parameters);
    const Storage<D> near(device, size_bytes());
    move_numbers(near, near.data());
  }
};

}  // namespace detail

}  // namespace chorus
