#pragma once
/// The parameters and buffers that a model has when a policy takes it: flat buffers, copies and hooks are of those.

#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <string_view>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

class TakenHandles final : public nn::detail::Walker {
 public:
  explicit TakenHandles(nn::Module& model) { walk(model); }

  /// Throws UsageError where a layer has been given others since then; `policy` has taken the model.
  void check_kept(nn::Module& model, const char* policy) {
    next_ = 0;
    policy_ = policy;
    walk(model);
  }
  void parameter(std::string_view name, AnyParameter& handle) override { look(name, handle.shared()); }
  void buffer(std::string_view name, AnyBuffer& handle) override { look(name, handle.shared()); }

 private:
  void look(std::string_view name, const Ref<Node>& node) {
    const std::size_t i = next_++;
    if (i == nodes_.size()) nodes_.push_back(node);
    if (nodes_[i] != node)
      fail<UsageError>(policy_, ": '", path(name), "' has been replaced since the policy took the model, which ",
                       "its copies don't see: write numbers into the one that was there");
  }
  std::vector<Ref<Node>> nodes_;
  std::size_t next_ = 0;
  const char* policy_ = "";
};

}  // namespace chorus::inline CHORUS_ABI::detail
