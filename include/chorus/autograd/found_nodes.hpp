#pragma once
/// A backward walk over the tape that stops where the caller decides.

#include <chorus/autograd/node.hpp>
#include <cstddef>
#include <unordered_set>
#include <vector>

namespace chorus::detail {

/// Nodes of the tape without duplicates, in the order of discovery.
class FoundNodes {
 public:
  void add(Node& node) {
    if (known_.insert(&node).second) nodes_.push_back(&node);
  }
  void add_inputs_of(const Node& node) {
    node.for_each_input([](Node& input, void* found) { static_cast<FoundNodes*>(found)->add(input); }, this);
  }
  /// Adds the inputs of every node for which `goes_on(node)` is true, newly added nodes included.
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
