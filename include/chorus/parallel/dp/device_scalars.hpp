#pragma once
/// Scalars that a model has returned for several shares of a batch, on the tape.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <vector>

namespace chorus::detail {

/// The node of a vector that has a scalar from each device.
class OfDeviceScalars {
 public:
  /// The scalars' nodes; null where there is none.
  virtual std::vector<Node*> scalars() const = 0;

 protected:
  ~OfDeviceScalars() = default;
};

/// Calls `found(node)` on the nearest nodes from which `node` was made, itself included, for which it returns true, on
/// ways through scalars and vectors.
template <Real T, Device D, class Found>
void search_tape(Node* node, const Found& found) {
  if (node == nullptr) return;
  std::vector<Node*> nodes{node};
  for (std::size_t next = 0; next < nodes.size(); ++next) {
    if (found(*nodes[next])) continue;
    if (dynamic_cast<GradNode<T, 0, D>*>(nodes[next]) == nullptr &&
        dynamic_cast<GradNode<T, 1, D>*>(nodes[next]) == nullptr)
      continue;
    nodes[next]->for_each_input(
        [](Node& input, void* context) {
          auto& known = *static_cast<std::vector<Node*>*>(context);
          if (std::find(known.begin(), known.end(), &input) == known.end()) known.push_back(&input);
        },
        &nodes);
  }
}

}  // namespace chorus::detail
