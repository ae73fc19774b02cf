#pragma once
/// The experts of a model that a group of ranks divides: each rank's part, and the group by which tokens travel.

#include <chorus/comm/algorithms/all_to_all.hpp>
#include <chorus/nn/mixture_of_experts.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <chorus/parallel/tensor/group.hpp>
#include <chorus/parallel/tensor/split_parameters.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

/// The parameters of a model's experts, each once.
template <Device D>
class ExpertParameters final : public nn::detail::Walker {
 public:
  using Item = typename SplitParameters<D>::Item;

  explicit ExpertParameters(nn::Module& model) { walk(model); }
  const std::vector<Item>& items() const { return items_; }

  void module(std::string_view name, nn::Module& child) override {
    const bool around = std::exchange(of_experts_, dynamic_cast<nn::ExpertLayer*>(&child) != nullptr);
    Walker::module(name, child);
    of_experts_ = around;
  }
  void parameter(std::string_view name, AnyParameter& handle) override {
    if (!of_experts_) return;
    for (const Item& item : items_)
      if (item.handle.shared() == handle.shared()) return;
    items_.push_back({path(name), handle, {}});
  }

 private:
  std::vector<Item> items_;
  bool of_experts_ = false;
};

/// Tokens travel among the ranks of `experts`; `replicas` have the same experts.
template <class Communicator>
class ExpertRanks final : public CommunicatorGroup<Communicator, nn::ExpertGroup> {
  using Base = CommunicatorGroup<Communicator, nn::ExpertGroup>;

 public:
  ExpertRanks(Communicator& experts, Communicator& replicas) : Base(experts, false), replicas_(replicas) {}
  bool has_replicas() const override { return replicas_.size() > 1; }

 protected:
  void exchange(const void* in, std::span<const std::size_t> sends, void* out, std::span<const std::size_t> receives,
                DType type) override {
    const auto sum = [](std::span<const std::size_t> counts) {
      return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    };
    Base::of_type(type, [&]<class T>(T) {
      comm::all_to_all_v(this->living(), std::span(static_cast<const T*>(in), sum(sends)), sends,
                         std::span(static_cast<T*>(out), sum(receives)), receives,
                         {.traffic = trace::Traffic::activations});
    });
  }
  void add_replicas(void* values, std::size_t count, DType type) override {
    this->living();
    Base::of_type(type, [&]<class T>(T) {
      replicas_.all_reduce(std::span(static_cast<T*>(values), count), comm::ReduceOp::sum,
                           {.traffic = trace::Traffic::gradients});
    });
  }

 private:
  Communicator& replicas_;
};

/// As SharedLayers, for experts. `all`: `experts` of each of the `replicas`.
template <class Communicator>
class SharedExperts {
 public:
  SharedExperts(Communicator& all, Communicator& experts, Communicator& replicas)
      : all_(all),
        experts_(experts),
        group_(std::make_shared<ExpertRanks<Communicator>>(experts, replicas)) {}
  SharedExperts(const SharedExperts&) = delete;
  SharedExperts& operator=(const SharedExperts&) = delete;
  ~SharedExperts() { group_->end(); }

  /// Compares the ranks' models, takes rank 0's parameters and keeps this rank's experts. Throws UsageError, on all
  /// ranks, if models differ, if there are no experts, and if a rank would get none.
  template <class Model>
  Model share_out(Model model) {
    using D = typename nn::detail::DeviceOfModel<Model>::type;
    static_assert(std::is_same_v<D, Cpu>, "Expert: expected a model on the CPU");
    check_same_description(all_, "Expert", model_description<D>(model, [](const auto&) { return true; }));
    const ExpertParameters<D> experts(model);
    if (experts_.size() == 1) return model;
    check<UsageError>(!experts.items().empty(), "Expert: expected a model with experts, such as nn::MixtureOfExperts");
    for (const auto& item : experts.items()) {
      const auto& parameter = item.parameter();
      check<UsageError>(parameter.part() == nullptr, "Expert: '", item.name, "' is already split by another policy");
      check<UsageError>(parameter.extents()[0] >= experts_.size(), "Expert: expected at least one expert for each of ",
                        experts_.size(), " ranks, got ", parameter.extents()[0], " in '", item.name, "'");
    }
    take_rank_0s<D>(model, all_);
    for (const auto& item : experts.items()) cut<D>(item, group_);
    return model;
  }

  /// No layer but experts is split.
  std::shared_ptr<TensorGroup> group() const { return nullptr; }

  /// Calls `f` with a copy of the model that has all experts, on every rank; writes of `f` persist. All ranks call it.
  template <class Model, class F>
  void with_whole(Model& model, const F& f) {
    with_joined<ExpertParameters<typename nn::detail::DeviceOfModel<Model>::type>>(model, experts_, f);
  }

 private:
  Communicator &all_, &experts_;
  std::shared_ptr<ExpertRanks<Communicator>> group_;
};

}  // namespace chorus::detail
