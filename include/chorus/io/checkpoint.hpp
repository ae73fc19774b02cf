#pragma once
/// Checkpoints: a model's file with everything that an undisturbed continuation of training needs.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/io/data_hash.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/ranks_own.hpp>
#include <chorus/io/write_in_parts.hpp>
#include <chorus/optim/optimizer.hpp>

namespace chorus::io {

/// The progress of a run.
struct TrainingPosition {
  std::int64_t epoch = 0;  ///< complete epochs
  std::int64_t batch = 0;  ///< complete batches of the next epoch
  std::int64_t step = 0;   ///< optimizer steps in all
};

namespace detail {

/// Names, one a line, as in the file's metadata.
inline std::string lines_of(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += name + "\n";
  return text;
}
inline std::vector<std::string> lines_in(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}
inline std::vector<std::string> lines_in(const SafetensorsReader& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return lines_in(found != file.metadata().end() ? std::string_view(found->second) : std::string_view());
}

/// The tensors of the model and of `kept` (optimizers and others): their places, or `numbers`, which are copied from
/// them and back.
template <Device D, class Net, class Numbers, class... Kept>
std::vector<TensorPlace<D>> all_places(Net& net, Numbers& numbers, Kept&... kept) {
  auto all = [&] {
    if constexpr (keeps_parts<Net>)
      return places_in_parts<D>(net);
    else
      return model_places<D>(net.module());
  }();
  const auto add = [&](auto& x, auto& its_numbers) {
    for (auto& place : places_of<D>(x, its_numbers)) all.push_back(std::move(place));
  };
  std::apply([&](auto&... each) { (add(kept, each), ...); }, numbers);
  if constexpr (keeps_parts<Net>) choose_writers(net, all);
  return all;
}

/// Reads this process's part of a tensor.
template <Device D>
std::vector<std::byte> read_own(const SafetensorsReader& file, const TensorEntry& entry, const TensorPlace<D>& place) {
  std::vector<std::byte> numbers(place.bytes());
  place.for_runs([&](std::size_t in_whole, std::size_t here, std::size_t count) {
    file.read(entry, std::span(numbers).subspan(here, count), in_whole);
  });
  return numbers;
}

/// The texts of all ranks of a policy whose ranks have different tensors, without duplicates.
template <class Net>
std::vector<std::string> of_all_ranks(Net& net, const std::vector<std::string>& own) {
  if constexpr (!keeps_parts<Net>) {
    return own;
  } else {
    std::vector<std::string> all;
    for (const auto& text : comm::all_gather_object(net.communicator(), lines_of(own)))
      for (const auto& line : lines_in(text))
        if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(line);
    return all;
  }
}

/// Throws FileError if a counter of the host has an impossible value.
template <class... Kept, Device D>
void check_kept(const SafetensorsReader& file, const TensorPlace<D>& place, std::span<const std::byte> bytes) {
  const auto require = [&](bool sane) {
    check<FileError>(sane, "resuming from ", file.path(), ": tensor ", place.name, " has an invalid number");
  };
  if (!place.device && place.dtype == DType::i64) {
    std::int64_t steps = 0;
    std::memcpy(&steps, bytes.data(), sizeof steps);
    require(steps >= 0 && steps < std::int64_t{1} << 53);
  }
  const auto ask = [&]<class X>() {
    if constexpr (requires { &X::can_keep; }) {
      decltype(std::declval<const X&>().kept()) numbers;
      if (place.device || !place.name.ends_with(cat('/', X::kept_as))) return;
      std::memcpy(numbers.data(), bytes.data(), sizeof numbers);
      require(X::can_keep(numbers));
    }
  };
  (ask.template operator()<Kept>(), ...);
}

/// An optimizer's learning rate, as state that is kept from step to step.
class KeptRate {
 public:
  explicit KeptRate(optim::HasLearningRate& optimizer) : optimizer_(optimizer) {}
  static constexpr std::string_view kept_as = "lr";
  std::array<double, 1> kept() const { return {optimizer_.lr()}; }
  static bool can_keep(const std::array<double, 1>& kept) { return kept[0] >= 0 && std::isfinite(kept[0]); }
  void keep(const std::array<double, 1>& kept) { optimizer_.resume_lr(kept[0]); }

 private:
  optim::HasLearningRate& optimizer_;
};

/// The names of parameters, one a line, in the order in which gradients arrive. Throws FileError if a name repeats, or
/// if there are none for a model that `has_parameters`.
inline std::vector<std::string> parameter_order_in(const SafetensorsReader& file, bool has_parameters) {
  auto order = lines_in(file, "training/parameter_order");
  check<FileError>(!order.empty() || !has_parameters || !file.metadata().contains("training/parameter_order"),
                   "resuming from ", file.path(), ": training/parameter_order is empty");
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    fail<FileError>("resuming from ", file.path(), ": training/parameter_order has ", Quoted{*twice}, " twice");
  return order;
}

/// Replaces `numbers` by the mean of themselves and the numbers of the file's other tensors.
template <class T, Device D>
void take_mean(const SafetensorsReader& file, const TensorPlace<D>& tensor, std::span<std::byte> numbers) {
  const auto view = [](std::span<std::byte> bytes) {
    return std::span(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T));
  };
  const auto mean = view(numbers);
  std::vector<double> sums(mean.begin(), mean.end());
  for (const auto& name : tensor.mean_with) {
    auto other = read_own(file, file.at(name), tensor);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(view(other)[i]);
  }
  for (std::size_t i = 0; i < sums.size(); ++i)
    mean[i] = static_cast<T>(sums[i] / static_cast<double>(tensor.mean_with.size() + 1));
}

/// Checks that the file has exactly these tensors, and others only if `expected(name)` allows them; then reads them
/// all. Throws FileError with every missing, unexpected and mismatched name, and the exceptions of `judge(wanted,
/// bytes)` about a tensor's numbers, before anything is changed.
template <Device D, class Expected, class Judge>
void read_all(const SafetensorsReader& file, const std::vector<TensorPlace<D>>& wanted, const Expected& expected,
              const Judge& judge) {
  LoadReport report;
  const auto compare = [&](const TensorPlace<D>& tensor, const std::string& name) {
    const TensorEntry* entry = file.find(name);
    if (entry == nullptr)
      report.missing.push_back(name);
    else if (entry->dtype != file_dtype(tensor.dtype) || entry->shape != tensor.shape)
      report.mismatched.push_back({name, tensor.dtype, tensor.shape, entry->dtype, entry->shape});
  };
  for (const auto& tensor : wanted) {
    compare(tensor, tensor.name);
    for (const auto& name : tensor.mean_with) compare(tensor, name);
  }
  for (const TensorEntry& entry : file.entries())
    if (!expected(entry.name)) report.unexpected.push_back(entry.name);
  check<FileError>(report.complete(), "loading ", file.path(), ": the file doesn't fit the model; ", report,
                   "; resuming needs the model and the optimizer that were saved (io::load takes the model alone)");

  std::vector<std::vector<std::byte>> numbers;  // all are read before one is stored
  for (const auto& tensor : wanted) {
    const TensorEntry& entry = file.at(tensor.name);
    numbers.push_back(read_own(file, entry, tensor));
    check_bools(file, entry, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f32) take_mean<float>(file, tensor, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f64) take_mean<double>(file, tensor, numbers.back());
    judge(tensor, std::span<const std::byte>(numbers.back()));
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i].fill(numbers[i].data());
}

}  // namespace detail

/// Writes model, optimizer, learning rate and position to one file, atomically. The model's tensors have their own
/// names, so the file is also a model's file. One call on all ranks, under every policy: rank 0, or ParameterServer's
/// server, writes. If ranks have parts of the model (FullyShardedDataParallel, TensorParallel, Pipeline, Mesh), each
/// writes its parts into the one file. The plain, the fused and the sharded form of an optimizer give the same file.
/// `more`: other state that lives from step to step, such as GradScaler, ParameterAverage and ReduceOnPlateau; at most
/// one of each. Gradients are not saved: save between two steps. The seed is, and the number of `canonical_shares`.
///
/// The file holds each rank's own state: a hook's state, such as its error feedback, and under LocalSgd and
/// PostLocalSgd models, optimizers and `more`. Rank 0 temporarily holds the whole file in memory. Of parameters and
/// buffers that DistributedDataParallel ignores or doesn't broadcast, the file has rank 0's, and under ParameterServer
/// the server's. If the build has OpenSSL, the file has a checksum of its data (see data_hash_key), which
/// `load_checkpoint` and `io::load` compare.
///
/// Throws FileError, and CommError if some ranks don't call it and rank 0 needs their state.
template <class Net, class Optimizer, class... More>
void save_checkpoint(Net& net, Optimizer& optimizer, const TrainingPosition& position, const std::string& path,
                     More&... more) {
  if constexpr (requires { net.is_server(); })
    if (!net.is_server()) return;
  if constexpr (requires { optimizer.gathered(net); }) {
    const auto whole = optimizer.gathered(net);
    save_checkpoint(net, *whole, position, path, more...);
  } else {
    if constexpr (!detail::all_ranks_save<Net> && requires { net.communicator().rank(); })
      if (net.communicator().rank() != 0) return;
    using D = decltype(optimizer.device());
    detail::Outgoing out;
    detail::KeptRate rate(optimizer);
    std::tuple numbers{detail::numbers_of(optimizer), detail::numbers_of(rate), detail::numbers_of(more)...};
    const auto places = detail::all_places<D>(net, numbers, optimizer, rate, more...);
    if constexpr (!detail::keeps_parts<Net>) {
      for (const auto& tensor : places) out.add(tensor);
      if constexpr (detail::all_ranks_save<Net>)
        if (!detail::add_ranks_own<D>(out, net, places)) return;
    }
    Metadata metadata{{"training/epoch", cat(position.epoch)},
                      {"training/batch", cat(position.batch)},
                      {"training/step", cat(position.step)},
                      {"training/forward_passes", cat(net.forward_passes())},
                      {"training/seed", cat(net.seed())},
                      {"training/parameter_order",
                       detail::lines_of(detail::of_all_ranks(net, net.parameter_order()))}};
    if (const int shares = detail::shares_of(net); shares > 0)
      metadata.emplace(detail::canonical_shares_key, cat(shares));
    if constexpr (requires { chorus::detail::access_to(net).parameters_apart(); })
      metadata.emplace("training/parameters_apart",
                       detail::lines_of(chorus::detail::access_to(net).parameters_apart()));
    detail::note_model(metadata, net.module());
    if constexpr (detail::keeps_parts<Net>)
      detail::write_in_parts(net.communicator(), path, places, metadata);
    else
      write_safetensors(path, out.views(), metadata);
  }
}

/// Restores a file of `save_checkpoint`; every process calls it with the same `more`. Training then continues bit for
/// bit as without the break. With another number of ranks, each rank takes the mean of the ranks' own states, so that
/// no error feedback is lost. The same holds for models and optimizers that differed, if the policy never lets them
/// differ. A communication hook takes the parts of another hook's state that it knows, and starts anew if the file has
/// none; without a hook the state is ignored. The learning rate is the file's until a schedule sets it; the schedule
/// starts from the earlier rate. Throws FileError, and changes nothing, if the file is damaged, is no checkpoint,
/// doesn't fit, or isn't the same on all ranks; UsageError if the net has another seed or other `canonical_shares` than
/// the run; CommError if all ranks should call it and some don't.
///
/// With the run's number of `canonical_shares`, the bits don't depend on the policy, the number of devices or the order
/// of parameters in memory. A net with another number of shares (or none, if the run had some, and vice versa) would
/// end with the bits of neither run, so it is refused. A file without a number belongs to a run without shares.
/// `io::load` needs no number: it loads weights into any net, to start a new run.
template <class Net, class Optimizer, class... More>
TrainingPosition load_checkpoint(Net& net, Optimizer& optimizer, const std::string& path, More&... more) {
  if constexpr (requires { optimizer.whole(net); }) {
    const auto whole = optimizer.whole(net);
    const auto position = load_checkpoint(net, *whole, path, more...);
    optimizer.adopt(net, *whole);
    return position;
  } else {
    using D = decltype(optimizer.device());
    TrainingPosition position;
    const auto file = detail::open_on_all_ranks(path, net, [&](const SafetensorsReader& opened) {
      position = {detail::number_in(opened, "training/epoch"), detail::number_in(opened, "training/batch"),
                  detail::number_in(opened, "training/step")};
      return position.step;
    });
    const auto passes = detail::number_in(file, "training/forward_passes", UINT32_MAX);
    const auto order = detail::parameter_order_in(file, !net.parameter_order().empty());
    detail::KeptRate rate(optimizer);
    std::tuple numbers{detail::numbers_of(optimizer), detail::numbers_of(rate), detail::numbers_of(more)...};
    auto wanted = detail::all_places<D>(net, numbers, optimizer, rate, more...);
    const auto rate_name = cat(detail::training_prefix, rate.kept_as);
    if (file.find(rate_name) == nullptr)  // older files have none
      std::erase_if(wanted, [&](const auto& tensor) { return tensor.name == rate_name; });
    std::vector<std::string> own_names;
    for (const auto& tensor : wanted) own_names.push_back(tensor.name);
    const auto all_names = detail::of_all_ranks(net, own_names);
    const std::set<std::string, std::less<>> names(all_names.begin(), all_names.end());
    for (auto& tensor : wanted) {
      detail::choose_among_ranks(file, tensor, net, detail::ranks_may_differ<Net>);
    }
    detail::HookReading<D, Net> hook(file, net, wanted);
    detail::read_all(
        file, wanted, [&](std::string_view name) { return detail::is_ranks_own(name) || names.contains(name); },
        [&](const auto& place, std::span<const std::byte> bytes) {
          detail::check_kept<detail::KeptRate, More...>(file, place, bytes);
          detail::check_kept<std::remove_cvref_t<decltype(detail::keeper_of(net))>>(file, place, bytes);
        });
    detail::say_changed<D>(net.module());
    const auto give_back = [](auto& kept, const auto& read) {
      if constexpr (requires { kept.keep(read); }) kept.keep(read);
    };
    const auto give_back_all = [&](auto&, auto& of_rate, auto&... others) {
      give_back(rate, of_rate);
      (give_back(more, others), ...);
    };
    std::apply(give_back_all, numbers);
    net.set_forward_passes(static_cast<std::uint32_t>(passes));
    if constexpr (requires { chorus::detail::access_to(net).set_parameter_order(order); })
      chorus::detail::access_to(net).set_parameter_order(order, passes > 0);
    if constexpr (requires { chorus::detail::access_to(net).parameters_apart(); })
      chorus::detail::access_to(net).set_parameters_apart(detail::lines_in(file, "training/parameters_apart"));
    hook.give(net);
    return position;
  }
}

}  // namespace chorus::io
