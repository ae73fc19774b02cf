// Lab 1: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/1_bytes/bytes.hpp"

#include "labs.hpp"

namespace labs_test::bytes {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/1_bytes/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/1_bytes.cpp"
#undef main
}  // namespace solution

using Ranks = ch::comm::AnyCommunicator;
using ch::trace::Traffic;

/// Calls `add` with the numbers of each other rank, which it exchanges in pairs.
void from_others(Ranks& ranks, std::span<const float> own, Traffic traffic,
                 const std::function<void(const std::vector<float>&)>& add) {
  std::vector<float> from(own.size());
  for (int peer = 0; peer < ranks.size(); ++peer) {
    if (peer == ranks.rank()) continue;
    if (ranks.rank() < peer) ranks.send(own, peer, {.traffic = traffic});
    ranks.recv(std::span(from), peer);
    if (ranks.rank() > peer) ranks.send(own, peer, {.traffic = traffic});
    add(from);
  }
}
void add_to(std::span<float> data, const std::vector<float>& more) {
  for (std::size_t i = 0; i < data.size(); ++i) data[i] += more[i];
}
/// Adds its own numbers first: ranks get different bits.
void own_first(Ranks& ranks, std::span<float> data) {
  const std::vector<float> own(data.begin(), data.end());
  from_others(ranks, own, Traffic::gradients, [&](const auto& from) { add_to(data, from); });
}
void without_own(Ranks& ranks, std::span<float> data) {
  const std::vector<float> own(data.begin(), data.end());
  std::fill(data.begin(), data.end(), 0.0f);
  from_others(ranks, own, Traffic::gradients, [&](const auto& from) { add_to(data, from); });
}
/// Passes on what it has added up so far.
void sends_its_sum(Ranks& ranks, std::span<float> data) {
  from_others(ranks, data, Traffic::gradients, [&](const auto& from) { add_to(data, from); });
}
/// An all-reduce of the library, which sends less.
void library(Ranks& ranks, std::span<float> data) {
  ranks.all_reduce(data, ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
}
void of_no_kind(Ranks& ranks, std::span<float> data) {
  const std::vector<float> own(data.begin(), data.end());
  from_others(ranks, own, Traffic::control, [&](const auto& from) { add_to(data, from); });
}
/// All ranks send first, then receive.
void sends_first(Ranks& ranks, std::span<float> data) {
  std::vector<float> from(data.size());
  for (int peer = 0; peer < ranks.size(); ++peer)
    if (peer != ranks.rank()) ranks.send(std::span<const float>(data), peer);
  for (int peer = 0; peer < ranks.size(); ++peer)
    if (peer != ranks.rank()) ranks.recv(std::span(from), peer);
}

TEST_CASE("lab 1: the solution passes, and wrong answers are told apart") {
  const auto right = solved("1_bytes");
  const auto with = [](auto* all_send_all) { return judged(bytes_lab::check, {all_send_all}); };
  check_empty("1_bytes", right);
  check_solution(with(solution::all_send_all), right);
  check_guesses(with(solution::all_send_all), right,
                {{"4 devices: ddp, a rank", 2 * 2219520}, {"8 devices: all send all, a rank", 8 * 2219520}});
  check_hole(with(given::all_send_all), right, "all_send_all");
  check_told_apart(right, {{"own first", with(own_first), "right but for its rounding: added in another order"},
                           {"without its own", with(without_own), "is the sum without the rank's own number"},
                           {"sends its sum", with(sends_its_sum), "is larger than the sum"},
                           {"the library's", with(library), "is less"},
                           {"traffic of no kind", with(of_no_kind), "has sent no bytes of gradients"},
                           {"all send first", with(sends_first), "which waits for this rank"}});
}

}  // namespace labs_test::bytes
