#pragma once
/// Float copies of bf16 and half numbers that are made when somebody reads them: a loss or a gradient that can take the
/// numbers as they are never does.

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

/// Where the float numbers of one tensor come from. Several threads may ask.
template <Narrow T, int Rank, Device D>
class WideLater final : public Residence {
 public:
  /// `home` is what the float tensor's handles count, and what owns this object.
  WideLater(Tensor<T, Rank, D> narrow, Block<D>& home)
      : narrow_(std::move(narrow)), version_(narrow_.storage().version()), home_(home) {}

  /// Throws UsageError where the narrow numbers have been written since.
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
  /// The narrow numbers; undefined once there are float ones, which may be others by now.
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

/// While one lives, it knows which float copies this thread has promised; for who will not be asked for them in time,
/// as a captured step.
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
  /// Makes the copies that somebody still has a handle to.
  void keep() {
    for (const auto& known : promises_)
      if (const auto promise = known.lock()) promise->touch(0);
    promises_.clear();
  }

 private:
  WidePromises* before_;
  std::vector<std::weak_ptr<Residence>> promises_;
};

/// Dense numbers in float, to be made of `narrow` when somebody reads them.
template <Narrow T, int Rank, Device D>
Tensor<float, Rank, D> wide_later(const Tensor<T, Rank, D>& narrow) {
  auto storage = Storage<D>::home_in({}, nullptr, static_cast<std::size_t>(narrow.numel()) * sizeof(float));
  storage.block()->device = narrow.device();
  const auto promise = std::make_shared<WideLater<T, Rank, D>>(narrow, *storage.block());
  storage.set_residence(promise, 0);
  if (auto* const known = WidePromises::current()) known->add(promise);
  return {std::move(storage), nullptr, narrow.shape(), row_major(narrow.shape())};
}

/// What a tensor of `wide_later` is to be made of; undefined for other tensors, and where it has been made.
template <Narrow T, int Rank, Device D>
Tensor<T, Rank, D> narrow_of(const Tensor<float, Rank, D>& wide) {
  const auto* const block = wide.storage().block();
  if (block == nullptr || !block->home || !block->home->residence) return {};
  auto* const promise = dynamic_cast<WideLater<T, Rank, D>*>(block->home->residence.get());
  return promise == nullptr ? Tensor<T, Rank, D>{} : promise->narrow();
}

}  // namespace chorus::detail
