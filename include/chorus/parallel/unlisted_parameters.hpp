#pragma once
/// A warning of parameters that a model uses, and has not listed.

#include <algorithm>
#include <chorus/core/config.hpp>
#include <chorus/core/say.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::detail {

/// A member that CHORUS_MODULE does not list is an easy mistake: its parameters would stay as they are, without a word,
/// and all copies of the model share them. A policy watches what its model uses in the first forward pass that records
/// gradients.
class UnlistedParameters final : public ParameterWatch {
 public:
  template <Device D>
  explicit UnlistedParameters(const nn::FlatParameters<D>& flat) {
    for (const auto& entry : flat.entries()) listed_.push_back(&entry.parameter());
    std::sort(listed_.begin(), listed_.end(), std::less<>());
  }
  void saw(const void* parameter, Node&, std::span<const Index> extents, bool wants_grad) override;
  /// The pass has ended.
  void say_what_was_seen() const;

 private:
  std::vector<const void*> listed_;  // sorted
  std::vector<const void*> unlisted_;
  std::string shapes_;
};

/// While it lives, this thread's parameters are watched; by nothing, by none.
class WatchScope {
 public:
  explicit WatchScope(std::shared_ptr<UnlistedParameters> watch)
      : watch_(std::move(watch)), before_(std::exchange(parameter_watch, watch_.get())) {}
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;
  ~WatchScope();

 private:
  std::shared_ptr<UnlistedParameters> watch_;
  ParameterWatch* before_;
};

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/parallel/unlisted_parameters_impl.hpp>
#endif
