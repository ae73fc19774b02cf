#pragma once
/// Recomputes batch norm's running statistics for parameters that were not trained directly, such as averages.

#include <chorus/autograd/variable.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::optim {

namespace detail {

/// Puts a model into training mode, with cumulative averages in its batch norms; restores everything at the end.
class BatchNormPasses {
 public:
  explicit BatchNormPasses(nn::Module& model) {
    struct Modules final : nn::detail::Walker {
      std::vector<nn::Module*> all;
      void enter(nn::Module& module) override { all.push_back(&module); }
    } modules;
    modules.all.push_back(&model);
    modules.walk(model);
    for (nn::Module* module : modules.all) {
      modes_.emplace_back(module, module->training());
      auto* norm = dynamic_cast<nn::RunningStatistics*>(module);
      if (norm == nullptr || !norm->tracks_running_stats()) continue;
      any_ = true;
      if (is_here(*module)) norms_.emplace_back(norm, norm->momentum());
    }
  }
  void begin() {
    for (const auto& [module, training] : modes_) module->set_own_training(true);
    for (const auto& [norm, momentum] : norms_) {
      norm->reset_running_stats();
      norm->set_momentum(std::nullopt);
    }
  }
  ~BatchNormPasses() {
    for (const auto& [module, training] : modes_) module->set_own_training(training);
    for (const auto& [norm, momentum] : norms_) norm->set_momentum(momentum);
  }
  BatchNormPasses(const BatchNormPasses&) = delete;
  BatchNormPasses& operator=(const BatchNormPasses&) = delete;

  /// The batch norms whose statistics are in this process.
  const auto& norms() const { return norms_; }
  /// Whether the model has one in any process.
  bool any() const { return any_; }

 private:
  // Whether its buffers are here and not in another pipeline stage.
  static bool is_here(nn::Module& norm) {
    struct Look final : nn::detail::Walker {
      bool here = true;
      void buffer(std::string_view, AnyBuffer& handle) override {
        const auto* const buffer = dynamic_cast<const BufferOn<Cpu>*>(handle.shared().get());
        here = here && (buffer == nullptr || buffer->is_here());
      }
    } look;
    look.walk(norm);
    return look.here;
  }

  bool any_ = false;
  std::vector<std::pair<nn::Module*, bool>> modes_;
  std::vector<std::pair<nn::RunningStatistics*, std::optional<double>>> norms_;
};

/// A model's input: the first part of a loader's batch, or all of it.
template <class Batch>
const auto& input_of(const Batch& batch) {
  if constexpr (AnyTensor<Batch>)
    return batch;
  else if constexpr (requires { batch.template get<0>(); })
    return batch.template get<0>();
  else
    return std::get<0>(batch);
}

/// Replaces each rank's statistics by the mean over ranks, weighted by their number of batches.
template <class Net>
void average_statistics(Net& net, const BatchNormPasses& passes) {
  std::vector<double> numbers;
  for (const auto& [norm, momentum] : passes.norms()) {
    auto own = norm->running_stats();
    for (std::size_t i = 1; i < own.size(); ++i) own[i] *= own[0];
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  net.sum(std::span(numbers));
  auto at = numbers.begin();
  for (const auto& [norm, momentum] : passes.norms()) {
    const double batches = *at++;
    const auto end = at + static_cast<std::ptrdiff_t>(norm->running_stats().size() - 1);
    for (auto number = at; number != end; ++number) *number /= batches;
    if (batches > 0) norm->set_running_stats({at, end});
    at = end;
  }
}

}  // namespace detail

/// Recomputes the running statistics of all batch norms in `net`, a policy or a model: the means over all batches of
/// `passes`, with equal weights (torch.optim.swa_utils.update_bn). `passes` is a loader, whose batches' first part is
/// the net's input, or a function that calls the net any number of times:
///   optim::AveragedScope use{average, net};
///   optim::update_bn(net, loader);
///   optim::update_bn(net, [&] { for (auto& [x, mask, y] : loader) net(x, mask); });
/// Meanwhile the net is in training mode and records no gradients. Afterwards the modes and momenta of its modules are
/// restored.
///
/// All ranks must call it, each with its share of the batches. The result is the mean over all ranks' statistics, the
/// same on all ranks. Under DataParallel statistics are those of the first device's shares, as in training; with
/// SyncBatchNorm those of whole batches, under every policy. Does nothing without batch norms that have running
/// statistics. Without batches the statistics are those of new layers.
template <class Net, class Passes>
void update_bn(Net& net, Passes&& passes) {
  auto& model = [&]() -> auto& {
    if constexpr (requires { net.module(); })
      return net.module();
    else
      return net;
  }();
  detail::BatchNormPasses scope(model);
  if (!scope.any()) return;
  scope.begin();
  {
    const NoGrad no_grad;
    if constexpr (std::is_invocable_v<Passes&>)
      passes();
    else
      for (auto&& batch : passes) net(detail::input_of(batch));
  }
  if constexpr (requires { requires Net::distributed; }) detail::average_statistics(net, scope);
}

}  // namespace chorus::optim
