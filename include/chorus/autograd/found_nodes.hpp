#pragma once
/// A walk back over the tape that ends where the caller says.

#include <chorus/autograd/node.hpp>
#include <cstddef>
#include <unordered_set>
#include <vector>

namespace chorus::detail {

/// Nodes of the tape, each once, in the order in which they were found.
class FoundNodes {
 public:
  void add(Node& node) {
    if (known_.insert(&node).second) nodes_.push_back(&node);
  }
  void add_inputs_of(const Node& node) {
    node.for_each_input([](Node& input, void* found) { static_cast<FoundNodes*>(found)->add(input); }, this);
  }
  /// Adds the inputs of all nodes for which `goes_on(node)`, those that are added included.
  template <class GoesOn>
  void walk(const GoesOn& goes_on) {
    for (std::size_t next = 0; next < nodes_.size(); ++next)
      if (goes_on(*nodes_[next])) add_inputs_of(*nodes_[next]);
  }

  bool has(const Node& node) const { return known_.contains(&node); }
  const std::vector<Node*>& all() const { return nodes_; }

 private:
  std::vector<Node*> nodes_;
  std::unordered_set<const Node*> known_;
};

}  // namespace chorus::detail
