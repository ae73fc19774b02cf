#pragma once
/// Each rank's own state in a checkpoint: rank 0's tensors have plain names, those of the other ranks a prefix.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <chorus/core/shares.hpp>
#include <chorus/io/data_hash.hpp>
#include <chorus/io/model_file_impl.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/write_in_parts_impl.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/access.hpp>

namespace chorus::io::detail {

inline constexpr std::string_view hook_prefix = "training/hook/", rank_prefix = "training/rank";

/// Whether a tensor of a file belongs to a communication hook, or to a rank other than 0.
inline bool is_ranks_own(std::string_view name) {
  return name.starts_with(hook_prefix) || name.starts_with(rank_prefix);
}

/// The name of tensor `name` of rank `rank`: `training/rank1/hook/rest.fc1.weight`, `training/rank1/model/fc1.weight`.
inline std::string name_of_rank(int rank, std::string_view name) {
  if (rank == 0) return std::string(name);
  const bool of_model = !name.starts_with(training_prefix);
  return cat(rank_prefix, rank, '/', of_model ? "model/" : "", of_model ? name : name.substr(training_prefix.size()));
}

/// The numbers that `x` keeps from step to step, such as a loss scale; none if its state is tensors.
template <class X>
auto numbers_of(const X& x) {
  if constexpr (requires { x.kept(); })
    return x.kept();
  else
    return std::array<double, 0>{};
}

/// The places of the state of `x`: its tensors, or `numbers`, which are copied from it and back.
template <Device D, class X, std::size_t N>
std::vector<TensorPlace<D>> places_of(X& x, std::array<double, N>& numbers) {
  std::vector<TensorPlace<D>> places;
  if constexpr (N > 0)
    places.push_back({cat(training_prefix, X::kept_as), DType::f64, {Index{N}}, {}, numbers.data()});
  else
    for (auto& tensor : x.state()) {
      const auto device = tensor.on_host ? std::nullopt : std::optional<D>(x.device());
      places.push_back({.name = cat(training_prefix, tensor.name),
                        .dtype = tensor.dtype,
                        .shape = std::move(tensor.shape),
                        .device = device,
                        .data = tensor.data,
                        .part_begin = tensor.part_begin,
                        .part_count = tensor.part_count,
                        .part = tensor.part});
    }
  return places;
}

/// Whether ranks may have different models and optimizers.
template <class Net>
constexpr bool ranks_may_differ = requires {
  requires chorus::detail::AccessTo<Net>::ranks_may_differ;
};
/// Whether all ranks take part in writing a checkpoint: for one of these reasons, or because a communication hook has
/// state.
template <class Net>
constexpr bool all_ranks_save = keeps_parts<Net> || ranks_may_differ<Net> || requires {
  requires chorus::detail::AccessTo<Net>::hook_remembers;
};

/// A number that differs for files with different contents, almost surely.
[[gnu::cold]] inline std::size_t fingerprint(const SafetensorsReader& file) {
  std::size_t all = 0;
  const auto add = [&](std::string_view text) { all = all * 31 + std::hash<std::string_view>()(text); };
  for (const auto& [key, value] : file.metadata()) add(key), add(value);
  std::string bytes;
  for (const TensorEntry& entry : file.entries()) {
    bytes.resize(entry.bytes);
    file.read(entry, std::as_writable_bytes(std::span(bytes)));
    add(entry.name), add(bytes);
  }
  return all;
}

/// A rank's report about its file before it loads it.
struct Opened {
  std::int64_t found = 0, step = 0, fingerprint = 0, seed = 0;  // the seed is the net's
};

/// Throws FileError if some ranks, but not all, have no file, or if a rank's file has other contents than rank 0's.
[[gnu::cold]] inline void check_same_file(const std::string& path, const std::vector<Opened>& ranks,
                                          const std::string& why_not) {
  std::string without;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].found == 0) without += cat(without.empty() ? "" : ", ", rank);
  const bool nobody = std::none_of(ranks.begin(), ranks.end(), [](const Opened& rank) { return rank.found != 0; });
  check<FileError>(!nobody, why_not);
  check<FileError>(without.empty(), "loading ", path, ": rank ", without, " can't read the file, and other ranks can",
                   why_not.empty() ? "" : cat(" (", why_not, ")"), ": all ranks must read the same file");
  for (std::size_t rank = 1; rank < ranks.size(); ++rank)
    check<FileError>(ranks[rank].step == ranks[0].step && ranks[rank].fingerprint == ranks[0].fingerprint, "loading ",
                     path, ": rank ", rank, " has a different file, of step ", ranks[rank].step,
                     ", than rank 0, of step ", ranks[0].step, ": all ranks must read the same file");
}

/// A number in the file's metadata, from 0 to `most`. Throws FileError if there is none.
inline std::int64_t number_in(const SafetensorsReader& file, const std::string& key,
                              std::int64_t most = std::int64_t{1} << 53) {
  const auto found = file.metadata().find(key);
  check<FileError>(found != file.metadata().end(), "resuming from ", file.path(), ": the file has a model, but not ",
                   key, ": it is not a checkpoint of a training run (io::load fills a model from it)");
  std::int64_t value = 0;
  const auto& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check<FileError>(error == std::errc{} && end == text.data() + text.size() && value >= 0 && value <= most,
                   "resuming from ", file.path(), ": ", key, " is ", Quoted{text}, ", expected a number from 0 to ",
                   most);
  return value;
}

/// The fixed number of shares into which a net cuts each batch; 0 if it depends on ranks or devices.
template <class Net>
int shares_of(const Net& net) {
  if constexpr (requires { net.canonical_shares(); })
    return net.canonical_shares();
  else
    return 0;
}

inline constexpr const char* canonical_shares_key = "training/canonical_shares";

/// Throws UsageError if the net sums over samples in another order than the file's run.
[[gnu::cold]] inline void check_same_shares(const SafetensorsReader& file, int shares) {
  const auto found = file.metadata().find(canonical_shares_key);
  const bool has = found != file.metadata().end();  // absent for a run without shares
  const auto of_run = has ? number_in(file, canonical_shares_key, most_shares) : 0;
  check<UsageError>(
      of_run == shares, "resuming from ", file.path(), ": expected the run's canonical_shares, ", of_run,
      of_run == 0 ? " (none)" : "", ", got ", shares, shares == 0 ? " (none)" : "",
      ": with others, sums over samples are rounded differently; for a new run io::load loads the model alone");
}

/// Compares the file's checksum; ranks share the work. All throw FileError if one can't read, or if the checksum
/// differs.
template <class Net>
void check_data_hash_of_all(const SafetensorsReader& file, Net& net) {
  const auto noted = file.metadata().find(std::string(data_hash_key));
  if (!Sha256::available || noted == file.metadata().end()) return;
  const auto hash = [&](int rank, int ranks) {
    const auto read = [&](std::uint64_t begin, std::span<std::byte> to) { file.read_data(begin, to); };
    return piece_hashes(file.data_bytes(), rank, ranks, read);
  };
  std::vector<std::string> hashes(1);
  if constexpr (requires { net.communicator().rank(); }) {
    auto& ranks = net.communicator();
    const auto hash_own = [&] { hashes[0] = hash(ranks.rank(), ranks.size()); };
    on_all_ranks(ranks, hash_own, [] {});
    hashes = comm::all_gather_object(ranks, hashes[0]);
  } else {
    hashes[0] = hash(0, 1);
  }
  check_data_hash(cat("resuming from ", file.path()), noted->second, data_hash(hashes));
}

/// Opens the file; `step_in(file)` returns its step. Throws FileError on all ranks if one of them can't open it, or if
/// their files differ, and UsageError if a rank's net has another seed, or another number of canonical shares, than the
/// file's run.
template <class Net, class StepIn>
[[gnu::cold]] SafetensorsReader open_on_all_ranks(const std::string& path, Net& net, const StepIn& step_in) {
  std::optional<SafetensorsReader> file;
  std::vector<Opened> ranks(1);
  Opened& own = ranks[0];
  own.seed = static_cast<std::int64_t>(net.seed());
  const auto open = [&] { own.step = step_in(file.emplace(path)); };
  if constexpr (requires { net.communicator().rank(); }) {
    if (auto& communicator = net.communicator(); communicator.size() > 1) {
      std::string why_not;
      try {
        open();
        own.fingerprint = static_cast<std::int64_t>(fingerprint(*file));
        own.found = 1;
      } catch (const FileError& error) {
        why_not = error.what();
      }
      const std::array mine{own.found, own.step, own.fingerprint, own.seed};
      std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(communicator.size()));
      communicator.all_gather(std::span<const std::int64_t>(mine), std::span<std::int64_t>(all), {});
      ranks.clear();
      for (std::size_t at = 0; at < all.size(); at += mine.size())
        ranks.push_back({all[at], all[at + 1], all[at + 2], all[at + 3]});
      check_same_file(path, ranks, why_not);
    }
  }
  if (!file) open();
  if (const auto seed = file->metadata().find("training/seed"); seed != file->metadata().end())
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      check<UsageError>(seed->second == cat(static_cast<std::uint64_t>(ranks[rank].seed)), "resuming from ", path,
                        ": expected the run's seed, ", printable(seed->second),
                        ", which dropout and samplers depend on, got ", static_cast<std::uint64_t>(ranks[rank].seed),
                        ranks.size() > 1 ? cat(" on rank ", rank) : "");
  check_same_shares(*file, shares_of(net));
  check_data_hash_of_all(*file, net);
  return std::move(*file);
}

/// The owner of numbers outside the model and the optimizer: a net's hook, or the net if it has none.
template <class Net>
auto& keeper_of(Net& net) {
  if constexpr (requires { net.hook(); })
    return net.hook();
  else
    return net;
}

/// Adds `own` of all other ranks to rank 0's file, rank by rank. All ranks call it.
template <Device D, class Communicator>
void add_of_ranks(Outgoing& out, Communicator& communicator, const std::vector<TensorPlace<D>>& own) {
  std::size_t bytes = 0;
  for (const auto& tensor : own) bytes += tensor.bytes();
  // No other call has this message, so ranks in another call are detected here.
  const std::array<std::int64_t, 5> mine{'s', 'a', 'v', static_cast<std::int64_t>(own.size()),
                                         static_cast<std::int64_t>(bytes)};
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span<const std::int64_t>(mine), std::span<std::int64_t>(all), {});
  for (std::size_t i = 0; i < all.size(); ++i)
    check<CommError>(all[i] == mine[i % mine.size()], "save_checkpoint: rank ", i / mine.size(),
                     " has other tensors than rank ", communicator.rank());
  std::vector<std::uint8_t> message(bytes);
  if (communicator.rank() != 0) {
    std::uint8_t* to = message.data();
    for (const auto& tensor : own) {
      tensor.copy_to(to);
      to += tensor.bytes();
    }
    return communicator.send(std::span<const std::uint8_t>(message), 0, {});
  }
  for (int rank = 1; rank < communicator.size(); ++rank) {
    communicator.recv(std::span<std::uint8_t>(message), rank, {});
    const std::uint8_t* from = message.data();
    for (const auto& tensor : own) {
      out.add(name_of_rank(rank, tensor.name), tensor,
              [&](std::byte* to) { std::copy_n(reinterpret_cast<const std::byte*>(from), tensor.bytes(), to); });
      from += tensor.bytes();
    }
  }
}

/// Adds the state of a hook or of the net itself, for all ranks, and `places` of all other ranks if they differ.
/// Returns whether this rank writes. All ranks call it.
template <Device D, class Net>
bool add_ranks_own(Outgoing& out, Net& net, const std::vector<TensorPlace<D>>& places) {
  const auto device = net.flat_parameters().entries().front().parameter().where();
  std::vector<TensorPlace<D>> own;
  auto access = chorus::detail::access_to(net);
  if constexpr (requires { access.hook_state(); })
    for (auto& tensor : access.hook_state())
      own.push_back({cat(hook_prefix, tensor.name), tensor.dtype, std::move(tensor.shape),
                     tensor.on_host ? std::nullopt : std::optional<D>(device), tensor.data});
  for (const auto& tensor : own) out.add(tensor);
  if constexpr (requires { access.hook_state_is_alike; }) own.clear();  // rank 0's is every rank's
  auto& keeper = keeper_of(net);
  auto numbers = numbers_of(keeper);
  if constexpr (numbers.size() > 0) {
    own.push_back({cat(hook_prefix, keeper.kept_as), DType::f64, {Index{numbers.size()}}, {}, numbers.data()});
    out.add(own.back());
  }
  if (access.ranks_differ()) own.insert(own.end(), places.begin(), places.end());
  try {
    add_of_ranks(out, net.communicator(), own);
  } catch (const CommError& error) {
    fail<CommError>("save_checkpoint: under LocalSgd, or a communication hook with state, all ranks must call it: ",
                    error.what());
  }
  return net.communicator().rank() == 0;
}

/// If ranks had their own tensors: takes this rank's, if the number of ranks is the same and `each_its_own`, otherwise
/// the mean of all.
template <Device D, class Net>
void choose_among_ranks(const SafetensorsReader& file, TensorPlace<D>& tensor, [[maybe_unused]] Net& net,
                        [[maybe_unused]] bool each_its_own) {
  std::vector<std::string> others;
  for (int rank = 1; file.find(name_of_rank(rank, tensor.name)) != nullptr; ++rank)
    others.push_back(name_of_rank(rank, tensor.name));
  if (others.empty()) return;
  if constexpr (requires { net.communicator().rank(); })
    if (each_its_own && static_cast<int>(others.size()) + 1 == net.communicator().size()) {
      tensor.name = name_of_rank(net.communicator().rank(), tensor.name);
      return;
    }
  tensor.mean_with = std::move(others);
}

/// Reads the state of a hook or of the net itself; does nothing if neither has any.
template <Device D, class Net>
class HookReading {
 public:
  /// Adds the file's tensors of that state to `wanted`.
  HookReading(const SafetensorsReader& file, Net& net, std::vector<TensorPlace<D>>& wanted) {
    if constexpr (has_tensors) {
      const auto known = chorus::detail::access_to(net).hook_state(true);
      for (const TensorEntry& entry : file.entries()) {
        const auto name = entry.name.substr(std::min(hook_prefix.size(), entry.name.size()));
        if (!entry.name.starts_with(hook_prefix) || name.find('.') == name.npos) continue;
        // For a parameter that is frozen now, the file gives the shape and the parameter the dtype.
        optim::StateTensor tensor{name, entry.dtype == FileDType::f64 ? DType::f64 : DType::f32, entry.shape, {}, true};
        const auto parameter = name.substr(name.find('.') + 1);
        for (const auto& one : net.flat_parameters().entries())
          if (one.named.name == parameter) tensor.dtype = one.parameter().dtype();
        for (const auto& one : known)
          if (one.name == name) tensor = {name, one.dtype, one.shape, {}, true};
        bytes_.emplace_back(static_cast<std::size_t>(numel(tensor.shape)) * size_of(tensor.dtype));
        tensor.data = bytes_.back().data();
        wanted.push_back({entry.name, tensor.dtype, tensor.shape, {}, tensor.data});
        choose_among_ranks(file, wanted.back(), net, true);
        tensors_.push_back(std::move(tensor));
      }
    }
    numbers_.fill(0);
    if constexpr (numbers > 0)
      if (const auto name = cat(hook_prefix, keeper_of(net).kept_as); file.find(name) != nullptr) {
        wanted.push_back({name, DType::f64, {Index{numbers}}, {}, numbers_.data()});
        choose_among_ranks(file, wanted.back(), net, true);
      }
  }
  HookReading(const HookReading&) = delete;
  HookReading& operator=(const HookReading&) = delete;

  /// Gives the state to the net, in the order of parameters.
  void give(Net& net) const {
    if constexpr (has_tensors) chorus::detail::access_to(net).set_hook_state(tensors_);
    if constexpr (numbers > 0) keeper_of(net).keep(numbers_);
  }

 private:
  using Numbers = decltype(numbers_of(keeper_of(std::declval<Net&>())));
  static constexpr std::size_t numbers = std::tuple_size_v<Numbers>;
  static constexpr bool has_tensors =
      all_ranks_save<Net> && requires(Net& net) { chorus::detail::access_to(net).hook_state(true); };

  std::vector<optim::StateTensor> tensors_;
  std::vector<std::vector<std::byte>> bytes_;
  Numbers numbers_;
};

}  // namespace chorus::io::detail
