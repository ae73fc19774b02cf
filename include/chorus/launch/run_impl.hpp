#pragma once
/// How Run and its options work.

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include <chorus/launch/run.hpp>
#include <chorus/launch/world_from_environment.hpp>

namespace chorus {

CHORUS_INLINE Arguments::Arguments(int argc, const char* const* argv) : argv_(argv) {
  while (count_ + 1 < argc && std::string_view(argv[count_ + 1]) != "--") ++count_;
  used_.resize(static_cast<std::size_t>(count_));
}

CHORUS_INLINE std::optional<std::string_view> Arguments::find(const char* name) {
  std::optional<std::string_view> value;
  for (int i = 0; i < count_; ++i) {
    const char* rest = after_name(i, name);
    if (rest == nullptr) continue;
    used_[static_cast<std::size_t>(i)] = 1;
    if (*rest == '=') {
      value = rest + 1;
    } else {
      if (i + 1 == count_ || word(i + 1).starts_with("--")) detail::usage_error("option --%s needs a value", name);
      value = word(i + 1);
    }
  }
  if (!value) note_missing(name);
  return value;
}

CHORUS_INLINE bool Arguments::has(const char* name) {
  bool found = false;
  for (int i = 0; i < count_; ++i) {
    const char* rest = after_name(i, name);
    if (rest == nullptr) continue;
    used_[static_cast<std::size_t>(i)] = 1;
    if (*rest == '=')
      detail::usage_error("option --%s: expected no value, got '%s'", name, printable(rest + 1).c_str());
    found = true;
  }
  if (!found) note_missing(name);
  return found;
}

CHORUS_INLINE void Arguments::note_missing(const char* name) {
  if (std::ranges::find(missing_, name) == missing_.end()) missing_.emplace_back(name);
}

CHORUS_INLINE std::string Arguments::unused() const {
  std::string out;
  for (int i = 0; i < count_; ++i)
    if (is_unused(i)) out.append(" ").append(word(i));
  return out;
}

namespace detail {
/// The number of letters that are inserted, deleted, changed, or swapped with a neighbour between two words: the
/// optimal string alignment distance (Damerau 1964).
[[gnu::cold]] inline std::size_t misspellings(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, above(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(above, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}
}  // namespace detail

CHORUS_INLINE void Arguments::refuse_misspelt() const {
  for (int i = 0; i < count_; ++i) {
    if (!is_unused(i)) continue;
    const std::string_view name = word(i).substr(2, word(i).find('=') - 2);
    const std::string* nearest = nullptr;
    std::size_t fewest = 3;
    for (const std::string& meant : missing_)
      if (const auto letters = detail::misspellings(name, meant);
          meant.size() >= 4 && letters <= (meant.size() >= 7 ? 2 : 1) && letters < fewest) {
        nearest = &meant;
        fewest = letters;
      }
    if (nearest != nullptr)
      detail::usage_error(
          "unknown option --%s: did you mean --%s? (A program must read its own options before it builds the net.)",
          printable(name).c_str(), nearest->c_str());
  }
}

// The text after `--name` in word i: empty or `=value`; null if that is another option.
CHORUS_INLINE const char* Arguments::after_name(int i, const char* name) const {
  const std::size_t length = std::strlen(name);
  const char* text = argv_[i + 1];
  if (std::strncmp(text, "--", 2) != 0 || std::strncmp(text + 2, name, length) != 0) return nullptr;
  const char* rest = text + 2 + length;
  return *rest == '\0' || *rest == '=' ? rest : nullptr;
}

namespace detail {
inline std::chrono::milliseconds timeout_of(const char* what, std::string_view text) {
  const double value = to_number<double>(what, text);
  if (!(value >= 0.001 && value <= 1e6)) {
    usage_error("%s must be a number of seconds from 0.001 to 1000000, got %g", what, value);
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
}
inline std::chrono::milliseconds grace_of(const char* what, std::string_view text) {
  const double value = to_number<double>(what, text);
  if (!(value >= 0 && value <= 3600)) usage_error("%s must be a number of seconds from 0 to 3600, got %g", what, value);
  return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
}
/// Calls `read(text)`; adds `what` in front of its UsageError.
template <class Read>
auto named(const char* what, std::string_view text, const Read& read) {
  try {
    return read(text);
  } catch (const UsageError&) {
    rethrow_with(std::current_exception(), cat(what, ": "));
  }
}
}  // namespace detail

CHORUS_INLINE LaunchOptions LaunchOptions::from(Arguments& arguments) {
  LaunchOptions options;
  if (const auto text = arguments.find("devices")) options.devices = detail::to_number<int>("--devices", *text);
  if (const auto text = arguments.find("device")) options.device_ids = DeviceList::of("--device", *text);
  if (const auto text = arguments.find("seed")) options.seed = detail::to_number<std::uint64_t>("--seed", *text);
  if (const auto text = arguments.find("timeout")) options.timeout = detail::timeout_of("--timeout", *text);
  if (const auto text = arguments.find("grace")) options.grace = detail::grace_of("--grace", *text);
  if (const auto text = arguments.find("backend"))
    options.backend = detail::named("--backend", *text, comm::backend_of);
  if (const auto text = arguments.find("all-reduce"))
    options.all_reduce = detail::named("--all-reduce", *text, comm::all_reduce_of);
  if (const auto text = arguments.find("trace")) options.trace.path = *text;
  if (const auto text = arguments.find("trace-steps")) options.trace.set_steps("--trace-steps", *text);
  options.trace.ring_steps = arguments.has("trace-ring");
  return options;
}

CHORUS_INLINE void LaunchOptions::complete() {
  if (devices && (*devices < 1 || *devices > most_devices)) {
    detail::usage_error("--devices: expected 1 to %d, got %d", most_devices, *devices);
  }
  if (device_ids) {
    device_ids->check("--device");
    if (const int named = device_ids->size(); devices && named > 0 && *devices != named)
      detail::usage_error("--devices %d, but --device %s names %d: expected the same number, or one of the two",
                          *devices, device_ids->text().c_str(), named);
  }
  if (!timeout) {
    const char* text = detail::env("CHORUS_TIMEOUT");
    timeout = detail::timeout_of("environment variable CHORUS_TIMEOUT", text ? text : "60");
  }
  comm::check_timeout("launch", *timeout);
  if (!grace) {
    const char* text = detail::env("CHORUS_GRACE");
    grace = detail::grace_of("environment variable CHORUS_GRACE", text ? text : "3");
  }
  if (const char* path = detail::env("CHORUS_TRACE"); path != nullptr && trace.path.empty()) {
    trace.path = path;
    if (const char* steps = detail::env("CHORUS_TRACE_STEPS"))
      trace.set_steps("environment variable CHORUS_TRACE_STEPS", steps);
    trace.ring_steps = trace.ring_steps || detail::env_switch("CHORUS_TRACE_RING", false);
  }
  const auto complete_from = [](auto& option, const char* name, const auto& read, auto otherwise) {
    if (option) return;
    const char* text = detail::env(name);
    option = text ? detail::named(cat("environment variable ", name).c_str(), text, read) : otherwise;
  };
  complete_from(backend, "CHORUS_BACKEND", comm::backend_of, comm::Backend::automatic);
  complete_from(all_reduce, "CHORUS_ALL_REDUCE", comm::all_reduce_of, comm::Algorithm::automatic);
}

CHORUS_INLINE int default_devices() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::clamp(CPU_COUNT(&cores), 1, 2) : 2;
}

CHORUS_INLINE Run::Run(Arguments arguments, LaunchOptions options, comm::World world)
    : arguments_(std::move(arguments)), options_(options), world_(std::move(world)) {
  options_.complete();
  world_.timeout = *options_.timeout;
  world_.all_reduce = *options_.all_reduce;
  world_.backend = *options_.backend;
}

CHORUS_INLINE std::string Run::option(const char* name) {
  const auto value = arguments_.find(name);
  if (!value) detail::usage_error("option --%s is missing: give it as --%s VALUE", name, name);
  return std::string(*value);
}
CHORUS_INLINE std::string Run::option(const char* name, const char* fallback) {
  return std::string(arguments_.find(name).value_or(fallback));
}

CHORUS_INLINE comm::AnyCommunicator& Run::communicator() {
  if (!communicator_) {
    communicator_.emplace(comm::connect(world_));
    world_.listen_fd = -1;  // connect has closed or kept it
  }
  return *communicator_;
}

CHORUS_INLINE void Run::regroup(comm::AnyCommunicator communicator) {
  world_.rank = communicator.rank();
  world_.size = communicator.size();
  world_.listen_fd = -1;  // the first communicator's meeting has closed or kept it
  store_.reset();
  communicator_ = std::move(communicator);
}

CHORUS_INLINE void Run::abort(std::string_view why) noexcept {
  if (communicator_) communicator_->abort(why);
}

CHORUS_INLINE std::optional<int> Run::own_device() const {
  const auto ids = device_ids();
  if (ids.empty()) return std::nullopt;
  check<UsageError>(static_cast<std::size_t>(world_.local_rank) < ids.size(), "--device ", options_.device_ids->text(),
                    ": expected a device for process ", world_.local_rank, " of this machine, got ", ids.size());
  return ids[static_cast<std::size_t>(world_.local_rank)];
}

}  // namespace chorus
