#pragma once
/// Graphed: records a training step once as a CUDA graph, communication and optimizer included, and then starts each
/// step with one launch instead of hundreds.

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
  /// Eager steps before the capture: they settle memory, plans and buckets.
  int warm_up = 3;
  /// How many losses are kept until `losses` reads them.
  int kept_losses = 1024;
};

/// Calls `step(inputs...)`, which runs a whole training step and returns the loss, a scalar on the GPU. Inputs on the
/// host are copied to the GPU first:
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
/// After the warm-up, steps with the shapes of the first one are replayed; others run eagerly. Values that the step
/// reads from the host are frozen at the capture. Exceptions: optimizers' learning rates and step counts, and random
/// numbers, which continue as in eager steps. Inside the step, waiting for the GPU or copying to or from the host
/// throws UsageError. Under DistributedDataParallel all ranks replay or none does: they agree in every call. If
/// parameters, buckets or an optimizer's state move, as after loading a checkpoint, the step is warmed up and captured
/// again. Destroy it before `net` and its communicator. For GPUs with one device per process.
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
      // The device is broken or its peers are gone: there is nothing left to wait for.
      static_cast<void>(cudaGraphExecDestroy(exec_));
    }
  }

  /// Runs one step, replayed if possible. Throws what the step throws.
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

  /// Whether the step has been captured, so that steps of the first shapes are replayed.
  bool captured() const { return exec_ != nullptr; }
  std::int64_t replays() const { return replays_; }

  /// The losses since the last call, at most the newest `kept_losses`. Waits for the GPU and throws its errors.
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

  // Whether parameters and optimizer numbers are where the graph expects them.
  bool everything_in_place() const { return net_.flat_parameters().generation() == generation_ && numbers_.complete(); }
  void drop_graph() {
    if (exec_ == nullptr) return;
    cuda::synchronize(cuda::compute_stream(device_));
    static_cast<void>(cudaGraphExecDestroy(std::exchange(exec_, nullptr)));
  }
  // The layout has changed: warm-up must create optimizer state and plans in the new memory.
  void begin_anew() {
    drop_graph();
    numbers_.forget();
    steps_ = 0;
  }

  // Runs on the stream and with the memory pool that the capture will use.
  template <class... Inputs>
  void warm_up(const Inputs&... inputs) {
    const cudaStream_t outside = cuda::current_stream(device_);
    cuda::order(device_, outside, stream_);
    try {
      const cuda::StreamScope stream(stream_);
      const cuda::PoolScope pool(pool_);
      detail::WidePromises promises;
      note_loss(step_(inputs...));
      promises.keep();  // makes the float copies that are in use, as the capture does
    } catch (...) {
      cuda::order(device_, stream_, outside);  // part of the step may be running
      throw;
    }
    cuda::order(device_, stream_, outside);
  }

  template <class... Inputs>
  void capture(const Inputs&... inputs) {
    cuda::synchronize(device_);
    cuda::synchronize(stream_.get());
    touch_parameters();  // values computed from them are recomputed in every replay
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
      promises.keep();  // float copies of the output hold each replay's values
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
      touch_parameters();  // the values computed from them were only recorded
      if (error) rethrow_with(error, "Graphed: while the step was captured: ");
      CHORUS_CUDA_CHECK(made);
    }
    generation_ = net_.flat_parameters().generation();
    const auto more = net_.forward_passes() - passes;
    numbers_.at_replay([this, more] {
      net_.set_forward_passes(net_.forward_passes() + more);
      touch_parameters();
    });
    // Steps with several passes, and eager steps in between, don't reuse each other's random numbers.
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
