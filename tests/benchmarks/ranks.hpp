#pragma once
/// What the benchmarks of several ranks share: their command line, and how they are started.

#include <chorus/same_bits/share_tree.hpp>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cases.hpp"

namespace bench {

struct AnyNet {
  static constexpr bool distributed = true;
};

/// Runs `body(run, name, make, images, targets, make_optimizer)` for each case on this many ranks, or as the rank that
/// this process already is. Returns the exit status.
template <class Body>
int on_ranks(int argc, char** argv, std::optional<int> ranks, const std::vector<std::string_view>& wanted,
             const Body& body, std::optional<chorus::comm::Algorithm> all_reduce = {}) {
  bool known = true;
  const int status = chorus::launch<AnyNet>(
      argc, argv, {.devices = ranks, .seed = 0, .timeout = {}, .all_reduce = all_reduce},
      [&](chorus::Run& run) { known = for_each_case(wanted, [&](const auto&... of_case) { body(run, of_case...); }); });
  return known ? status : 2;
}

/// A rank's share of the batch and of its targets; or its run of that many canonical shares.
template <class Images>
auto share_of(const Images& images, const chorus::Tensor<std::int64_t, 1>& targets, int rank, int ranks,
              int canonical_shares = 0) {
  const auto batch = images.size(0), rows = targets.numel() / batch;
  const auto all = static_cast<std::size_t>(canonical_shares == 0 ? ranks : canonical_shares);
  const auto own =
      chorus::same_bits::shares_of_device(all, static_cast<std::size_t>(ranks), static_cast<std::size_t>(rank));
  const auto begin = chorus::share_begin(batch, all, own.begin), end = chorus::share_begin(batch, all, own.end);
  return std::pair(images.slice(0, begin, end), targets.slice(0, begin * rows, end * rows));
}

/// A rank's step on its share of the batch. Every rank makes the same number of steps: a fixed number, not a time.
template <class Net, class Optimizer, class Images>
double share_ms(Net& net, Optimizer& optimizer, int rank, const Images& images,
                const chorus::Tensor<std::int64_t, 1>& targets, std::size_t steps) {
  const auto [share, share_targets] = share_of(images, targets, rank, net.devices());
  return median_ms(make_step(net, optimizer, share, share_targets), steps, 1e9);
}
/// Half a second or more: in a shorter time whatever else wakes up counts for much.
inline std::size_t fixed_steps(std::string_view name) {
  return name.starts_with("resnet") ? 8 : name == "toy_b16" ? 1000 : name == "mlp_b64" ? 300 : 100;
}

struct RanksAndCases {
  int ranks = 2, canonical_shares = 0;
  std::optional<double> bucket_cap_mb;
  std::optional<chorus::comm::Algorithm> all_reduce;
  bool sharded = false, fused = false, wrapper = false, apart = false;
  std::vector<std::string_view> wanted;
};

/// False, after a message, for a name that is none.
inline bool all_reduce_named(const char* name, std::optional<chorus::comm::Algorithm>& out) {
  try {
    out = chorus::comm::all_reduce_of(name);
  } catch (const chorus::UsageError& error) {
    std::fprintf(stderr, "--all-reduce: %s\n", error.what());
    return false;
  }
  return true;
}

/// Reads `--ranks N [OPTION ...] [CASE ...]`; nothing, after a message, where N is none, or an option is not known.
inline std::optional<RanksAndCases> ranks_and_cases(const char* program, int argc, char** argv) {
  RanksAndCases out;
  bool known = true;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc)
      out.ranks = std::atoi(argv[++i]);
    else if (std::strcmp(argv[i], "--canonical-shares") == 0 && i + 1 < argc)
      out.canonical_shares = std::atoi(argv[++i]);
    else if (std::strcmp(argv[i], "--bucket-cap-mb") == 0 && i + 1 < argc)
      out.bucket_cap_mb = std::atof(argv[++i]);
    else if (std::strcmp(argv[i], "--all-reduce") == 0 && i + 1 < argc)
      known = all_reduce_named(argv[++i], out.all_reduce) && known;
    else if (std::strcmp(argv[i], "--sharded") == 0)
      out.sharded = true;
    else if (std::strcmp(argv[i], "--fused") == 0)
      out.fused = true;
    else if (std::strcmp(argv[i], "--apart") == 0)
      out.apart = true;
    else if (std::strcmp(argv[i], "--wrapper") == 0)
      out.wrapper = true;
    else if (std::strncmp(argv[i], "--", 2) == 0)
      known = false;
    else
      out.wanted.emplace_back(argv[i]);
  }
  if (known && out.ranks >= 1 && out.ranks <= chorus::comm::max_ranks) return out;
  std::fprintf(stderr,
               "usage: %s --ranks N [--all-reduce NAME] [--bucket-cap-mb X] [--sharded] [--fused] "
               "[--apart] [--wrapper] [--canonical-shares S] [CASE ...]; N is from 1 to %d; the top of its source says what the options do\n",
               program, chorus::comm::max_ranks);
  return std::nullopt;
}

}  // namespace bench
