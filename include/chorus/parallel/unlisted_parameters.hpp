#pragma once
/// A warning about parameters that a model uses but does not list.

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

/// It is an easy mistake to omit a member in CHORUS_MODULE: its parameters would silently not be trained, and all
/// copies of the model would share them. A policy watches which parameters its model uses in the first forward pass
/// that records gradients.
class UnlistedParameters final : public ParameterWatch {
 public:
  template <Device D>
  explicit UnlistedParameters(const nn::FlatParameters<D>& flat) {
    for (const auto& entry : flat.entries()) listed_.push_back(&entry.parameter());
    std::sort(listed_.begin(), listed_.end(), std::less<>());
  }
  void saw(const void* parameter, Node&, std::span<const Index> extents, bool wants_grad) override;
  /// The pass has ended: prints the warning if there is one.
  void report_seen() const;

 private:
  std::vector<const void*> listed_;  // sorted
  std::vector<const void*> unlisted_;
  std::string shapes_;
};

/// While it lives, `watch` records the parameters that this thread uses; null: no recording.
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
