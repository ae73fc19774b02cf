#pragma once
/// PromisedNumbers: initial values that have not been drawn yet. Each is a pure function of its position, so that a
/// process can draw only the part that it keeps.

#include <sys/mman.h>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/tensor/paged_memory.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// Tensors with addresses but without values. While one is current in a thread, nn::init returns such tensors, and
/// moving a parameter moves its promise.
class PromisedNumbers {
 public:
  /// Draws elements [first, first + count) into `out`.
  template <class T>
  using Draw = std::function<void(T* out, Index first, Index count)>;

  static PromisedNumbers*& current();

  /// A tensor whose values `draw` will compute. Small tensors are drawn at once.
  template <class T, int Rank>
  Tensor<T, Rank, Cpu> promise(const Shape<Rank>& shape, Draw<T> draw) {
    const auto count = numel(shape);
    const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (bytes < PagedMemory::page()) {
      auto out = Tensor<T, Rank, Cpu>::empty(shape);
      draw(out.data(), 0, count);
      return out;
    }
    auto storage = add(bytes, static_cast<std::size_t>(count),
                       [draw = std::move(draw)](void* out, std::size_t first, std::size_t n) {
                         draw(static_cast<T*>(out), static_cast<Index>(first), static_cast<Index>(n));
                       });
    auto* const data = static_cast<T*>(storage.data());
    return {std::move(storage), data, shape, row_major(shape)};
  }

  /// If values at `from` are promised, they are now promised at `to`.
  bool move(const void* from, void* to);
  /// The promised values at `from` are no longer needed here.
  void forget(const void* from);
  /// Promises a part instead: `draw_part(draw, out, first, count)` draws elements [first, first + count) of it with the
  /// whole's draw. Returns the part's memory; none if nothing is promised at `from`.
  using DrawAny = std::function<void(void* out, std::size_t first, std::size_t count)>;
  template <class DrawPart>
  std::optional<Storage<Cpu>> replace(const void* from, std::size_t bytes, std::size_t count, DrawPart draw_part) {
    Promise* const promise = find(from);
    if (promise == nullptr) return std::nullopt;
    auto draw = [whole = std::move(promise->draw), part = std::move(draw_part)](
                    void* out, std::size_t first, std::size_t n) { part(whole, out, first, n); };
    forget(from);
    return add(bytes, count, std::move(draw));
  }
  /// Draws elements [first, first + count) of the values promised at `at` into `out`. Returns false if none are
  /// promised.
  bool draw(const void* at, void* out, std::size_t first, std::size_t count);
  bool promised(const void* at) { return find(at) != nullptr; }

  /// Draws all values that are still promised, in place.
  void keep_the_rest();

  /// Throws UsageError if the program wrote or read the values at `at` while they were promised: the change would be
  /// lost. `name` is their owner.
  void check_untouched(const void* at, const std::string& name);
  /// The same for all promised values.
  void check_untouched() const;

 private:
  struct Promise {
    const void* at;
    std::size_t bytes, count;
    DrawAny draw;
    std::shared_ptr<PagedMemory> memory;  // until they move: the tensor may be gone
  };
  Promise* find(const void* at);
  Storage<Cpu> add(std::size_t bytes, std::size_t count, DrawAny draw);
  static void check_untouched(const Promise& promise, const std::string& name);

  std::vector<Promise> promises_;
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/tensor/promised_numbers_impl.hpp>
#endif
