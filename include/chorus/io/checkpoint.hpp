#pragma once
/// Checkpoints: a model's file with all that is needed to go on training as if nothing had happened.

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <chorus/io/load_model.hpp>
#include <chorus/optim/optimizer.hpp>

namespace chorus::inline CHORUS_ABI::io {

/// How far a run has come.
struct TrainingPosition {
  std::int64_t epoch = 0;  ///< epochs that are complete
  std::int64_t batch = 0;  ///< batches of the next one that are done
  std::int64_t step = 0;   ///< optimizer steps in all
};

namespace detail {

/// The numbers that `x` keeps from step to step, such as a loss scale; none where it keeps tensors.
template <class X>
auto numbers_of(const X& x) {
  if constexpr (requires { x.kept(); })
    return x.kept();
  else
    return std::array<double, 0>{};
}

/// Where that lies which `x` keeps: its tensors, or `numbers`, which are taken from it and given back to it.
template <Device D, class X, std::size_t N>
std::vector<Incoming<D>> places_of(X& x, std::array<double, N>& numbers) {
  std::vector<Incoming<D>> places;
  if constexpr (N > 0)
    places.push_back({cat(training_prefix, X::kept_as), DType::f64, {Index{N}}, {}, numbers.data()});
  else
    for (auto& tensor : x.state()) {
      const auto device = tensor.on_host ? std::nullopt : std::optional<D>(x.device());
      places.push_back({cat(training_prefix, tensor.name), tensor.dtype, std::move(tensor.shape), device, tensor.data});
    }
  return places;
}

inline std::int64_t number_in(const SafetensorsReader& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  check<FileError>(found != file.metadata().end(), "resuming from ", file.path(), ": the file holds a model, but no ",
                   key, ": it is not a checkpoint of a training run");
  std::int64_t value = 0;
  const auto& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check<FileError>(error == std::errc{} && end == text.data() + text.size() && value >= 0, "resuming from ",
                   file.path(), ": ", key, " is '", text, "', expected a number");
  return value;
}

}  // namespace detail

/// Writes model, optimizer and position to one file, atomically. The model's tensors have their own names, so the file
/// is also a model's file. One process calls it; with a ShardedOptimizer all do, and rank 0 writes. The file is the
/// same for the plain, the fused and the sharded form of an optimizer. `more`: what else goes on from step to step, as
/// GradScaler, ParameterAverage and ReduceOnPlateau do; at most one of each. What a communication hook keeps (errors
/// fed back, steps of its warm-up) is each rank's own and not in the file. Throws FileError.
template <class Net, class Optimizer, class... More>
void save_checkpoint(Net& net, Optimizer& optimizer, const TrainingPosition& position, const std::string& path,
                     More&... more) {
  if constexpr (requires { optimizer.gathered(net); }) {
    const auto whole = optimizer.gathered(net);
    if (net.communicator().rank() == 0) save_checkpoint(net, *whole, position, path, more...);
  } else {
    using D = decltype(optimizer.device());
    detail::Outgoing out;
    detail::add_model<D>(out, net.module());
    const auto add = [&](auto& kept) {
      auto numbers = detail::numbers_of(kept);
      for (const auto& tensor : detail::places_of<D>(kept, numbers))
        if (tensor.device)
          out.add(tensor.name, tensor.dtype, tensor.shape, *tensor.device, tensor.data);
        else
          out.add(tensor.name, tensor.dtype, tensor.shape, Cpu{}, tensor.data);
    };
    add(optimizer);
    (add(more), ...);
    std::string order;
    for (const auto& name : net.parameter_order()) order += name + "\n";
    write_safetensors(path, out.views(),
                      {{"training/epoch", cat(position.epoch)},
                       {"training/batch", cat(position.batch)},
                       {"training/step", cat(position.step)},
                       {"training/forward_passes", cat(net.forward_passes())},
                       {"training/parameter_order", order}});
  }
}

/// Restores what `save_checkpoint` wrote; every process calls it, with the same `more`. Training then goes on bit for
/// bit as it would have without the break, unless a communication hook has a memory. Throws FileError, and changes
/// nothing, where the file is damaged, is no checkpoint, or doesn't fit.
template <class Net, class Optimizer, class... More>
TrainingPosition load_checkpoint(Net& net, Optimizer& optimizer, const std::string& path, More&... more) {
  if constexpr (requires { optimizer.whole(net); }) {
    const auto whole = optimizer.whole(net);
    const auto position = load_checkpoint(net, *whole, path, more...);
    optimizer.adopt(net, *whole);
    return position;
  } else {
    const SafetensorsReader file(path);
    const TrainingPosition position{detail::number_in(file, "training/epoch"),
                                    detail::number_in(file, "training/batch"),
                                    detail::number_in(file, "training/step")};
    const auto passes = detail::number_in(file, "training/forward_passes");
    auto wanted = detail::model_places(net.module());
    const auto want = [&](auto& kept, auto& numbers) {
      for (auto& place : detail::places_of<decltype(optimizer.device())>(kept, numbers))
        wanted.push_back(std::move(place));
    };
    std::tuple numbers{detail::numbers_of(optimizer), detail::numbers_of(more)...};
    std::apply([&](auto& first, auto&... others) { want(optimizer, first), (want(more, others), ...); }, numbers);
    detail::read_all(file, wanted, [](std::string_view) { return false; });
    const auto give_back = [](auto& kept, const auto& read) {
      if constexpr (requires { kept.keep(read); }) kept.keep(read);
    };
    std::apply([&](auto&, auto&... others) { (give_back(more, others), ...); }, numbers);
    net.set_forward_passes(static_cast<std::uint32_t>(passes));
    if constexpr (requires { net.set_parameter_order(std::vector<std::string>(), true); }) {
      std::vector<std::string> order;
      std::string_view text;
      if (const auto found = file.metadata().find("training/parameter_order"); found != file.metadata().end())
        text = found->second;
      while (!text.empty()) {
        const auto end = text.find('\n');
        order.emplace_back(text.substr(0, end));
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
      }
      net.set_parameter_order(order, passes > 0);
    }
    return position;
  }
}

}  // namespace chorus::inline CHORUS_ABI::io
