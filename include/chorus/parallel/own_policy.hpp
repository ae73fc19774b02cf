#pragma once
/// The base of policies that a program writes itself, such as a DistributedDataParallel of one's own.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/ddp/earlier_gradients.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/parallel/distributed_policy.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

/// A policy whose ranks all have the whole model and compute on shares of the batch. It does what depends on shares:
/// samples, random numbers, the weight of each rank's gradient, evaluation. A derived class moves numbers between
/// ranks: it begins with `take_state`, and overrides what should happen at the moments of a step, which all ranks reach
/// in one order. Its parameters are numbered from 0 in the order in which backward is expected to finish them; frozen
/// ones are the last of their dtype. Without an override of `backward_ended` each rank trains on its own gradients.
///
/// Refused: `join`, captured steps. Under `no_sync` only the base counts: no moment of backward is reported.
template <class Model, class Communicator = comm::AnyCommunicator>
class OwnPolicy : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = OwnPolicy;

  /// Returns the model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_, this->title_,
                      ": expected the last backward pass to end, got one that ended early: its gradients are "
                      "incomplete; make a new net");
    ddp::ForwardPass pass{.samples = samples_of(inputs...), .sync = sync_};
    pass.number = this->begin_forward(pass.samples).step;
    const auto model = [&] { return this->call_model(inputs...); };
    if (!grad_enabled()) return this->run_without_grad(pass, model);
    this->begin_pass(pass, false);
    forward_begins();
    return this->run_recorded(model);
  }
  /// While it lives, backward adds to this rank's own gradients. The first backward after it is reported.
  [[nodiscard]] NoSync no_sync() { return this->scope_without(sync_); }

 protected:
  /// Throws UsageError, on every rank, if the ranks' models differ. All ranks take rank 0's seed. `title`: the policy's
  /// name in messages. The communicator must outlive this.
  OwnPolicy(std::string_view title, Model model, Communicator& communicator, std::uint64_t seed = initial_seed())
      : Base(title, std::move(model), communicator, /*dim=*/0, seed) {
    static_assert(!Base::adds_up_in_pass, "OwnPolicy: SameBits needs a policy of the library");
    this->check_same({}, typename Base::All{});
    this->on_gradients([this](std::size_t i) { arrived(i); });
  }
  /// If a rank throws during backward, the group is aborted, so that peers fail at once instead of waiting.
  ~OwnPolicy() {
    if (in_backward_) this->give_up();
  }

  // The moments of a step, outside of no_sync.
  /// A forward pass that records gradients begins.
  virtual void forward_begins() {}
  /// The first gradient of a backward pass is there.
  virtual void backward_begins() {}
  /// This rank has the final gradient of parameter `i`.
  virtual void gradient_is_final(std::size_t) {}
  /// Backward has ended. Afterwards the optimizer steps the parameters that have a gradient.
  virtual void backward_ended() {}

  // What a policy works on.
  /// The number of samples in a pass's inputs.
  template <class... Inputs>
  Index samples_of(const Inputs&... inputs) const {
    return detail::samples_of(this->random_.dim, inputs...);
  }
  /// In a backward pass: this rank's share of the batch, by the elements of its loss's mean. The weights of all ranks
  /// sum to 1; the batch's gradient is the sum of weight * gradient.
  double weight() const { return earlier_.unit; }
  std::size_t parameter_count() const { return this->flat_.entries().size(); }
  /// Has `wants_grad()`, `grad_arrived()`, `size_bytes()` and more.
  ParameterOn<D>& parameter(std::size_t i) const { return this->flat_.entries()[i].parameter(); }
  /// Whether parameter `i` lies behind parameter i - 1: both then are one range of numbers.
  bool follows(std::size_t i) const { return i > 0 && entry(i).group == entry(i - 1).group; }
  /// Calls `f(span)` with the gradients of parameters first, ..., last - 1, which follow each other: of floats or
  /// doubles. A gradient that has not arrived is undefined: see `clear_gradient`.
  template <class F>
  void with_gradients(std::size_t first, std::size_t last, const F& f) const {
    check_range(first, last);
    with_numbers(first, last, this->flat_.groups()[entry(first).group].grad(entry(first).begin), f);
  }
  /// The same with their values, to read or write.
  template <class F>
  void with_values(std::size_t first, std::size_t last, const F& f) const {
    check_range(first, last);
    with_numbers(first, last, this->flat_.groups()[entry(first).group].value(entry(first).begin), f);
    for (std::size_t i = first; i < last; ++i) parameter(i).touch();
  }
  /// Sets the gradient's numbers to 0, and leaves whether it has arrived.
  void clear_gradient(std::size_t i) const {
    zero_bytes(parameter(i).where(), parameter(i).grad_place(), parameter(i).size_bytes());
  }
  /// All ranks take `rank`'s parameters and buffers. All call it.
  void take_state(int rank) {
    this->broadcast_parameters(rank, typename Base::All{});
    this->broadcast_buffers(rank);
  }

 private:
  const auto& entry(std::size_t i) const { return this->flat_.entries()[i]; }
  void check_range(std::size_t first, std::size_t last) const {
    check<UsageError>(first < last && last <= parameter_count() && entry(first).group == entry(last - 1).group,
                      this->title_, ": expected parameters of one dtype that follow each other, got ", first, " to ",
                      last, " of ", parameter_count(), "; ask follows(i)");
  }
  template <class F>
  void with_numbers(std::size_t first, std::size_t last, std::byte* at, const F& f) const {
    const std::size_t count = entry(last - 1).begin + entry(last - 1).count - entry(first).begin;
    ddp::with_type(this->title_, parameter(first).dtype(), at, [&]<class T>(T* n) { f(std::span<T>(n, count)); });
  }

  void backward_is_weighed() override {
    earlier_.pass_ended();
    earlier_.change_unit(this->flat_, this->shares_.weight(), [](std::size_t) { return true; });
  }
  void arrived(std::size_t i) {
    check<UsageError>(this->weighed(), this->title_,
                      ": expected a forward pass of the net, got one of its module() alone: call the net");
    earlier_.gradient_arrived(parameter(i));
    if (!sync_) return parameter(i).set_grad_local(this->devices() > 1);
    if (!std::exchange(in_backward_, true)) {
      for (std::size_t k = 0; k < parameter_count(); ++k) parameter(k).set_grad_local(false);
      this->when_backward_ends([this] {
        backward_ended();
        earlier_.pass_ended();
        in_backward_ = false;
      });
      backward_begins();
    }
    gradient_is_final(i);
  }
  void begin_join(const detail::JoinFacts&) override {
    fail<UsageError>(this->title_,
                     ": expected the same number of batches on all ranks, got join; use net.sampler(data)");
  }
  JoinedPass take_part_in_pass() override { return JoinedPass::none; }
  void all_have_run_out() override {}

  ddp::EarlierGradients<D> earlier_;
  bool sync_ = true, in_backward_ = false;
};

}  // namespace chorus
