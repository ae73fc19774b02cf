#pragma once
/// PromisedNumbers: initial numbers that are not drawn yet. Each is a pure function of its place, so that a part of
/// them can be drawn alone, by whoever keeps it.

#include <sys/mman.h>

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/tensor/paged_memory.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// Tensors that have addresses, and no numbers behind them. While one is current in a thread, the functions of nn::init
/// give such tensors, and parameters that move take the promise along.
class PromisedNumbers {
 public:
  /// Draws elements [first, first + count) into `out`.
  template <class T>
  using Draw = std::function<void(T* out, Index first, Index count)>;

  static PromisedNumbers*& current() {
    thread_local PromisedNumbers* promises = nullptr;
    return promises;
  }

  /// A tensor whose numbers `draw` gives; of a size that is worth it, else it draws them now.
  template <class T, int Rank>
  Tensor<T, Rank, Cpu> promise(const Shape<Rank>& shape, Draw<T> draw) {
    const auto count = numel(shape);
    const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (bytes < PagedMemory::page()) {
      auto out = Tensor<T, Rank, Cpu>::empty(shape);
      draw(out.data(), 0, count);
      return out;
    }
    auto storage = untouched_memory(bytes);
    auto* const data = static_cast<T*>(storage.data());
    promises_.push_back({data, bytes, static_cast<std::size_t>(count), true,
                         [draw = std::move(draw)](void* out, std::size_t first, std::size_t n) {
                           draw(static_cast<T*>(out), static_cast<Index>(first), static_cast<Index>(n));
                         }});
    return {std::move(storage), data, shape, row_major(shape)};
  }

  /// Whether numbers at `from` are promised; then they are so at `to` from now on. Throws UsageError where the program
  /// has written or read them meanwhile: what it made of them would be lost.
  bool move(const void* from, void* to, const std::string& name) {
    for (auto& promise : promises_) {
      if (promise.at != from) continue;
      if (std::exchange(promise.unmoved, false)) check_untouched(promise, name);
      promise.at = to;
      return true;
    }
    return false;
  }
  /// Draws what no policy has taken, where it is.
  void keep_the_rest() {
    for (const auto& promise : promises_)
      if (promise.unmoved) promise.draw(const_cast<void*>(promise.at), 0, promise.count);
  }
  /// Draws numbers that are promised at `at`, if they are, where they are.
  void draw_whole(void* at, Index count) const { draw(at, at, 0, static_cast<std::size_t>(count)); }
  /// Draws elements [first, first + count) of the numbers that are promised at `at`, into `out`; false where none are.
  bool draw(const void* at, void* out, std::size_t first, std::size_t count) const {
    for (const auto& promise : promises_)
      if (promise.at == at) {
        if (count > 0) promise.draw(out, first, count);
        return true;
      }
    return false;
  }

 private:
  struct Promise {
    const void* at;
    std::size_t bytes, count;
    bool unmoved;
    std::function<void(void* out, std::size_t first, std::size_t count)> draw;
  };
  static void check_untouched(const Promise& promise, const std::string& name) {
    std::vector<unsigned char> resident((promise.bytes + PagedMemory::page() - 1) / PagedMemory::page());
    const bool known = mincore(const_cast<void*>(promise.at), promise.bytes, resident.data()) == 0;
    const bool touched = known && std::any_of(resident.begin(), resident.end(), [](auto page) { return page & 1; });
    check<UsageError>(!touched, "deferred: the model's constructor reads or writes '", name,
                      "', whose numbers are to be drawn later, a part on each rank: make the model itself, not a "
                      "deferred one");
  }

  std::vector<Promise> promises_;
};

}  // namespace chorus
