#pragma once
/// The parameters and buffers of a model when a policy takes it: flat buffers, copies and hooks refer to these.

#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <string_view>
#include <vector>

namespace chorus::detail {

class ModelHandles final : public nn::detail::Walker {
 public:
  explicit ModelHandles(nn::Module& model) {
    walk(model);
    taken_ = true;
  }

  /// Throws UsageError if the model has other parameters or buffers now.
  void check_kept(nn::Module& model) {
    next_ = 0;
    walk(model);
    check<UsageError>(next_ == nodes_.size(), "policy: the model lost ", nodes_.size() - next_,
                      " parameters and buffers after the policy took it");
  }
  /// Also throws if another policy has moved them out of `flat`.
  template <class Flat>
  void check_kept(nn::Module& model, const Flat& flat) {
    check_kept(model);
    if (const auto* entry = flat.taken_away())
      fail<UsageError>("policy: the model's '", entry->named.name,
                       "' now belongs to another policy: give each policy its own model, such as nn::copy_of(model)");
  }
  void parameter(std::string_view name, AnyParameter& handle) override { look(name, handle.shared()); }
  void buffer(std::string_view name, AnyBuffer& handle) override { look(name, handle.shared()); }

 private:
  void look(std::string_view name, const Ref<Node>& node) {
    if (!taken_) return nodes_.push_back(node);
    if (next_ == nodes_.size() || nodes_[next_] != node)
      fail<UsageError>("policy: the model's '", path(name),
                       "' was added or replaced after the policy took the model: write values into the original");
    ++next_;
  }

  std::vector<Ref<Node>> nodes_;
  std::size_t next_ = 0;
  bool taken_ = false;
};

}  // namespace chorus::detail
