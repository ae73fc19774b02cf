#pragma once
/// The layers of a model that a group of ranks divides, for policies: their parts, and the group that operators use.

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <chorus/parallel/tensor/group.hpp>
#include <chorus/parallel/tensor/split_parameters.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace chorus::detail {

template <class Communicator>
class SharedLayers {
 public:
  SharedLayers(Communicator& communicator, bool splits_sequences)
      : SharedLayers(communicator,
                     std::make_shared<CommunicatorGroup<Communicator>>(communicator, splits_sequences)) {}
  SharedLayers(Communicator& communicator, std::shared_ptr<CommunicatorGroup<Communicator>> group)
      : communicator_(communicator), group_(std::move(group)) {}
  SharedLayers(const SharedLayers&) = delete;
  SharedLayers& operator=(const SharedLayers&) = delete;
  ~SharedLayers() { group_->end(); }

  /// Compares the ranks' models, takes rank 0's parameters and keeps this rank's part of them. `options` must be the
  /// same on all ranks, too. Throws UsageError, on all ranks, if they differ, if no layer can be divided, and if a rank
  /// would get nothing of one.
  template <class Model>
  Model share_out(Model model, const std::string& options = "") {
    using D = typename nn::detail::DeviceOfModel<Model>::type;
    if constexpr (!std::is_same_v<D, Cpu>)
      check<UsageError>(communicator_.takes_device_memory(),
                        "TensorParallel: expected a communicator for the memory of ", D::kind,
                        ", such as comm::StagedCommunicator, got ", communicator_.backend());
    for (const auto& named : nn::named_parameters<D>(model))
      check<UsageError>(named.parameter->part() == nullptr, "TensorParallel: '", named.name,
                        "' is already split by another policy");
    const auto all = [](const auto&) { return true; };
    check_same_description(communicator_, "TensorParallel", options + model_description<D>(model, all));
    const SplitParameters<D> split(model);
    if (communicator_.size() == 1) return model;
    check<UsageError>(!split.items().empty(), "TensorParallel: the model has no layer that can be split: expected ",
                      "ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding, MultiheadAttention, ",
                      "the layers of transformers or a SplitParameter");
    take_rank_0s<D>(model, communicator_);
    for (const auto& item : split.items()) cut<D>(item, group_);
    return model;
  }

  /// For TensorGroupScope: the group that layers use in a forward pass; null if layers are whole.
  std::shared_ptr<TensorGroup> group() const {
    return communicator_.size() > 1 ? std::shared_ptr<TensorGroup>(group_) : nullptr;
  }

  /// Calls `f` with a whole copy of a divided model, on every rank; writes of `f` persist. All ranks call it.
  template <class Model, class F>
  void with_whole(Model& model, const F& f) {
    with_joined<SplitParameters<typename nn::detail::DeviceOfModel<Model>::type>>(model, communicator_, f);
  }

 private:
  Communicator& communicator_;
  std::shared_ptr<CommunicatorGroup<Communicator>> group_;
};

}  // namespace chorus::detail
