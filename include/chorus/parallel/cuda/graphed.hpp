#pragma once
/// Graphed: a training step that is recorded once as a CUDA graph, communication and optimizer included, and from then
/// on started by one call instead of by hundreds.

#include <algorithm>
#include <array>
#include <chorus/core/cuda/fault.hpp>
#include <chorus/tensor/cuda/replay.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdint>
#include <exception>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

/// Options of Graphed.
struct GraphedOptions {
  /// Steps that run eagerly first, so that memory, plans and buckets are as they will stay.
  int warm_up = 3;
  /// How many losses are kept until `losses` reads them.
  int kept_losses = 1024;
};

/// Calls `step(inputs...)`, which does all of a training step and returns the loss, a number on the GPU; inputs that
/// are tensors of the host come to it on the GPU:
///
///   Graphed step(net, [&](const auto& images, const auto& labels) {
///     optimizer.zero_grad();
///     auto loss = cross_entropy(net(images), labels);
///     loss.backward();
///     optimizer.step();
///     return loss;
///   });
///   for (auto& [images, labels] : loader) step(images, labels);
///   double last = step.losses().back();
///
/// Steps with the shapes of the first one are replayed after the warm-up; others run eagerly. What the step reads from
/// the host at other times than in the capture does not change any more, but for the optimizers' learning rates and
/// numbers of steps and the random numbers, which go on as in eager steps. Inside, nothing may wait for the GPU or copy
/// to or from the host: those calls throw UsageError. Under DistributedDataParallel all ranks replay, or none does:
/// every call agrees on it. Where parameters, buckets or an optimizer's state have changed their places, as a
/// checkpoint that is loaded may have it, there is a warm-up and a capture again. Must be destroyed before `net` and
/// its communicator. GPUs with one device per process.
template <class Net, class Step>
class Graphed {
 public:
  Graphed(Net& net, Step step, const GraphedOptions& options = {})
      : net_(net),
        step_(std::move(step)),
        options_(checked(options)),
        device_(net.flat_parameters().entries().front().parameter().where()),
        stream_(device_),
        pool_(device_, stream_.get()),
        numbers_(device_),
        ring_(device_, static_cast<std::size_t>(options.kept_losses) * sizeof(double)) {
    check<UsageError>(Net::distributed || net.devices() == 1, "Graphed: expected one device per process, got ",
                      net.devices());
  }
  Graphed(const Graphed&) = delete;
  Graphed& operator=(const Graphed&) = delete;
  ~Graphed() {
    try {
      drop_graph();
    } catch (const Error&) {
      // The device is broken or its peers are gone; what it was doing is of no use.
      static_cast<void>(cudaGraphExecDestroy(exec_));
    }
  }

  /// One step, replayed where that can be. Throws what the step throws.
  template <AnyTensor... Inputs>
  void operator()(const Inputs&... inputs) {
    if (inputs_.empty()) (keep(inputs), ...);
    const auto [unfit, moved] = any_rank(!fits(inputs...), exec_ != nullptr && !everything_in_place());
    if (moved) begin_anew();
    if (unfit) {
      note_loss(step_(inputs...));
      return;
    }
    std::size_t next = 0;
    const std::tuple fixed{refill(inputs, next)...};
    if (steps_++ < options_.warm_up) return std::apply([&](const auto&... x) { warm_up(x...); }, fixed);
    if (exec_ == nullptr) std::apply([&](const auto&... x) { capture(x...); }, fixed);
    replay();
  }

  /// Whether steps of the first shapes are replayed by now.
  bool captured() const { return exec_ != nullptr; }
  std::int64_t replays() const { return replays_; }

  /// The losses of the steps since the last call, at most the newest `kept_losses`. Waits for the GPU; throws what went
  /// wrong there.
  std::vector<double> losses() {
    const auto kept = static_cast<std::int64_t>(options_.kept_losses);
    std::vector<std::byte> bytes(ring_.bytes());
    copy_bytes(Cpu{}, bytes.data(), device_, ring_.data(), bytes.size());
    std::vector<double> out;
    for (std::int64_t i = std::max(read_, noted_ - kept); i < noted_; ++i) {
      const std::byte* place = bytes.data() + static_cast<std::size_t>(i % kept) * sizeof(double);
      float single = 0;
      double number = 0;
      std::memcpy(&single, place, sizeof single);
      std::memcpy(&number, place, sizeof number);
      out.push_back(loss_type_ == DType::f32 ? static_cast<double>(single) : number);
    }
    read_ = noted_;
    return out;
  }

 private:
  static const GraphedOptions& checked(const GraphedOptions& options) {
    check<UsageError>(options.warm_up >= 1 && options.kept_losses >= 1,
                      "Graphed: expected warm_up and kept_losses of at least 1, got ", options.warm_up, " and ",
                      options.kept_losses);
    return options;
  }

  struct Input {
    Storage<Cuda> storage;
    DType dtype;
    std::vector<Index> shape;
  };

  template <class T, int Rank, class From>
  void keep(const Tensor<T, Rank, From>& input) {
    inputs_.push_back({Storage<Cuda>(device_, input.bytes()), dtype<T>, {input.shape().begin(), input.shape().end()}});
  }
  template <class... Inputs>
  bool fits(const Inputs&... inputs) const {
    std::size_t i = 0;
    const auto same = [&]<class T, int Rank, class From>(const Tensor<T, Rank, From>& x) {
      const Input& known = inputs_[i++];
      return known.dtype == dtype<T> &&
             std::equal(known.shape.begin(), known.shape.end(), x.shape().begin(), x.shape().end());
    };
    return sizeof...(Inputs) == inputs_.size() && (same(inputs) && ...);
  }
  template <class T, int Rank, class From>
  Tensor<T, Rank, Cuda> refill(const Tensor<T, Rank, From>& input, std::size_t& next) const {
    check<ShapeError>(input.is_contiguous(), "Graphed: an input of shape ", input.shape(), " is not contiguous");
    const Storage<Cuda>& storage = inputs_[next++].storage;
    copy_bytes(device_, storage.data(), input.device(), input.data(), input.bytes());
    return {storage, static_cast<T*>(storage.data()), input.shape(), row_major(input.shape())};
  }

  std::array<bool, 2> any_rank(bool first, bool second) {
    std::array<double, 2> ranks{first ? 1.0 : 0.0, second ? 1.0 : 0.0};
    net_.sum(ranks);
    return {ranks[0] != 0, ranks[1] != 0};
  }

  // Whether all is still where the graph knows it.
  bool everything_in_place() const { return net_.flat_parameters().generation() == generation_ && numbers_.complete(); }
  void drop_graph() {
    if (exec_ == nullptr) return;
    cuda::synchronize(cuda::compute_stream(device_));
    static_cast<void>(cudaGraphExecDestroy(std::exchange(exec_, nullptr)));
  }
  // In the memory that there is now, an optimizer's state has to be made, and so on.
  void begin_anew() {
    drop_graph();
    numbers_.forget();
    steps_ = 0;
  }

  // On the stream and with the memory that the capture will have.
  template <class... Inputs>
  void warm_up(const Inputs&... inputs) {
    const cudaStream_t outside = cuda::current_stream(device_);
    cuda::order(device_, outside, stream_);
    try {
      const cuda::StreamScope stream(stream_);
      const cuda::PoolScope pool(pool_);
      detail::WidePromises promises;
      note_loss(step_(inputs...));
      promises.keep();  // what the step hands out is as the capture will have it
    } catch (...) {
      cuda::order(device_, stream_, outside);  // some of the step may be under way
      throw;
    }
    cuda::order(device_, stream_, outside);
  }

  template <class... Inputs>
  void capture(const Inputs&... inputs) {
    cuda::synchronize(device_);
    cuda::synchronize(stream_.get());
    touch_parameters();  // what depends on them is worked out anew in every replay
    const cuda::DeviceGuard guard(device_);
    const cuda::StreamScope stream(stream_);
    const cuda::PoolScope pool(pool_);
    const cuda::ReplayScope numbers(numbers_);
    const auto passes = net_.forward_passes();
    cudaGraph_t graph = nullptr;
    std::exception_ptr error;
    CHORUS_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    pool_->seal(true);
    try {
      detail::WidePromises promises;
      const auto loss = step_(inputs...);
      loss_ = value_of(loss).storage();
      loss_data_ = value_of(loss).data();
      loss_type_ = dtype<typename tensor_of<decltype(loss)>::value_type>;
      promises.keep();  // who reads them after a replay finds that replay's numbers
    } catch (...) {
      error = std::current_exception();
    }
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    pool_->seal(false);
    cudaError_t made = ended;
    if (!error && made == cudaSuccess) made = cudaGraphInstantiate(&exec_, graph, 0);
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    if (error || made != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      numbers_.take_back();
      net_.set_forward_passes(passes);
      touch_parameters();  // what was worked out of them has not been
      if (error) rethrow_with(error, "Graphed: while the step was captured: ");
      CHORUS_CUDA_CHECK(made);
    }
    generation_ = net_.flat_parameters().generation();
    const auto more = net_.forward_passes() - passes;
    numbers_.at_replay([this, more] {
      net_.set_forward_passes(net_.forward_passes() + more);
      touch_parameters();
    });
    // Steps of several passes, and eager ones in between, draw others' numbers nowhere.
    if (more > 0) numbers_.count_by([this, last = passes + more] { return net_.forward_passes() - last; });
  }

  void replay() {
    numbers_.renew();
    const auto start = [this] {
      const cuda::DeviceGuard guard(device_);
      CHORUS_CUDA_CHECK(cudaGraphLaunch(exec_, cuda::current_stream(device_)));
    };
    if constexpr (Net::distributed)
      net_.communicator().launch("the replay of a captured step", start);
    else
      start();
    ++replays_;
    note(loss_data_, size_of(loss_type_));
  }

  template <class Loss>
  void note_loss(const Loss& loss) {
    using T = typename tensor_of<Loss>::value_type;
    static_assert(tensor_of<Loss>::rank == 0 && std::floating_point<T>,
                  "Graphed: expected a step that returns the loss, a scalar");
    loss_type_ = dtype<T>;
    note(value_of(loss).data(), sizeof(T));
  }
  void note(const void* loss, std::size_t bytes) {
    const auto place = static_cast<std::size_t>(noted_++ % options_.kept_losses) * sizeof(double);
    copy_bytes(device_, static_cast<std::byte*>(ring_.data()) + place, device_, loss, bytes);
  }

  void touch_parameters() {
    for (const auto& entry : net_.flat_parameters().entries()) entry.parameter().touch();
  }

  Net& net_;
  Step step_;
  GraphedOptions options_;
  Cuda device_;
  cuda::Stream stream_;
  cuda::PrivatePool pool_;
  cuda::ReplayNumbers numbers_;
  Storage<Cuda> ring_;
  std::vector<Input> inputs_;
  Storage<Cuda> loss_;
  const void* loss_data_ = nullptr;
  DType loss_type_ = DType::f32;
  int steps_ = 0;
  std::uint64_t generation_ = 0;  // of the parameters' layout that was captured
  std::int64_t replays_ = 0, noted_ = 0, read_ = 0;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace chorus
