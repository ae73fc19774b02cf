#pragma once
/// The time of each layer of a model, for a cut: ByTime{layer_times(model, x)}.

#include <chorus/parallel/pipeline/chain.hpp>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace chorus {

/// Seconds that each layer of CHORUS_PIPELINE takes for its second forward; backward takes about twice as long in all
/// of them. `x` and `targets`: the arguments of the model's later calls. Draws the model's random numbers as outside of
/// any policy.
template <class Model, class X, class... Targets>
[[gnu::cold]] std::vector<double> layer_times(Model& model, const X& x, const Targets&... targets) {
  using Chain = pipeline::Chain<Model, X, Targets...>;
  std::vector<double> seconds;
  const NoGrad no_grad;
  for (int round = 0; round < 2; ++round) {
    seconds.clear();
    const nn::detail::Stashes<typename Model::device_type> stashes;
    std::shared_ptr<pipeline::AnyActivation<typename Model::device_type>> input =
        std::make_shared<pipeline::Activation<X>>(x);
    for (const pipeline::Place& place : pipeline::places_of(model)) {
      const auto begin = std::chrono::steady_clock::now();
      auto outcome = Chain::run(model, {place, 1}, *input, targets...);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      input = std::move(outcome.output);
    }
  }
  return seconds;
}

}  // namespace chorus
