#pragma once
/// Scalars that a model returned for several shares of a batch, on the tape.

#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/variable.hpp>
#include <vector>

namespace chorus::detail {

/// The node of a vector with a scalar from each device.
class OfDeviceScalars {
 public:
  /// The scalars' nodes; null for a scalar without one.
  virtual std::vector<Node*> scalars() const = 0;

 protected:
  ~OfDeviceScalars() = default;
};

/// Walks back from `node`, itself included, through nodes of scalars and vectors, and calls `found(node)` on each. Does
/// not go beyond a node for which it returns true.
template <Real T, Device D, class Found>
void search_tape(Node* node, const Found& found) {
  if (node == nullptr) return;
  FoundNodes nodes;
  nodes.add(*node);
  nodes.walk([&](Node& next) {
    return !found(next) && (dynamic_cast<GradNode<T, 0, D>*>(&next) != nullptr ||
                            dynamic_cast<GradNode<T, 1, D>*>(&next) != nullptr);
  });
}

}  // namespace chorus::detail
