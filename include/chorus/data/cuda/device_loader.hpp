#pragma once
/// DeviceLoader: copies a loader's batches to a GPU, each while the GPU works on the previous one.

#include <algorithm>
#include <array>
#include <chorus/core/cuda/stream.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/prefetch.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus::data {

namespace detail {

inline auto tensors_of(const Batch& batch) { return std::tuple(batch.images, batch.labels); }
template <class... Tensors>
const std::tuple<Tensors...>& tensors_of(const std::tuple<Tensors...>& batch) {
  static_assert((AnyTensor<Tensors> && ...), "DeviceLoader: a batch is a tuple of tensors, or of images and labels");
  return batch;
}

template <class Tensors>
struct OnGpu;
template <class... T, int... Rank>
struct OnGpu<std::tuple<Tensor<T, Rank, Cpu>...>> {
  using type = std::tuple<Tensor<T, Rank, Cuda>...>;
};

/// One pass: a thread fills pinned memory, and a stream of copies transfers it to the batch's tensors. Both are
/// double-buffered.
template <class Loader>
class DevicePass {
  using Numbers = std::remove_cvref_t<decltype(tensors_of(*std::declval<Loader&>().begin()))>;

 public:
  using Tensors = typename OnGpu<Numbers>::type;

  DevicePass(Loader& loader, Cuda device)
      : device_(device), compute_(cuda::current_stream(device)), copies_(device), slots_{Slot(device), Slot(device)},
        batches_(loader.begin()) {
    batches_.reads_ahead();
    running_.emplace(0, loader.size() + 1, 1, 1, [this](Index i) { return send(i); });
    advance();
  }
  DevicePass(const DevicePass&) = delete;
  DevicePass& operator=(const DevicePass&) = delete;
  ~DevicePass() {
    running_.reset();
    try {
      cuda::synchronize(copies_);  // a copy may be running, although nobody has read the batch yet
    } catch (const Error&) {
      // The device failed, so nothing will be read.
    }
  }

  std::optional<Tensors>& current() { return current_; }
  /// The loop has reached a second batch.
  void goes_on() { batches_.goes_on(); }

  /// Moves to the next batch. The thread's current stream waits for its arrival.
  void advance() {
    if (current_) {
      slots_[turn_].read.record(cuda::current_stream(device_));
      current_.reset();
      turn_ = 1 - turn_;
    }
    if (running_) current_ = std::move(running_->next()).value_or(std::nullopt);
    if (current_)
      slots_[turn_].copied.hold(cuda::current_stream(device_));
    else
      running_.reset();
  }

 private:
  struct Slot {
    explicit Slot(Cuda device) : copied(device), read(device) {}
    Tensors tensors;
    std::size_t bytes = 0;
    cuda::Owned<void*, cudaFreeHost> pinned;
    cuda::Event copied;  // the pinned memory may be reused, and the tensors may be read
    cuda::Event read;    // the tensors may be overwritten
  };

  // Runs on the pass's thread.
  std::optional<Tensors> send(Index i) {
    if (i > 0) ++batches_;
    if (batches_ == std::default_sentinel_t{}) return std::nullopt;
    Slot& slot = slots_[static_cast<std::size_t>(i % 2)];
    const cuda::DeviceGuard guard(device_);
    const cuda::StreamScope stream(device_, compute_);
    const Numbers& numbers = tensors_of(*batches_);
    cuda::wait_until([&] { return slot.copied.done(); }, "a batch's copy");
    std::size_t bytes = 0;
    std::apply([&](const auto&... x) { ((bytes += padded(x.bytes())), ...); }, numbers);
    if (bytes > slot.bytes) {
      slot.pinned = cuda::pinned_memory(bytes);
      slot.bytes = bytes;
    }
    slot.read.hold(copies_);
    auto* from = static_cast<std::byte*>(slot.pinned.get());
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      (copy(std::get<K>(numbers), std::get<K>(slot.tensors), from), ...);
    }(std::make_index_sequence<std::tuple_size_v<Tensors>>());
    slot.copied.record(copies_);
    return slot.tensors;
  }

  static std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  template <class T, int Rank>
  void copy(const Tensor<T, Rank, Cpu>& x, Tensor<T, Rank, Cuda>& to, std::byte*& from) {
    // Tensors that the program still holds are not overwritten.
    if (!to.defined() || to.shape() != x.shape() || to.storage().owners() > 1) {
      to = Tensor<T, Rank, Cuda>::empty(x.shape(), device_);
      cuda::order(device_, compute_, copies_);  // the memory's last use may not be finished
    }
    if (x.numel() == 0) return;
    std::memcpy(from, contiguous(x).data(), x.bytes());
    CHORUS_CUDA_CHECK(cudaMemcpyAsync(to.data(), from, x.bytes(), cudaMemcpyHostToDevice, copies_));
    from += padded(x.bytes());
  }

  Cuda device_;
  cudaStream_t compute_;
  cuda::Stream copies_;
  std::array<Slot, 2> slots_;
  std::size_t turn_ = 0;
  typename Loader::Iterator batches_;
  std::optional<Tensors> current_;
  std::optional<Prefetch<std::optional<Tensors>>> running_;  // last: its thread uses the members above
};

}  // namespace detail

/// The batches of `loader`, a DataLoader that must outlive it, on `device`, as tuples of tensors (images and labels for
/// images). `for (auto& [x, y] : DeviceLoader(loader, Cuda{}))` is an epoch. A separate stream copies a batch from
/// pinned memory while the GPU works on the previous batch; only the loop's stream waits for it, on the GPU. Tensors
/// that the loop keeps are not overwritten. The loader's exceptions are rethrown at their batch. One pass at a time.
template <class Loader>
class DeviceLoader {
  using Pass = detail::DevicePass<Loader>;

 public:
  DeviceLoader(Loader& loader, Cuda device) : loader_(&loader), device_(device) {}

  class Iterator {
   public:
    using value_type = typename Pass::Tensors;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(std::shared_ptr<Pass> pass) : pass_(std::move(pass)) {}
    /// Throws UsageError at the end.
    value_type& operator*() const {
      check<UsageError>(pass_->current().has_value(), "DeviceLoader: no batch at the end of a pass");
      return *pass_->current();
    }
    Iterator& operator++() {
      pass_->goes_on();
      pass_->advance();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !pass_->current().has_value(); }

   private:
    std::shared_ptr<Pass> pass_;
  };

  /// Starts a pass of the loader.
  Iterator begin() { return Iterator(std::make_shared<Pass>(*loader_, device_)); }
  std::default_sentinel_t end() const { return {}; }
  Index size() const { return loader_->size(); }

 private:
  Loader* loader_;
  Cuda device_;
};

}  // namespace chorus::data
