#pragma once
/// What the body of a program gets from `launch`: its options, its place among the ranks, its seed, its communicator.

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/comm/connect.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/config.hpp>
#include <chorus/parallel/message.hpp>
#include <chorus/parallel/world_from_environment.hpp>

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// The whole of `text` as a number; throws UsageError that names `what` and says what was got.
template <class Number>
Number to_number(const char* what, std::string_view text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || stop != end) {
    const char* kind = std::is_floating_point_v<Number> ? "number" : "whole number";
    const char* range = std::is_unsigned_v<Number> ? " of at least 0" : "";
    usage_error("%s must be a %s%s, got '%.*s'", what, kind, range, static_cast<int>(text.size()), text.data());
  }
  return number;
}
}  // namespace detail

/// The options of a command line: `--name value`, `--name=value`, and flags `--name`. What follows `--` is left alone.
/// The last one counts where an option is repeated. A value that starts with `--` has to be written `--name=--value`.
class Arguments {
 public:
  Arguments() = default;
  /// `argv` is kept, not copied.
  Arguments(int argc, const char* const* argv) : argv_(argv) {
    while (count_ + 1 < argc && std::string_view(argv[count_ + 1]) != "--") ++count_;
    used_.resize(static_cast<std::size_t>(count_));
  }

  /// The value of `--name`, or nothing where the option is not given; a missing value is a UsageError.
  std::optional<std::string_view> find(const char* name) {
    std::optional<std::string_view> value;
    for (int i = 0; i < count_; ++i) {
      const char* rest = after_name(i, name);
      if (rest == nullptr) continue;
      use(i);
      if (*rest == '=') {
        value = rest + 1;
      } else {
        if (i + 1 == count_ || word(i + 1).starts_with("--")) detail::usage_error("option --%s needs a value", name);
        value = word(i + 1);
      }
    }
    return value;
  }

  /// Whether `--name` is given.
  bool has(const char* name) {
    bool found = false;
    for (int i = 0; i < count_; ++i) {
      const char* rest = after_name(i, name);
      if (rest == nullptr) continue;
      use(i);
      if (*rest == '=') detail::usage_error("option --%s takes no value, got '%s'", name, rest + 1);
      found = true;
    }
    return found;
  }

  /// The options that nobody has asked for so far, each after a blank.
  std::string unused() const {
    std::string out;
    for (int i = 0; i < count_; ++i) {
      if (used_[static_cast<std::size_t>(i)] || !word(i).starts_with("--")) continue;
      out += ' ';
      out.append(word(i));
    }
    return out;
  }

 private:
  std::string_view word(int i) const { return argv_[i + 1]; }
  void use(int i) { used_[static_cast<std::size_t>(i)] = 1; }
  /// What follows `--name` in word i: nothing or `=value`; a null pointer where that is another word.
  const char* after_name(int i, const char* name) const {
    const std::size_t length = std::strlen(name);
    const char* text = argv_[i + 1];
    if (std::strncmp(text, "--", 2) != 0 || std::strncmp(text + 2, name, length) != 0) return nullptr;
    const char* rest = text + 2 + length;
    return *rest == '\0' || *rest == '=' ? rest : nullptr;
  }

  const char* const* argv_ = nullptr;
  int count_ = 0;
  std::vector<char> used_;
};

/// What `launch` has to know; what is left open has a default.
struct LaunchOptions {
  std::optional<int> devices;                        ///< devices of this process, or processes under DDP
  std::uint64_t seed = 0;                            ///< of everything random, initial parameters among it
  std::optional<std::chrono::milliseconds> timeout;  ///< of every wait for another rank; else CHORUS_TIMEOUT, else 60 s

  static constexpr int most_devices = comm::max_ranks;

  /// Reads `--devices N`, `--seed S`, `--timeout SECONDS`.
  static LaunchOptions from(Arguments& arguments) {
    LaunchOptions options;
    if (const auto text = arguments.find("devices")) options.devices = detail::to_number<int>("--devices", *text);
    if (const auto text = arguments.find("seed")) options.seed = detail::to_number<std::uint64_t>("--seed", *text);
    if (const auto text = arguments.find("timeout")) options.timeout = seconds("--timeout", *text);
    return options;
  }

  /// Throws UsageError for what makes no sense, and fills in the timeout.
  void complete() {
    if (devices && (*devices < 1 || *devices > most_devices)) {
      detail::usage_error("--devices must be from 1 to %d, got %d", most_devices, *devices);
    }
    if (!timeout) {
      const char* text = detail::env("CHORUS_TIMEOUT");
      timeout = seconds("environment variable CHORUS_TIMEOUT", text ? text : "60");
    }
    if (timeout->count() <= 0) detail::usage_error("the timeout must be above 0 ms, got %ld", long{timeout->count()});
  }

 private:
  static std::chrono::milliseconds seconds(const char* what, std::string_view text) {
    const double value = detail::to_number<double>(what, text);
    if (!(value >= 0.001 && value <= 1e6)) {
      detail::usage_error("%s must be a number of seconds from 0.001 to 1000000, got %g", what, value);
    }
    return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
  }
};

/// Devices where nobody asked for a number: 2, or 1 where this process may use only one core.
inline int default_devices() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::clamp(CPU_COUNT(&cores), 1, 2) : 2;
}

/// One process of a program: what `launch` hands to the body. Without a launcher, or where the policy needs no
/// processes, it is rank 0 of 1.
class Run {
 public:
  Run(Arguments arguments, LaunchOptions options, comm::World world = {})
      : arguments_(std::move(arguments)), options_(options), world_(std::move(world)) {
    options_.complete();
    world_.timeout = *options_.timeout;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// The value of `--name value` or `--name=value`. Throws UsageError where it is missing.
  std::string option(const char* name) {
    const auto value = arguments_.find(name);
    if (!value) detail::usage_error("option --%s is missing: give it as --%s VALUE", name, name);
    return std::string(*value);
  }
  std::string option(const char* name, const char* fallback) {
    return std::string(arguments_.find(name).value_or(fallback));
  }
  /// A number, of the type of `fallback`: `run.option("lr", 0.01)`. Throws UsageError where the value is none.
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
  /// Whether this is rank 0, the one that prints and writes files.
  bool is_main() const { return world_.rank == 0; }

  /// Devices of the whole run: ranks where there are several, else `--devices`, else `fallback`.
  int devices(int fallback = default_devices()) const {
    return world_.size > 1 ? world_.size : options_.devices.value_or(fallback);
  }
  std::uint64_t seed() const { return options_.seed; }

  const comm::World& world() const { return world_; }
  /// The connection to the other ranks, made at the first call, in which all of them have to take part.
  /// Throws CommError where they don't meet.
  comm::AnyCommunicator& communicator() {
    if (!communicator_) {
      communicator_.emplace(comm::connect(world_));
      world_.listen_fd = -1;  // it took that over
    }
    return *communicator_;
  }

  /// Options of the command line that the program has not asked for, each after a blank.
  std::string unused_options() const { return arguments_.unused(); }

 private:
  Arguments arguments_;
  LaunchOptions options_;
  comm::World world_;
  std::optional<comm::AnyCommunicator> communicator_;
};

}  // namespace chorus
