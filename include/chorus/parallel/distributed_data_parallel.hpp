#pragma once
/// DistributedDataParallel: one process per device. Every rank holds the whole model and computes on its share of the batch;
/// while backward runs, gradients are averaged over all ranks, bucket by bucket, so that all take the same step.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/gradient_buckets.hpp>
#include <chorus/parallel/policy.hpp>
#include <chorus/parallel/same_model.hpp>
#include <chorus/parallel/scatter_gather.hpp>

namespace chorus::inline CHORUS_ABI {

struct DistributedDataParallelOptions {
  /// See BucketOptions.
  double first_bucket_cap_mb = 1, bucket_cap_mb = 25;
  /// Send rank 0's buffers to all ranks before each forward pass in training.
  bool broadcast_buffers = true;
  /// Allow parameters that get no gradient in some backward passes. Costs a small collective a step.
  bool find_unused_parameters = false;
};

/// The gradient is the mean over the *samples* of all ranks: with shares of different sizes the step is the one that a
/// single device would take. All ranks hold bit-identical parameters after each step. Every rank makes the same calls.
template <class Model, class Communicator = comm::AnyCommunicator>
class DistributedDataParallel : public Policy<Model> {
 public:
  using D = typename Model::device_type;
  static constexpr bool distributed = true;
  static constexpr const char* name = "ddp";

  /// Compares the models of all ranks and takes rank 0's numbers. Throws UsageError, on every rank, where names, shapes or
  /// dtypes differ, and where no parameter wants a gradient. The communicator must outlive this.
  DistributedDataParallel(Model model, Communicator& communicator, const DistributedDataParallelOptions& options = {},
                          std::uint64_t seed = initial_seed())
      : Policy<Model>(std::move(model), seed),
        communicator_(communicator),
        options_(options),
        buffers_(nn::named_buffers<D>(this->model_)),
        counts_(static_cast<std::size_t>(communicator.size())) {
    detail::check_same_model<D>(communicator_, this->model_);
    for (const auto& group : this->flat_.groups())
      broadcast_bytes(group.value(0), group.count * size_of(group.dtype), trace::Traffic::parameters);
    for (const auto& entry : this->flat_.entries()) entry.parameter().touch();
    broadcast_buffers();
    build_buckets();
    check<UsageError>(!buckets_.empty(), "DistributedDataParallel: no parameter of the model wants a gradient");
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i) {
      auto& parameter = this->flat_.entries()[i].parameter();
      parameter.on_grad([this, alive = std::weak_ptr<void>(alive_), &parameter] {
        if (!alive.expired()) gradient_ready(parameter);
      });
    }
    this->random_.first_sample = [this] { return first_sample(); };
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <class Run>
    requires requires(Run& run) { run.communicator(); }
  DistributedDataParallel(Model model, Run& run, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(model), run.communicator(), options, run.seed()) {}

  /// Peers don't wait for a rank that throws while gradients are under way: the group is given up.
  ~DistributedDataParallel() {
    const bool unwinding = std::uncaught_exceptions() > exceptions_before_;
    if (in_backward_ || (unwinding && !counting_.done()))
      communicator_.abort(cat("rank ", communicator_.rank(), " threw an exception in the middle of a step"));
  }

  /// The model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_, "DistributedDataParallel: the last backward pass ended early; its gradients are incomplete");
    counting_.wait();  // of a forward pass that no backward followed
    if (grad_enabled()) {
      if (!buckets_fit()) build_buckets();
      if (this->training() && options_.broadcast_buffers && sync_) broadcast_buffers();
      own_count_ = detail::batch_size(0, inputs...);
      counting_ = communicator_.all_gather_async(std::span<const std::int64_t>(&own_count_, 1), std::span<std::int64_t>(counts_), {});
    } else {
      // Without gradients nothing is exchanged, so ranks need not agree on the number of calls.
      std::fill(counts_.begin(), counts_.end(), 0);
    }
    const RandomScope scope(this->begin_forward());
    auto output = this->model_.forward(inputs...);
    this->end_forward();
    return output;
  }

  /// While it lives, backward adds to this rank's own gradients alone; the first backward after it averages the sum.
  class NoSync {
   public:
    explicit NoSync(bool& sync) : sync_(sync), before_(std::exchange(sync, false)) {}
    ~NoSync() { sync_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    bool& sync_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(sync_); }

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(), {.rank = communicator_.rank(),
                                          .world_size = communicator_.size(),
                                          .shuffle = options.shuffle,
                                          .seed = this->seed(),
                                          .padding = options.padding});
  }
  int devices() const { return communicator_.size(); }
  Communicator& communicator() const { return communicator_; }

  /// `value`, the mean over this rank's `samples`, as the mean over the samples of all ranks.
  double mean(double value, Index samples) {
    double sums[2] = {samples == 0 ? 0 : value * static_cast<double>(samples), static_cast<double>(samples)};
    sum(sums);
    return sums[1] == 0 ? 0 : sums[0] / sums[1];
  }
  /// Sums over all ranks, in place.
  void sum(std::span<double> values) { communicator_.all_reduce(values, comm::ReduceOp::sum, {}); }

  /// Whether `text` is the same on all ranks; a collective.
  bool same_on_all_ranks(std::string_view text) {
    std::vector<std::uint8_t> first(text.begin(), text.end());
    auto length = static_cast<std::uint64_t>(first.size());
    communicator_.broadcast(std::span(&length, 1), 0, {});
    first.resize(length);
    communicator_.broadcast(std::span<std::uint8_t>(first), 0, {});
    double different = std::equal(first.begin(), first.end(), text.begin(), text.end()) ? 0 : 1;
    sum({&different, 1});
    return different == 0;
  }

  /// Lays the flat buffers out as a checkpoint says. Names that the model doesn't have are left out.
  void set_parameter_order(std::span<const std::string> names) {
    const auto& entries = this->flat_.entries();
    std::vector<std::size_t> order;
    for (const auto& wanted : names)
      for (std::size_t i = 0; i < entries.size(); ++i)
        if (entries[i].named.name == wanted) order.push_back(i);
    if (order.size() != entries.size()) return;
    this->flat_.reorder(order);
    build_buckets();
    order_learned_ = true;
  }
  /// Sizes of the buckets in bytes, in the order in which they are reduced.
  std::vector<std::size_t> bucket_bytes() const {
    std::vector<std::size_t> sizes;
    for (const auto& bucket : buckets_) sizes.push_back(bucket.count * size_of(this->flat_.groups()[bucket.group].dtype));
    return sizes;
  }

 private:
  void broadcast_bytes(void* data, std::size_t bytes, trace::Traffic traffic) {
    communicator_.broadcast(std::span(static_cast<std::uint8_t*>(data), bytes), 0, {.traffic = traffic});
  }

  void broadcast_buffers() {
    std::size_t bytes = 0;
    for (const auto& named : buffers_) bytes += named.buffer->size_bytes();
    if (bytes == 0) return;
    buffer_message_.resize(bytes);
    const auto copy = [&](bool pack) {
      std::uint8_t* place = buffer_message_.data();
      for (const auto& named : buffers_) {
        const std::size_t size = named.buffer->size_bytes();
        if (pack)
          copy_bytes(Cpu{}, place, named.buffer->where(), named.buffer->data(), size);
        else
          copy_bytes(named.buffer->where(), named.buffer->data(), Cpu{}, place, size);
        place += size;
      }
    };
    if (communicator_.rank() == 0) copy(true);
    broadcast_bytes(buffer_message_.data(), bytes, trace::Traffic::buffers);
    if (communicator_.rank() != 0) copy(false);
  }

  void build_buckets() {
    buckets_ = detail::make_buckets(this->flat_, {options_.first_bucket_cap_mb, options_.bucket_cap_mb});
    bucket_of_.assign(this->flat_.entries().size(), no_bucket);
    entry_of_.clear();
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const std::size_t i : buckets_[b].parameters) bucket_of_[i] = b;
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i) entry_of_.push_back({&this->flat_.entries()[i].parameter(), i});
    std::sort(entry_of_.begin(), entry_of_.end());
  }

  // Whether no parameter was frozen or thawed since the buckets were made.
  bool buckets_fit() const {
    for (std::size_t i = 0; i < bucket_of_.size(); ++i)
      if (this->flat_.entries()[i].parameter().wants_grad() != (bucket_of_[i] != no_bucket)) return false;
    return true;
  }

  // The place of this rank's first sample in the global batch: the shares lie in the order of the ranks.
  std::int64_t first_sample() {
    counting_.wait();
    return std::accumulate(counts_.begin(), counts_.begin() + communicator_.rank(), std::int64_t{0});
  }

  // This rank's part of the global batch: the weight of its mean gradient.
  double weight() {
    counting_.wait();
    const auto all = std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
    return all == 0 ? 1.0 / communicator_.size() : static_cast<double>(own_count_) / static_cast<double>(all);
  }

  // A leaf's hook: its gradient is final. Buckets leave in order, each as soon as it is full.
  void gradient_ready(const ParameterOn<D>& parameter) {
    if (!sync_) return;
    if (!in_backward_) begin_backward();
    const auto found = std::lower_bound(entry_of_.begin(), entry_of_.end(), std::pair(&parameter, std::size_t{0}));
    arrival_.push_back(found->second);
    --buckets_[bucket_of_[found->second]].missing;
    launch_full_buckets();
  }

  void begin_backward() {
    in_backward_ = true;
    weight_ = weight();
    arrival_.clear();
    next_bucket_ = 0;
    for (auto& bucket : buckets_) bucket.missing = bucket.parameters.size();
    at_backward_end([this] { finish_backward(); });
  }

  void launch_full_buckets() {
    for (; next_bucket_ < buckets_.size() && buckets_[next_bucket_].missing == 0; ++next_bucket_) {
      auto& bucket = buckets_[next_bucket_];
      const auto& group = this->flat_.groups()[bucket.group];
      const comm::CollectiveOptions options{.scale = weight_, .traffic = trace::Traffic::gradients};
      const auto start = [&]<class T>(T) {
        bucket.work = communicator_.all_reduce_async(std::span(reinterpret_cast<T*>(group.grad(bucket.begin)), bucket.count),
                                                     comm::ReduceOp::sum, options);
      };
      if (group.dtype == DType::f32)
        start(float{});
      else
        start(double{});
    }
  }

  void finish_backward() {
    if (next_bucket_ < buckets_.size()) complete_with_unused();
    for (auto& bucket : buckets_) bucket.work.wait();
    if (options_.find_unused_parameters) agree_on_unused();
    in_backward_ = false;
    // Where parameters may be left out, ranks don't know the same order.
    if (!order_learned_ && !options_.find_unused_parameters) learn_order();
  }

  // Parameters without a gradient take part with zeros, or, where that was not allowed, are named.
  void complete_with_unused() {
    std::vector<bool> arrived(this->flat_.entries().size());
    for (const std::size_t i : arrival_) arrived[i] = true;
    std::string unused;
    for (auto& bucket : buckets_)
      for (const std::size_t i : bucket.parameters) {
        if (arrived[i]) continue;
        const auto& entry = this->flat_.entries()[i];
        unused += cat(unused.empty() ? "" : ", ", entry.named.name);
        // What earlier passes under no_sync left there still counts.
        auto& parameter = entry.parameter();
        if (!parameter.grad_arrived()) zero_bytes(parameter.where(), parameter.grad_data(), parameter.size_bytes());
      }
    check<UsageError>(options_.find_unused_parameters, "DistributedDataParallel: on rank ", communicator_.rank(),
                      " no gradient came for ", unused,
                      ". If they are not always used, set find_unused_parameters; if never, set_requires_grad(false)");
    for (auto& bucket : buckets_) bucket.missing = 0;
    launch_full_buckets();
  }

  // A parameter has a gradient where any rank used it; where none did it stays without, so that no optimizer moves it.
  void agree_on_unused() {
    std::vector<std::int32_t> used(this->flat_.entries().size());
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = this->flat_.entries()[i].parameter().grad_arrived() ? 1 : 0;
    communicator_.all_reduce(std::span<std::int32_t>(used), comm::ReduceOp::max, {});
    for (std::size_t i = 0; i < used.size(); ++i)
      if (this->flat_.entries()[i].parameter().wants_grad()) this->flat_.entries()[i].parameter().set_grad_arrived(used[i] != 0);
  }

  // After the first backward: lays gradients out in the order in which they came on rank 0, so that buckets fill front to
  // back. The optimizer has not stepped yet, so nothing else knows the old places.
  void learn_order() {
    order_learned_ = true;
    std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
    communicator_.broadcast(std::span<std::int64_t>(order), 0, {});
    if (std::is_sorted(order.begin(), order.end())) return;
    std::vector<std::size_t> indices(order.begin(), order.end());
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i)
      if (!this->flat_.entries()[i].parameter().wants_grad()) indices.push_back(i);
    this->flat_.reorder(indices);
    build_buckets();
  }

  static constexpr std::size_t no_bucket = static_cast<std::size_t>(-1);

  Communicator& communicator_;
  const int exceptions_before_ = std::uncaught_exceptions();
  DistributedDataParallelOptions options_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  std::vector<std::uint8_t> buffer_message_;

  std::int64_t own_count_ = 0;        // samples of this rank in the current batch
  std::vector<std::int64_t> counts_;  // of all ranks, once counting_ has ended
  comm::Work counting_;
  double weight_ = 1;

  std::vector<detail::GradientBucket> buckets_;
  std::vector<std::size_t> bucket_of_;                                        // by entry of the flat parameters
  std::vector<std::pair<const ParameterOn<D>*, std::size_t>> entry_of_;       // sorted by address
  std::vector<std::size_t> arrival_;                                          // entries, in the order of this backward
  std::size_t next_bucket_ = 0;
  bool sync_ = true, in_backward_ = false, order_learned_ = false;
  std::shared_ptr<void> alive_ = std::make_shared<int>();  // the model's parameters, and their hooks, may live longer
};

}  // namespace chorus
