#pragma once
/// The argument of a program's body: its options, its rank, its seed, its communicator.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <chorus/comm/connect.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/from_chars.hpp>
#include <chorus/launch/device_list.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/run_listener.hpp>

namespace chorus {

namespace comm {
class Store;
}

namespace detail {
/// Parses all of `text` as a number; throws UsageError with `what` and the text otherwise.
template <class Number>
Number to_number(const char* what, std::string_view text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = detail::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range && stop == end)
    usage_error("%s must be in the range of its type, got '%s'", what, printable(text).c_str());
  if (error != std::errc{} || stop != end) {
    const char* kind = std::is_floating_point_v<Number> ? "number" : "whole number";
    const char* range = std::is_unsigned_v<Number> ? " of at least 0" : "";
    usage_error("%s must be a %s%s, got '%s'", what, kind, range, printable(text).c_str());
  }
  return number;
}
}  // namespace detail

/// The options of a command line: `--name value`, `--name=value`, and flags `--name`. Words after `--` are ignored. If
/// an option is repeated, the last one counts. A value that starts with `--` must be written `--name=--value`.
class Arguments {
 public:
  Arguments() = default;
  /// Keeps `argv`, without a copy.
  Arguments(int argc, const char* const* argv);

  /// The value of `--name`, or nothing if the option is not given; a missing value is a UsageError.
  std::optional<std::string_view> find(const char* name);
  /// Whether `--name` is given.
  bool has(const char* name);
  /// The options that have not been read so far, each after a space.
  std::string unused() const;
  /// Throws UsageError if an option that has not been read looks like one that was read but is not given: one letter
  /// off, or two if that name has seven or more; swapped neighbours count as one.
  void refuse_misspelt() const;

 private:
  std::string_view word(int i) const { return argv_[i + 1]; }
  bool is_unused(int i) const { return !used_[static_cast<std::size_t>(i)] && word(i).starts_with("--"); }
  const char* after_name(int i, const char* name) const;
  void note_missing(const char* name);

  const char* const* argv_ = nullptr;
  int count_ = 0;
  std::vector<char> used_;
  std::vector<std::string> missing_;  // names that were read but are not given
};

/// Options of `launch`; unset ones have defaults.
struct LaunchOptions {
  std::optional<int> devices;                        ///< devices of this process, or processes under DDP
  std::uint64_t seed = 0;                            ///< of everything random, including initial parameters
  std::optional<std::chrono::milliseconds> timeout;  ///< of every wait for another rank; else CHORUS_TIMEOUT, else 60 s
  std::optional<comm::Backend> backend = {};         ///< of communicators; else CHORUS_BACKEND, else automatic
  std::optional<comm::Algorithm> all_reduce = {};    ///< of communicators; else CHORUS_ALL_REDUCE, else automatic
  /// The devices, see DeviceList: as many as it names, on each machine; if not set, those from 0 on.
  std::optional<DeviceList> device_ids = {};
  /// A trace of a few steps; without a path CHORUS_TRACE, CHORUS_TRACE_STEPS and CHORUS_TRACE_RING apply. For programs
  /// that include <chorus/trace.hpp> or link chorus::compiled; others refuse it.
  TraceOptions trace = {};
  /// The time between a signal that ends the job, or a rank's failure, and SIGKILL to the ranks that `launch` has
  /// started; if not set CHORUS_GRACE, else 3 s.
  std::optional<std::chrono::milliseconds> grace = {};

  static constexpr int most_devices = comm::max_ranks;

  /// Reads `--devices N`, `--device LIST`, `--seed S`, `--timeout SECONDS`, `--backend NAME`, `--all-reduce NAME`,
  /// `--trace FILE`, `--trace-steps FIRST:COUNT`, `--trace-ring`, `--grace SECONDS`.
  [[gnu::cold]] static LaunchOptions from(Arguments& arguments);

  /// Throws UsageError for invalid options; fills in the timeout, the backend and the all-reduce.
  [[gnu::cold]] void complete();

  /// The requested number of devices, given as a number or a list; of one machine.
  std::optional<int> asked_devices() const {
    return device_ids && !device_ids->ids.empty() ? device_ids->size() : devices;
  }
};

/// The default number of devices: 2, or 1 if this process may use only one core.
int default_devices();

/// One process of a program, which `launch` passes to the body. Without a launcher, or if the policy needs no
/// processes, it is rank 0 of 1.
class Run {
 public:
  Run(Arguments arguments, LaunchOptions options, comm::World world = {});
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// The value of `--name value` or `--name=value`. Throws UsageError if it is missing.
  std::string option(const char* name);
  std::string option(const char* name, const char* fallback);
  /// A number, with the type of `fallback`: `run.option("lr", 0.01)`. Throws UsageError if the value is not a number.
  template <class Number>
    requires std::is_arithmetic_v<Number>
  Number option(const char* name, Number fallback) {
    const auto value = arguments_.find(name);
    return value ? detail::to_number<Number>(detail::format("option --%s", name).c_str(), *value) : fallback;
  }
  /// Whether `--name` is given.
  bool flag(const char* name) { return arguments_.has(name); }

  int rank() const { return world_.rank; }
  int world_size() const { return world_.size; }
  int local_rank() const { return world_.local_rank; }
  /// Whether this is rank 0, which prints and writes files.
  bool is_main() const { return world_.rank == 0; }

  /// The devices of the whole run: ranks if there are several, else from `--device` or `--devices`, else `fallback`.
  int devices(int fallback = default_devices()) const {
    return world_.size > 1 ? world_.size : options_.asked_devices().value_or(fallback);
  }
  /// The device numbers on this machine, if `--device` names them; else empty.
  std::vector<int> device_ids() const { return options_.device_ids ? options_.device_ids->ids : std::vector<int>(); }
  /// The device of this process, or, under DataParallel, of the model; empty if none is named. Throws UsageError if
  /// fewer are named than this machine has processes.
  std::optional<int> own_device() const;
  std::uint64_t seed() const { return options_.seed; }

  const comm::World& world() const { return world_; }
  /// The connection to the other ranks, made in the first call, which is collective. Throws CommError if they don't
  /// meet.
  comm::AnyCommunicator& communicator();
  /// Keys and values that the ranks share, made in the first call, which is collective. For programs that include
  /// <chorus/comm/store.hpp>. Throws CommError if rank 0 cannot hold them.
  template <class Store = comm::Store>
  Store& store() {
    static_assert(requires { sizeof(Store); }, "run.store(): needs #include <chorus/comm/store.hpp>");
    if (!store_) store_ = std::make_shared<Store>(Store::of(world_, communicator()));
    return *static_cast<Store*>(store_.get());
  }
  /// For policies whose ranks change: from here on this is `communicator()`, and `rank()` and `world_size()` are its. A
  /// store of the earlier ranks is dropped.
  void regroup(comm::AnyCommunicator communicator);
  /// Tells the connected ranks, if any, that this one fails, and why.
  void abort(std::string_view why) noexcept;

  /// Throws UsageError for an option that looks misspelt: with `--devcies 8` a program would train on one device for
  /// hours. Policies call it when a net is built, because a program has read its options by then.
  void check_options() const { arguments_.refuse_misspelt(); }
  /// Options of the command line that the program has not read, each after a space.
  std::string unused_options() const { return arguments_.unused(); }

 private:
  Arguments arguments_;
  LaunchOptions options_;
  comm::World world_;
  std::optional<comm::AnyCommunicator> communicator_;
  std::shared_ptr<void> store_;  ///< a comm::Store
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/launch/run_impl.hpp>
#endif
