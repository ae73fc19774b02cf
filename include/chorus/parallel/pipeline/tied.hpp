#pragma once
/// Parameters that layers of several stages share, often an embedding and the output layer.

#include <chorus/comm/split.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// The rank of each of these stages has a copy of a tied parameter. They sum its gradients, with equal bits on all of
/// them, and all take the same step.
template <Device D>
class TiedParameters {
 public:
  /// `owners[i]`: the ranks that have parameter i of the whole model, in any order. A collective.
  TiedParameters(comm::AnyCommunicator& all, const comm::World& world, const std::vector<Node*>& parameters,
                 const std::vector<std::vector<int>>& owners) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (owners[i].size() < 2) continue;
      bool mine = false;
      for (const int rank : owners[i]) mine = mine || rank == all.rank();
      Group* group = nullptr;
      for (Group& known : groups_)
        if (known.ranks == owners[i]) group = &known;
      if (group == nullptr) {
        groups_.push_back({owners[i], std::nullopt, {}});
        group = &groups_.back();
        auto communicator = comm::connect(comm::split(all, world, mine ? 0 : 1 + all.rank()));
        if (mine) group->communicator.emplace(std::move(communicator));
      }
      if (mine) group->parameters.push_back(parameters[i]);
    }
  }

  /// Calls `f(i, communicator)` for each tied parameter of `own`, this rank's, in the order of the model's members.
  template <class F>
  void for_each(const std::vector<nn::NamedParameter<D>>& own, const F& f) {
    for (Group& group : groups_)
      for (const Node* parameter : group.parameters)
        for (std::size_t i = 0; i < own.size(); ++i)
          if (own[i].handle.shared().get() == parameter) f(i, *group.communicator);
  }
  static void sum(comm::AnyCommunicator& group, const ParameterOn<D>& parameter, void* numbers) {
    const auto count = static_cast<std::size_t>(parameter.count());
    const auto add_up = [&]<class T>(T* of_type) {
      group.all_reduce(std::span(of_type, count), comm::ReduceOp::sum, {.traffic = trace::Traffic::gradients});
    };
    if (parameter.dtype() == DType::f32)
      add_up(static_cast<float*>(numbers));
    else
      add_up(static_cast<double*>(numbers));
  }
  /// The ranks that have that parameter; null if this rank has none of it, or all of it.
  comm::AnyCommunicator* group_of(const Node& parameter) {
    for (Group& group : groups_)
      for (const Node* known : group.parameters)
        if (known == &parameter) return &*group.communicator;
    return nullptr;
  }
  /// Whether this rank has a tied parameter.
  bool any() const {
    for (const Group& group : groups_)
      if (group.communicator) return true;
    return false;
  }
  /// Whether this rank's numbers count, if each parameter must count once.
  bool counts_here(const Node& parameter, int rank) const {
    for (const Group& group : groups_)
      for (const Node* known : group.parameters)
        if (known == &parameter) return group.ranks.front() == rank;
    return true;
  }
  void abort(std::string_view why) noexcept {
    for (Group& group : groups_)
      if (group.communicator) group.communicator->abort(why);
  }

 private:
  struct Group {
    std::vector<int> ranks;
    std::optional<comm::AnyCommunicator> communicator;  // set if this rank belongs to it
    std::vector<const Node*> parameters;
  };
  std::vector<Group> groups_;
};

}  // namespace chorus::pipeline
