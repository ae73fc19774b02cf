#pragma once
/// The gradients and losses of one pass through a pipeline, apart from those that the parameters already have.

#include <chorus/autograd/variable.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/parallel/pipeline/loss_weights.hpp>
#include <chorus/parallel/pipeline/pass_node.hpp>
#include <chorus/parallel/pipeline/tied.hpp>
#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// While a pass is recorded, a leaf replaces each parameter and collects the gradients of its micro-batches. The user's
/// backward then adds them, times its seed, to the parameters' gradients; without it they are dropped. A room can
/// replace it by a class with the same members: see StagedModel::pass.
template <Device D>
class PassGradients {
 public:
  /// `samples`: of the whole batch.
  PassGradients(const std::vector<nn::NamedParameter<D>>& parameters, Index samples)
      : parameters_(parameters), stand_ins_(grad_enabled() ? parameters.size() : 0), weights_(samples) {
    for (std::size_t i = 0; i < stand_ins_.size(); ++i)
      if (parameter(i).wants_grad()) {
        stand_ins_[i] = parameter(i).make_stand_in();
        leaves_.insert(stand_ins_[i].get());
      }
  }

  /// While it lives, recorded operations use the stand-ins.
  class Scope {
   public:
    explicit Scope(const PassGradients& gradients) : gradients_(gradients) { set(true); }
    ~Scope() { set(false); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void set(bool stand_in) const {
      for (std::size_t i = 0; i < gradients_.stand_ins_.size(); ++i)
        if (gradients_.stand_ins_[i])
          gradients_.parameter(i).set_origin(stand_in ? gradients_.stand_ins_[i] : Ref<Node>());
    }
    const PassGradients& gradients_;
  };

  /// While it lives, a stage runs forward for this micro-batch, or backward.
  Scope forward_scope(int) const { return Scope(*this); }
  Scope backward_scope() const { return Scope(*this); }
  /// All micro-batches have run forward.
  void forward_ended() {}
  /// Backward begins, within the pass's forward or in the user's backward.
  void begin_backward(bool) {}
  /// The last gradients by a stage's parameters from this micro-batch will be computed: in backward, or in its deferred
  /// work.
  void last_gradients_begin(int, int) {}
  /// The stage's backward or deferred work for this micro-batch has ended. `last`: no other gradients will come.
  void gradients_arrived(int, int, bool) {}
  /// Backward has ended. A collective of the stages that share parameters.
  void end_backward(TiedParameters<D>& tied) { sum_tied(tied); }

  /// How the micro-batches' losses are weighted, and the gradient by the next one's.
  LossWeights& weights() { return weights_; }
  template <class Loss>
  double weigh(const Loss& loss, int, Index samples) {
    return weights_.add(grad_enabled() ? node_of(loss).get() : nullptr, static_cast<double>(value_of(loss).item()),
                        samples);
  }

  /// The stand-ins' nodes.
  const std::unordered_set<const Node*>& leaves() const { return leaves_; }

  /// Adds `scale` times the pass's gradients to the parameters' gradients.
  void add_to_parameters(double scale) {
    for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
      const void* const from = gradient(i);
      if (from == nullptr) continue;
      if (parameter(i).dtype() == DType::f32)
        add<float>(parameter(i), from, scale);
      else
        add<double>(parameter(i), from, scale);
      parameters_[i].handle.shared()->set_reached();
    }
  }

  /// The pass's node: see PassNode. `GivesLoss`: its result is the loss.
  template <bool GivesLoss, Real T, int Rank>
  Ref<PassNode<T, Rank, D>> node(const Tensor<T, Rank, D>& value, typename PassNode<T, Rank, D>::Back back) const {
    return Ref<PassNode<T, Rank, D>>(new PassNode<T, Rank, D>(value, parameter_nodes(), std::move(back)));
  }

 private:
  std::vector<Ref<Node>> parameter_nodes() const {
    std::vector<Ref<Node>> nodes;
    for (std::size_t i = 0; i < stand_ins_.size(); ++i)
      if (stand_ins_[i]) nodes.push_back(parameters_[i].handle.shared());
    return nodes;
  }
  void sum_tied(TiedParameters<D>& tied) {
    const MemoryScope memory(trace::Memory::gradients);
    sums_.resize(stand_ins_.size());
    tied.for_each(parameters_, [&](std::size_t i, auto& group) {
      if (!stand_ins_[i]) return;
      sums_[i] = Storage<D>(parameter(i).where(), parameter(i).size_bytes());
      if (const void* const own = parameter(i).grad_data_of(*stand_ins_[i]); own != nullptr)
        copy_bytes(D{}, sums_[i].data(), D{}, own, sums_[i].bytes());
      else
        zero_bytes(D{}, sums_[i].data(), sums_[i].bytes());
      TiedParameters<D>::sum(group, parameter(i), sums_[i].data());
    });
  }
  ParameterOn<D>& parameter(std::size_t i) const { return *parameters_[i].parameter; }
  const void* gradient(std::size_t i) const {
    if (!stand_ins_[i]) return nullptr;
    return i < sums_.size() && sums_[i] ? sums_[i].data() : parameter(i).grad_data_of(*stand_ins_[i]);
  }
  template <class T>
  static void add(ParameterOn<D>& parameter, const void* from, double scale) {
    auto* const to = static_cast<T*>(parameter.grad_place());
    if (!parameter.grad_arrived()) zero_bytes(parameter.where(), to, parameter.size_bytes());
    kernels::axpy(parameter.where(), parameter.count(), static_cast<T>(scale), static_cast<const T*>(from), to);
    parameter.set_grad_arrived(true);
  }

  const std::vector<nn::NamedParameter<D>>& parameters_;
  std::vector<Ref<Node>> stand_ins_;  // null for frozen parameters
  std::unordered_set<const Node*> leaves_;
  LossWeights weights_;
  std::vector<Storage<D>> sums_;  // of tied parameters
};

}  // namespace chorus::pipeline
