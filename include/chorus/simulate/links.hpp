#pragma once
/// `Links`: what messages cost in a simulated network, by the alpha-beta model (Hockney, 1994): alpha seconds and beta
/// seconds a byte.

#include <chorus/core/error.hpp>
#include <chorus/core/from_chars.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/simulate/tasks.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace chorus::comm::simulated {

/// One kind of link.
struct AlphaBeta {
  double alpha = 0;      ///< seconds from when a message's first byte leaves to when it arrives
  double bandwidth = 1;  ///< bytes a second, each way

  Time latency() const { return time_of("alpha", alpha); }
  /// How long a port is busy with that many bytes.
  Time transfer(std::size_t bytes) const {
    return Time(static_cast<std::int64_t>(static_cast<double>(bytes) * (1e15 / bandwidth)));
  }
};

/// Every rank has a port for each kind of link. A port sends one piece after another, and receives one after another.
struct Links {
  std::string name = {};                ///< what `links_named` was given
  int island = 1;                       ///< ranks of an island: rank r is on island r / island; 0: all are on one
  AlphaBeta inside = {}, between = {};  ///< of an island; of islands
  bool shared = false;                  ///< an island has one port to the others between its ranks, not one for each
  double call = 0;                      ///< seconds that each collective call takes to begin
};

/// Constants of NCCL 2's model (its tuning.cc: ring, Simple protocol), in seconds: what a call costs, and each hop.
namespace nccl {
inline constexpr double call = 8.4e-6, nvlink = 3.4e-6, pcie = 5.7e-6, network = 14.0e-6;
}

namespace detail {

/// `digits` at the front of `text`, which are taken off; 0 where there are none.
inline double take_number(std::string_view& text) {
  double number = 0;
  const auto [end, error] = chorus::detail::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return 0;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

}  // namespace detail

/// Links by name: `nvlink` and `pcie` for ranks of one machine; `25gbit`, `100mbit` for a network in which each rank
/// has a port of that rate; `nvlink8+25gbit` for islands of 8 ranks, and `nvlink8+25gbit:shared` where those 8 have one
/// port between them. Rates are nominal: NVLink of an A100, 300 GB/s each way; PCIe 3.0 x 16, 15.75 GB/s. What is
/// measured is less; `efficiency` multiplies all. Alphas are NCCL's (see above). Throws UsageError for other names.
[[gnu::cold]] inline Links links_named(std::string_view name, double efficiency = 1) {
  constexpr std::string_view expected =
      ": expected nvlink, pcie, 25gbit, 100mbit, nvlink8+25gbit, pcie4+10gbit:shared, or such with other numbers";
  check<UsageError>(efficiency > 0 && efficiency <= 1, "links: efficiency ", efficiency, " is not in (0, 1]");
  Links links{.name = std::string(name), .call = nccl::call};
  const auto refuse = [&] { fail<UsageError>("links: ", printable(name), expected); };
  const auto machine = [&](std::string_view& text, AlphaBeta& link) {
    const bool nvlink = text.starts_with("nvlink");
    if (!nvlink && !text.starts_with("pcie")) return false;
    text.remove_prefix(nvlink ? 6 : 4);
    link = nvlink ? AlphaBeta{nccl::nvlink, 300e9 * efficiency} : AlphaBeta{nccl::pcie, 15.75e9 * efficiency};
    return true;
  };
  std::string_view rest = name;
  if (machine(rest, links.inside)) {
    links.island = 0;
    links.between = links.inside;
    if (rest.empty()) return links;
    const double ranks = detail::take_number(rest);
    if (!(ranks >= 1 && ranks <= 1024) || ranks != static_cast<int>(ranks) || !rest.starts_with('+')) refuse();
    links.island = static_cast<int>(ranks);
    rest.remove_prefix(1);
  }
  const double rate = detail::take_number(rest);
  const bool giga = rest.starts_with("gbit");
  if (!(rate > 0 && rate <= 1e6) || (!giga && !rest.starts_with("mbit"))) refuse();
  rest.remove_prefix(4);
  links.shared = rest == ":shared" && links.island > 1;
  if (!rest.empty() && !links.shared) refuse();
  links.between = {nccl::network, rate * (giga ? 1e9 : 1e6) / 8 * efficiency};
  if (links.island == 1) links.inside = links.between;
  return links;
}

}  // namespace chorus::comm::simulated
