#pragma once
/// Parses the values of chorus-run's options.

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <chorus/launch/job_of_machines.hpp>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace chorus_run {

namespace ch = chorus;

inline std::string run_id() {
  const char* given = std::getenv("TORCHELASTIC_RUN_ID");
  return given ? given : "none";
}

/// Parses all of `text` as a number from `least` to `most`; otherwise returns -1.
inline int number(std::string_view text, int least, int most) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most ? value : -1;
}

inline int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/// The number of GPUs: those in CUDA_VISIBLE_DEVICES, else all that NVIDIA's driver knows.
inline int gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    int listed = 0;  // -1 hides itself and those after it
    for (std::string_view rest = visible; !rest.empty() && !rest.starts_with('-'); ++listed)
      rest.remove_prefix(std::min(rest.size(), rest.find(',') == rest.npos ? rest.npos : rest.find(',') + 1));
    return listed;
  }
  std::error_code none;
  const std::filesystem::directory_iterator all("/proc/driver/nvidia/gpus", none);
  return none ? 0 : static_cast<int>(std::distance(begin(all), end(all)));
}

/// The number of ranks for `--nproc-per-node TEXT`.
inline int ranks_of(const std::string& text) {
  int ranks = number(text, 1, ch::comm::max_ranks);
  if (text == "cpu" || (text == "auto" && gpus() == 0)) ranks = std::min(cores(), ch::comm::max_ranks);
  if (text == "gpu" || (text == "auto" && gpus() > 0)) ranks = std::min(gpus(), ch::comm::max_ranks);
  ch::check<ch::UsageError>(ranks != 0, "--nproc-per-node ", ch::printable(text), ": this machine has no GPU");
  ch::check<ch::UsageError>(ranks > 0, "--nproc-per-node (or PET_NPROC_PER_NODE): expected 1 to ", ch::comm::max_ranks,
                            ", cpu, gpu or auto, got '", ch::printable(text), "'");
  return ranks;
}

/// Parses the meeting point of the ranks: `HOST`, `HOST:PORT`, `[HOST]:PORT`, or an IPv6 address without a port; port 0
/// selects a free one.
inline void take_endpoint(ch::RankGroup& group, const std::string& text, int default_port) {
  const auto colon = text.rfind(':');
  const bool bare = !text.starts_with('[') && text.find(':') != colon;
  const bool has_port = !bare && colon != std::string::npos && text.find(']', colon) == std::string::npos;
  std::string host = text.substr(0, has_port ? colon : text.size());
  host = ch::comm::detail::without_brackets(host);
  const int port = has_port ? number(std::string_view(text).substr(colon + 1), 0, 65535) : default_port;
  const bool sound = !host.empty() && host.find_first_of("[]") == std::string::npos;
  ch::check<ch::UsageError>(sound && port >= 0, "--rdzv-endpoint: expected HOST or HOST:PORT, got '",
                            ch::printable(text), "'");
  ch::check<ch::UsageError>(port > 0 || group.nodes == 1, "--rdzv-endpoint ", ch::printable(text),
                            ": expected a port for several machines, got 0 with --nnodes ", group.nodes);
  group.master_addr = host;
  group.master_port = port;
}

/// The ranks of this machine whose output is shown.
inline std::vector<int> ranks_in(const std::vector<std::string>& words, int ranks) {
  std::vector<int> list;
  for (const auto& word : words) {
    list.push_back(number(word, 0, ranks - 1));
    ch::check<ch::UsageError>(list.back() >= 0, "--local-ranks-filter: expected ranks from 0 to ", ranks - 1, ", got ",
                              ch::printable(word));
  }
  return list;
}

/// Parses `--redirects` and `--tee`: by rank, 1 for stdout, 2 for stderr, 3 for both, 0 for none. A word gives that for
/// all ranks, or is RANK:STREAMS. Empty if there are no words.
inline std::vector<int> streams_in(const char* option, const std::vector<std::string>& words, int ranks) {
  if (words.empty()) return {};
  std::vector<int> list(static_cast<std::size_t>(ranks), 0);
  for (const std::string_view word : words) {
    const auto colon = word.find(':');
    const bool all = colon == std::string_view::npos;
    const int rank = all ? 0 : number(word.substr(0, colon), 0, ranks - 1);
    const int streams = number(all ? word : word.substr(colon + 1), 0, 3);
    ch::check<ch::UsageError>(rank >= 0 && streams >= 0 && (!all || words.size() == 1), option,
                              ": expected 0 to 3 for all ranks, or a list of RANK:0 to RANK:3 with ranks from 0 to ",
                              ranks - 1, ", got ", ch::printable(word));
    if (all) std::fill(list.begin(), list.end(), streams);
    if (!all) list[static_cast<std::size_t>(rank)] = streams;
  }
  return list;
}

/// Makes a new log folder, if files are requested without --log-dir.
inline std::string new_log_dir(const std::string& run_id) {
  std::string path = (std::filesystem::temp_directory_path() / ("chorus_" + run_id + "_XXXXXX")).string();
  const bool made = mkdtemp(path.data()) != nullptr;  // before errno is read
  ch::check<ch::FileError>(made, "--log-dir: cannot make a folder for logs: ", path, ": ", std::strerror(errno),
                           "; name one");
  ch::detail::say("logs are in " + path);
  return path;
}

/// Parses `N` or `MIN:MAX` machines.
inline void take_nodes(ch::MachineOptions& machines, const std::string& text) {
  const auto colon = std::min(text.find(':'), text.size());
  const std::string_view words = text;
  machines.least = number(words.substr(0, colon), 1, ch::comm::max_ranks);
  machines.most = colon == text.size() ? machines.least : number(words.substr(colon + 1), 1, ch::comm::max_ranks);
  ch::check<ch::UsageError>(machines.least > 0 && machines.most >= machines.least,
                            "--nnodes: expected N or MIN:MAX, 1 to ", ch::comm::max_ranks, ", got '",
                            ch::printable(text), "'");
}

/// Parses a time in seconds.
inline std::chrono::milliseconds seconds_of(const char* option, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ch::check<ch::UsageError>(error == std::errc{} && end == text.data() + text.size() && value >= 0.001 && value <= 1e6,
                            option, ": expected seconds from 0.001 to 1000000, got ", ch::printable(text));
  return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
}

/// Parses `--rdzv-conf` for machines that find each other.
inline void take_conf(ch::MachineOptions& machines, const std::vector<std::string>& words) {
  for (const std::string_view word : words) {
    const auto equals = std::min(word.find('='), word.size());
    const auto name = word.substr(0, equals), value = word.substr(std::min(equals + 1, word.size()));
    ch::check<ch::UsageError>(name == "join_timeout" || name == "last_call_timeout",
                              "--rdzv-conf: expected join_timeout=SECONDS or last_call_timeout=SECONDS, got '",
                              ch::printable(word), "'");
    (name == "join_timeout" ? machines.join_timeout : machines.last_call) = seconds_of("--rdzv-conf", value);
  }
}

inline std::vector<int> signals_in(const std::vector<std::string>& words) {
  std::vector<int> list;
  for (const auto& word : words) {
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
      if (word == ch::detail::signal_name(signal)) list.push_back(signal);
    if (list.empty() || word != ch::detail::signal_name(list.back()))
      ch::fail<ch::UsageError>(
          "--signals-to-handle: expected some of SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2, got ",
          ch::printable(word));
  }
  return list;
}

/// Why a torchrun option is not supported; "" if torchrun does not have it either.
inline std::string_view why_not(std::string_view option) {
  std::string name(option.substr(0, option.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  struct Refused {
    std::string_view name, why;
  };
  static constexpr Refused refused[] = {
      {"-m", "what is started is a program, not a Python module; for one, start python3 -m MODULE"},
      {"--module", "what is started is a program, not a Python module; for one, start python3 -m MODULE"},
      {"--run-path", "chorus-run starts a program, which the system finds, without Python's runpy"},
      {"--start-method", "ranks are executed programs, and no Python process could be forked"},
      {"--event-log-handler", "it names a Python class; stderr says what happens to ranks"},
      {"--logs-specs", "it names a Python class; see --log-dir, --redirects and --tee"},
      {"--numa-binding", "ranks of chorus keep to their share of the cores by themselves, unless CHORUS_BIND=0"},
      {"--virtual-local-rank", "ranks of chorus choose the GPU of their LOCAL_RANK by themselves"},
      {"--use-agent-store", "ranks meet at rank 0, not at the launcher"},
  };
  for (const auto& [option_name, why] : refused)
    if (name == option_name) return why;
  return "";
}

}  // namespace chorus_run
