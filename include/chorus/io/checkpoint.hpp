#pragma once
/// Checkpoints: a model's file with all that is needed to go on training as if nothing had happened.

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
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

template <class Optimizer>
auto optimizer_places(Optimizer& optimizer) {
  using D = decltype(optimizer.device());
  std::vector<Incoming<D>> places;
  for (auto& tensor : optimizer.state()) {
    const auto device = tensor.on_host ? std::nullopt : std::optional<D>(optimizer.device());
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
/// same for the plain, the fused and the sharded form of an optimizer. Throws FileError.
template <class Net, class Optimizer>
void save_checkpoint(Net& net, Optimizer& optimizer, const TrainingPosition& position, const std::string& path) {
  if constexpr (requires { optimizer.gathered(net); }) {
    const auto whole = optimizer.gathered(net);
    if (net.communicator().rank() == 0) save_checkpoint(net, *whole, position, path);
  } else {
    detail::Outgoing out;
    detail::add_model<decltype(optimizer.device())>(out, net.module());
    for (const auto& tensor : detail::optimizer_places(optimizer))
      if (tensor.device)
        out.add(tensor.name, tensor.dtype, tensor.shape, *tensor.device, tensor.data);
      else
        out.add(tensor.name, tensor.dtype, tensor.shape, Cpu{}, tensor.data);
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

/// Restores what `save_checkpoint` wrote; every process calls it. Training then goes on bit for bit as it would have
/// without the break. Throws FileError, and changes nothing, where the file is damaged, is no checkpoint, or doesn't
/// fit.
template <class Net, class Optimizer>
TrainingPosition load_checkpoint(Net& net, Optimizer& optimizer, const std::string& path) {
  if constexpr (requires { optimizer.whole(net); }) {
    const auto whole = optimizer.whole(net);
    const auto position = load_checkpoint(net, *whole, path);
    optimizer.adopt(net, *whole);
    return position;
  } else {
    const SafetensorsReader file(path);
    const TrainingPosition position{detail::number_in(file, "training/epoch"),
                                    detail::number_in(file, "training/batch"),
                                    detail::number_in(file, "training/step")};
    const auto passes = detail::number_in(file, "training/forward_passes");
    auto wanted = detail::model_places(net.module());
    for (auto& place : detail::optimizer_places(optimizer)) wanted.push_back(std::move(place));
    detail::read_all(file, wanted, [](std::string_view) { return false; });
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
