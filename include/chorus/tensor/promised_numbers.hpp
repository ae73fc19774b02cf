#pragma once
/// PromisedNumbers: initial numbers that are not drawn yet. Each is a pure function of its place, so that a part of
/// them can be drawn alone, by whoever keeps it.

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

/// Tensors that have addresses, and no numbers behind them. While one is current in a thread, the functions of nn::init
/// give such tensors, and parameters that move take the promise along.
class PromisedNumbers {
 public:
  /// Draws elements [first, first + count) into `out`.
  template <class T>
  using Draw = std::function<void(T* out, Index first, Index count)>;

  static PromisedNumbers*& current();

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
    auto storage = add(bytes, static_cast<std::size_t>(count),
                       [draw = std::move(draw)](void* out, std::size_t first, std::size_t n) {
                         draw(static_cast<T*>(out), static_cast<Index>(first), static_cast<Index>(n));
                       });
    auto* const data = static_cast<T*>(storage.data());
    return {std::move(storage), data, shape, row_major(shape)};
  }

  /// Whether numbers at `from` are promised; then they are so at `to` from now on.
  bool move(const void* from, void* to);
  /// Numbers that are promised at `from` are needed here no more.
  void forget(const void* from);
  /// The same for a part of them: `draw_part(draw, out, first, count)` draws elements [first, first + count) of it, by
  /// the draw of the whole. Gives the part's memory; none where nothing is promised at `from`.
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
  /// Draws elements [first, first + count) of the numbers that are promised at `at`, into `out`; false where none are.
  bool draw(const void* at, void* out, std::size_t first, std::size_t count);
  bool promised(const void* at) { return find(at) != nullptr; }

  /// Draws what is promised yet, where it is.
  void keep_the_rest();

  /// Throws UsageError where somebody has written or read the numbers at `at`, if they are promised: what he has made
  /// of them would be lost. `name` says whose they are.
  void check_untouched(const void* at, const std::string& name);
  /// The same for all.
  void check_untouched() const;

 private:
  struct Promise {
    const void* at;
    std::size_t bytes, count;
    DrawAny draw;
    std::shared_ptr<PagedMemory> memory;  // until they move: the tensor itself may be gone
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
