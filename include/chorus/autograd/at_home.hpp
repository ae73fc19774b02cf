#pragma once
/// The common base of parameters and buffers: owned values that policies move into flat buffers and to other devices.

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

/// A contiguous tensor of the same values in storage that policies can move.
template <class T, int Rank, class D>
Tensor<T, Rank, D> at_home(const Tensor<T, Rank, D>& numbers) {
  if (!numbers.defined()) return numbers;
  const auto dense = contiguous(numbers);
  return {Storage<D>::home_in(dense.storage(), dense.data(), dense.bytes()), dense.data(), dense.shape(),
          row_major(dense.shape())};
}

/// The type-independent part of a parameter or buffer: its storage, and the part of a sharded whole that this process
/// holds.
template <Device D>
class AtHome {
 public:
  virtual ~AtHome() = default;
  virtual DType dtype() const = 0;
  /// The shape of the whole, even if only a part of it, or nothing, is here.
  virtual std::span<const Index> extents() const = 0;
  /// The shape of the local part: a slice of the sharded axis, or a flat range of elements.
  virtual std::span<const Index> extents_here() const { return extents(); }
  virtual D where() const = 0;
  /// A pointer for library code, which calls `touch` after writing. Throws UsageError if the values are not here, as
  /// under a policy that shards them.
  void* memory() const {
    if (!is_here() || !storage().present()) [[unlikely]]
      check_readable();
    return place();
  }
  /// The same without the check.
  virtual void* place() const = 0;
  virtual const Storage<D>& storage() const = 0;
  /// A pointer for user code. After the first call, writes through it on the CPU are detected by comparing the values.
  /// On a GPU each call counts as one write.
  void* watched_memory() const {
    if constexpr (std::is_same_v<D, Cpu>) {
      if (is_here()) storage().watch();
    } else if (auto* const writes = storage().writes()) {
      writes->add();
    }
    return memory();
  }
  /// Grows with each write, so that copies can tell that they are stale.
  std::uint64_t version() const { return storage().version(); }
  /// Library code calls it after writing into the memory.
  void touch() const {
    if (auto* const writes = storage().writes()) writes->add();
  }
  /// The same for writes that the program asks for: `assign`, or reading a file.
  void touch_by_hand() const {
    if (auto* const writes = storage().writes()) writes->add_by_hand();
  }
  /// The path in the model, for messages. Keeps the longest known one.
  void set_name(std::string_view name) const {
    if (auto* const writes = storage().writes(); writes != nullptr && name.size() > writes->name.size())
      writes->name = name;
  }

  /// Whether this process owns the values.
  bool is_here() const {
    const auto* const writes = storage().writes();
    return writes == nullptr || writes->elsewhere.empty();
  }
  /// Throws UsageError if another process owns them.
  void check_here() const {
    if (const auto* const writes = storage().writes()) writes->check_here();
  }
  /// Number of elements at `place()`; for a part fewer than `extents()` has.
  Index count() const { return numel(extents_here()); }
  /// Whether this is a flat range of a parameter. Other processes hold the rest, or all of it.
  virtual bool is_part() const { return false; }
  /// Where the range begins in the parameter, in elements.
  virtual Index part_begin() const { return 0; }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }

 protected:
  /// Moves the values to `to`, inside of `whole`.
  void move_numbers(const Storage<D>& whole, void* to) const {
    const Storage<D>& home = storage();
    if (!promised(to)) copy_bytes(whole.device(), to, where(), memory(), size_bytes());
    home.move_home(whole, to);
    if (home.owners() == 1) home.writes()->end_watch();  // pointers to the old place are invalid now
  }
  // Whether the values have not been drawn yet. They will be drawn at `to`.
  bool promised([[maybe_unused]] void* to) const {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const promises = PromisedNumbers::current())
        return promises->move(place(), to);
    return false;
  }
  // A process's own part is always readable.
  [[gnu::noinline, gnu::cold]] void check_readable() const {
    if (is_part()) return;
    check_here();
    const auto* const writes = storage().writes();
    fail<UsageError>("parameter '", writes == nullptr ? "" : writes->name,
                     "': it is sharded, and this rank holds one part: read it within the net's forward pass, or while "
                     "net.gathered() lives, which all ranks call");
  }
  /// Moves the values to new memory on another device.
  void move_numbers(D device) const {
    const MemoryScope scope(trace::Memory::parameters);
    const Storage<D> near(device, size_bytes());
    move_numbers(near, near.data());
  }
};

}  // namespace detail

}  // namespace chorus
