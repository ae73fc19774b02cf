#pragma once
/// Lazy float copies of bf16 and half numbers, made at the first read. Losses and gradients that accept 2 bytes never
/// make them.

#include <atomic>
#include <chorus/core/error.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/residence.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::detail {

/// The source of a lazy float tensor. Several threads may read it.
template <Narrow T, int Rank, Device D>
class WideLater final : public Residence {
 public:
  /// `home`, the block that the float tensor's handles count, owns this object.
  WideLater(Tensor<T, Rank, D> narrow, Block<D>& home)
      : narrow_(std::move(narrow)), version_(narrow_.storage().version()), home_(home) {}

  /// Throws UsageError if the narrow numbers were written since.
  void touch(std::size_t) override {
    if (present(0)) return;
    const std::lock_guard lock(mutex_);
    if (present(0)) return;
    check<UsageError>(narrow_.storage().version() == version_, "to: a float copy of ", dtype<T>, " of shape ",
                      narrow_.shape(), " is read after the numbers were written in place: read it before the write");
    const Storage<D> wide(narrow_.device(), static_cast<std::size_t>(narrow_.numel()) * sizeof(float));
    kernels::convert(narrow_.device(), narrow_.numel(), narrow_.data(), static_cast<float*>(wide.data()));
    Storage<D>::move_home(home_, wide, wide.data());
    narrow_ = {};
    present_.store(true, std::memory_order_release);
  }
  bool present(std::size_t) const override { return present_.load(std::memory_order_acquire); }
  /// The narrow numbers; undefined once the float copy exists, since that may have been changed.
  Tensor<T, Rank, D> narrow() {
    const std::lock_guard lock(mutex_);
    return narrow_;
  }

 private:
  Tensor<T, Rank, D> narrow_;
  std::uint64_t version_;
  Block<D>& home_;
  std::atomic<bool> present_{false};
  std::mutex mutex_;
};

/// Collects the lazy float copies of this thread while it lives. A captured step needs it, since nobody reads them in
/// time.
class WidePromises {
 public:
  WidePromises() : before_(std::exchange(current(), this)) {}
  ~WidePromises() { current() = before_; }
  WidePromises(const WidePromises&) = delete;
  WidePromises& operator=(const WidePromises&) = delete;

  static WidePromises*& current() {
    thread_local WidePromises* promises = nullptr;
    return promises;
  }
  void add(const std::shared_ptr<Residence>& promise) {
    std::erase_if(promises_, [](const auto& known) { return known.expired(); });
    promises_.push_back(promise);
  }
  /// Makes the copies that are still referenced.
  void keep() {
    for (const auto& known : promises_)
      if (const auto promise = known.lock()) promise->touch(0);
    promises_.clear();
  }

 private:
  WidePromises* before_;
  std::vector<std::weak_ptr<Residence>> promises_;
};

/// A contiguous float tensor that is made from `narrow` at the first read.
template <Narrow T, int Rank, Device D>
Tensor<float, Rank, D> wide_later(const Tensor<T, Rank, D>& narrow) {
  auto storage = Storage<D>::home_in({}, nullptr, static_cast<std::size_t>(narrow.numel()) * sizeof(float));
  storage.block()->device = narrow.device();
  const auto promise = std::make_shared<WideLater<T, Rank, D>>(narrow, *storage.block());
  storage.set_residence(promise, 0);
  if (auto* const known = WidePromises::current()) known->add(promise);
  return {std::move(storage), nullptr, narrow.shape(), row_major(narrow.shape())};
}

/// The source of a `wide_later` tensor; undefined for other tensors and after the copy was made.
template <Narrow T, int Rank, Device D>
Tensor<T, Rank, D> narrow_of(const Tensor<float, Rank, D>& wide) {
  const auto* const block = wide.storage().block();
  if (block == nullptr || !block->home || !block->home->residence) return {};
  auto* const promise = dynamic_cast<WideLater<T, Rank, D>*>(block->home->residence.get());
  return promise == nullptr ? Tensor<T, Rank, D>{} : promise->narrow();
}

}  // namespace chorus::detail
