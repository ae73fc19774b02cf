#pragma once
/// Common base of all policies: the model, its flat parameters, its sampler and its random numbers.

#include <chorus/autograd/batch_axis.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/clip_grad_norm.hpp>
#include <chorus/parallel/unlisted_parameters.hpp>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

class BatchGroup;

struct GatheredOptions {
  bool write = false;  ///< afterwards all ranks have the values that rank 0 wrote
};

/// The part of a policy that doesn't depend on the model's type.
template <Device D>
class PolicyOn {
 public:
  using device_type = D;
  /// Whether each pass sums the whole batch's gradients by itself, in its own parts (SameBits).
  static constexpr bool adds_up_in_pass = false;

  PolicyOn(const PolicyOn&) = delete;
  PolicyOn& operator=(const PolicyOn&) = delete;

  /// All parameters, for an optimizer: the model's, with the whole parameter's `extents()`; `count()` numbers of each
  /// are this process's. They are in memory order: under DistributedDataParallel the first backward pass reorders them
  /// by the arrival of their gradients. If the order must be stable, use names, or `nn::named_parameters` of
  /// `module()`, in the order of its members.
  std::vector<nn::NamedParameter<device_type>> parameters() const;
  const nn::FlatParameters<device_type>& flat_parameters() const { return flat_; }

  /// While it lives, each process has the whole model: to save, load or inspect. Under most policies it always has. All
  /// ranks create and destroy it together.
  struct [[maybe_unused]] Gathered {
    Gathered() = default;
    Gathered(const Gathered&) = delete;
    Gathered& operator=(const Gathered&) = delete;
    ~Gathered() {}  // not trivial, so a variable of it is not unused
  };
  [[nodiscard]] Gathered gathered(const GatheredOptions& = {}) { return {}; }
  /// optim::clip_grad_norm of all parameters: the same line under every policy, even if each rank has only a part of
  /// them. All ranks call it. Return value and errors are the same.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return optim::clip_grad_norm(parameters(), max_norm, options);
  }

  void train(bool training = true) { any_model_.train(training); }
  void eval() { any_model_.eval(); }
  bool training() const { return any_model_.training(); }

  /// For models that return their loss: the loss that backward starts from. The same under every policy.
  template <AnyVariable Loss>
  const Loss& mean_loss(const Loss& loss) const {
    return loss;
  }

  /// The group that shares the batch with this process, for of_global_batch; null if the batch is whole.
  std::shared_ptr<BatchGroup> global_batch() const { return nullptr; }

  /// Expires with this policy: optimizers and hooks of the model's parameters may live longer.
  std::weak_ptr<void> alive() const { return alive_; }

  std::uint64_t seed() const { return random_.seed; }
  /// The number of forward passes that drew random numbers, and of others with the model in training. Random operations
  /// depend on it, so a checkpoint keeps it.
  std::uint32_t forward_passes() const { return passes_; }
  void set_forward_passes(std::uint32_t passes) { passes_ = passes; }

  /// The names of the parameters in the order of the flat buffers. Sums over three or more ranks may be rounded in an
  /// order that depends on it, so a checkpoint keeps it.
  std::vector<std::string> parameter_order() const {
    std::vector<std::string> names;
    for (const auto& entry : flat_.entries()) names.push_back(entry.named.name);
    return names;
  }

 protected:
  /// The model must outlive this.
  PolicyOn(nn::Module& model, std::uint64_t seed);
  ~PolicyOn() = default;

  /// Watches the model in the pass that begins: only in the first that records gradients.
  std::shared_ptr<detail::UnlistedParameters> watch_once() {
    return grad_enabled() ? std::exchange(unlisted_, nullptr) : nullptr;
  }

  /// An argument of the model: a Tensor on another kind of device, such as a loader's batch, is copied to the model's.
  template <class X>
  decltype(auto) on_model_device(const X& x) const {
    if constexpr (!AnyTensor<X>)
      return (x);
    else if constexpr (std::is_same_v<typename X::device_type, device_type>)
      return (x);
    else
      return detail::with_batch_axis_of<X>(to_device(x, model_device()));
  }

  /// The random context of the forward pass that begins, with that many samples (see RandomContext). A pass that a
  /// checkpoint recomputes draws the same numbers and does not count.
  RandomContext& begin_forward(Index samples = 0);
  void end_forward() {
    if ((any_model_.training() || random_.drew) && counts_) ++passes_;
  }
  /// The device of the parameters; under DataParallel the first device.
  device_type model_device() const { return flat_.entries().front().parameter().where(); }
  /// Ranks have agreed on a number for the current pass.
  void settle_pass(std::uint32_t number) {
    if (counts_) passes_ = number;
    random_.step = number;
  }

  /// Whether the model or any of its layers is in training.
  bool any_training() { return nn::detail::any_training(any_model_); }

  nn::Module& any_model_;
  nn::FlatParameters<device_type> flat_;
  RandomContext random_;

 private:
  [[gnu::cold]] void note_gradients(trace::StepCounter& trace) const {
    std::size_t bytes = 0;
    for (const auto& entry : flat_.entries())
      if (entry.parameter().wants_grad()) bytes += entry.parameter().size_bytes();
    trace.note("gradient_bytes", cat(bytes));
  }

  std::uint32_t passes_ = 0;
  bool counts_ = true;  // whether the current pass counts
  std::shared_ptr<detail::UnlistedParameters> unlisted_;
  std::shared_ptr<void> alive_ = std::make_shared<int>();
};

template <Device D>
std::vector<nn::NamedParameter<D>> PolicyOn<D>::parameters() const {
  return flat_.parameters();
}

template <Device D>
PolicyOn<D>::PolicyOn(nn::Module& model, std::uint64_t seed)
    : any_model_(model), flat_(model), unlisted_(std::make_shared<detail::UnlistedParameters>(flat_)) {
  random_.seed = seed;
  random_.device_slot = trace_slot(model_device());
  if (auto* const trace = trace::step_counter(); trace != nullptr) [[unlikely]]
    note_gradients(*trace);
}

template <Device D>
RandomContext& PolicyOn<D>::begin_forward(Index samples) {
  PassNumbers* const known = detail::random_context() != nullptr ? detail::random_context()->passes : nullptr;
  counts_ = known == nullptr || !known->repeats();
  random_.step = known != nullptr ? known->take(passes_) : passes_;
  random_.next_operation = 0;
  random_.samples = samples;
  random_.drew = false;
  if (auto* const steps = trace::step_counter(); steps != nullptr) [[unlikely]] {
    if (grad_enabled())
      steps->forward_begins();
    else if (!any_training())
      steps->evaluation_begins();
  }
  return random_;
}

/// Holds the model; constructed before the policy's other members.
template <class Model>
struct HeldModel {
  explicit HeldModel(Model model) : model_(std::move(model)) {}
  Model model_;
};

/// Base of all policies: the model, and `Base`, which doesn't know its type.
template <class Model, class Base = PolicyOn<typename nn::detail::DeviceOfModel<Model>::type>>
class Policy : protected HeldModel<Model>, public Base {
  static_assert(
      requires { typename Model::device_type; }, "policy: expected a model that lists its members by CHORUS_MODULE");
  static_assert(!std::is_void_v<typename Base::device_type>, "policy: expected a model with parameters");

 public:
  using model_type = Model;

  /// The model itself, which is trained, saved and loaded. Its parameters have the same names under every policy. To
  /// compute with it, call the policy, which handles passes of several devices (such as the number of samples of each).
  Model& module() { return this->model_; }
  const Model& module() const { return this->model_; }

  using Base::gathered;
  /// Calls `f(model)` on every rank with the whole model, as on one device: the same line under every policy. Writes of
  /// `f` persist; all ranks must write the same. All ranks call it.
  template <class F>
  requires std::invocable<const F&, Model&>
  void gathered(const F& f) {
    const auto whole = Base::gathered();
    f(this->model_);
  }

 protected:
  /// `arguments`: of `Base`, after the model.
  template <class... Arguments>
  explicit Policy(Model model, Arguments&&... arguments)
      : HeldModel<Model>(std::move(model)), Base(this->model_, std::forward<Arguments>(arguments)...) {}
};

/// The slot in which `trace` counts the memory of a policy's device number `i`; with one device per rank, this rank's.
template <class Net>
requires requires(const Net& net) { net.flat_parameters(); }
int trace_slot(const Net& net, [[maybe_unused]] int i) {
  if constexpr (requires { net.options().device_ids; })
    return trace_slot(typename Net::device_type{net.options().device_ids[static_cast<std::size_t>(i)]});
  else
    return trace_slot(net.flat_parameters().entries().front().parameter().where());
}

/// The place under which `trace` counts messages of a policy's device number `i`; with one device per rank, rank `i`.
template <class Net>
int trace_place(const Net& net, int i) {
  if constexpr (requires { net.options().device_ids; }) return net.options().device_ids[static_cast<std::size_t>(i)];
  return i;
}

/// The policy of `Net` around another model: `ch::Rebind<Net, Critic> critic{Critic{}, run};`.
template <class Net, class Model>
using Rebind = typename Net::template rebind<Model>;

struct SamplingOptions {
  bool shuffle = true;
  /// Repeat samples so that all shares of a batch have the same size, as PyTorch's DistributedSampler does.
  bool padding = false;
};

}  // namespace chorus
