#pragma once
/// The model that a policy is tested with, and a net around it of any policy. See policy_suite.hpp.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace chorus::testing {

/// What a PolicyModel has besides its layers of all cases.
struct PolicyModelOptions {
  bool extra = false;  ///< a layer that a pass may leave out
  bool tied = false;   ///< `extra` has the weight of `fc2`
  bool norm = false, frozen = false, wide = false;
  double dropout = 0;
};

/// The model of all cases: x [samples, 5] -> logits [samples, 3], in double.
struct PolicyModel : nn::Module {
  nn::Linear<Cpu, double> fc1{5, 7}, fc2{7, 7};
  std::optional<nn::Linear<Cpu, double>> extra;
  std::optional<nn::BatchNorm<Cpu, double>> norm;
  nn::Dropout dropout;
  nn::Linear<Cpu, double> fc3;
  CHORUS_MODULE(PolicyModel, fc1, fc2, extra, norm, dropout, fc3)
  std::function<void()> in_backward;  ///< called when the gradients behind `fc1` are final

  explicit PolicyModel(const PolicyModelOptions& options = {});
  /// `uses`: whether the pass uses `extra`.
  Variable<double, 2> forward(const Tensor<double, 2>& x, bool uses) const;
};

inline PolicyModel::PolicyModel(const PolicyModelOptions& options)
    : dropout(options.dropout), fc3(options.wide ? 50'000 : 7, 3) {
  if (options.wide) fc2 = nn::Linear<Cpu, double>{7, 50'000};
  if (options.extra) extra.emplace(7, 7);
  if (options.tied) extra->weight = fc2.weight;
  if (options.norm) norm.emplace(7);
  if (options.frozen) fc2.weight.set_requires_grad(false);
}

inline Variable<double, 2> PolicyModel::forward(const Tensor<double, 2>& x, bool uses) const {
  auto h = tanh(fc1(x));
  if (in_backward) {
    h = record(
        "in_backward", h.value(),
        [f = in_backward](const auto& dy, auto dx) {
          f();
          dx->add(dy);
        },
        h);
  }
  h = tanh(fc2(h));
  if (extra && uses) h = tanh((*extra)(h));
  if (norm) h = (*norm)(h);
  return fc3(dropout(h));
}

/// A net whose policy is not known any more: what the cases call.
class PolicyNet {
 public:
  virtual ~PolicyNet() = default;
  virtual Variable<double, 2> forward(const Tensor<double, 2>& x, bool uses) = 0;
  virtual std::vector<nn::NamedParameter<Cpu>> parameters() = 0;
  virtual double clip_grad_norm(double max_norm) = 0;
  virtual std::shared_ptr<void> no_sync() = 0;
  virtual void eval() = 0;
  /// `f` sees the whole model; all ranks call it.
  virtual void gathered(const std::function<void(PolicyModel&)>& f) = 0;
};
/// Makes the policy's net of a model, on one rank.
using MakePolicyNet =
    std::function<std::unique_ptr<PolicyNet>(PolicyModel, comm::AnyCommunicator&, std::uint64_t seed)>;

/// `Net`: the policy around a PolicyModel.
template <class Net>
class PolicyNetOf final : public PolicyNet {
 public:
  template <class... Arguments>
  explicit PolicyNetOf(Arguments&&... arguments) : net_(std::forward<Arguments>(arguments)...) {}
  Variable<double, 2> forward(const Tensor<double, 2>& x, bool uses) override { return net_(x, uses); }
  std::vector<nn::NamedParameter<Cpu>> parameters() override { return net_.parameters(); }
  double clip_grad_norm(double max_norm) override { return net_.clip_grad_norm(max_norm); }
  std::shared_ptr<void> no_sync() override {
    struct Scope {
      explicit Scope(Net& net) : scope(net.no_sync()) {}
      decltype(std::declval<Net&>().no_sync()) scope;
    };
    return std::make_shared<Scope>(net_);
  }
  void eval() override { net_.eval(); }
  void gathered(const std::function<void(PolicyModel&)>& f) override {
    net_.gathered([&](PolicyModel& model) { f(model); });
  }

 private:
  Net net_;
};
/// `Net` is made by its constructor from model, communicator and seed.
template <class Net>
MakePolicyNet make_policy_net() {
  return [](PolicyModel model, comm::AnyCommunicator& ranks, std::uint64_t seed) -> std::unique_ptr<PolicyNet> {
    return std::make_unique<PolicyNetOf<Net>>(std::move(model), ranks, seed);
  };
}

}  // namespace chorus::testing
