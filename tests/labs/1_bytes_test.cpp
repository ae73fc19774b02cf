// Lab 1: its solution passes; wrong code is detected.
#define main main_of_1_bytes
#define Mine Mine_of_1
#include "../../examples/lessons/labs/1_bytes/bytes.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace bytes {

#include "solutions/1_bytes.hpp"

using Ranks = ch::comm::AnyCommunicator;

/// Adds its own numbers first: ranks get different bits.
struct OwnFirst {
  static void all_send_all(Ranks& ranks, std::span<float> data) {
    const std::vector<float> own(data.begin(), data.end());
    std::vector<float> from(data.size());
    for (int peer = 0; peer < ranks.size(); ++peer) {
      if (peer == ranks.rank()) continue;
      if (ranks.rank() < peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      ranks.recv(std::span(from), peer);
      if (ranks.rank() > peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      for (std::size_t i = 0; i < data.size(); ++i) data[i] += from[i];
    }
  }
};
/// An all-reduce of the library, which sends less.
struct Library {
  static void all_send_all(Ranks& ranks, std::span<float> data) {
    ranks.all_reduce(data, ch::comm::ReduceOp::sum, {.traffic = ch::trace::Traffic::gradients});
  }
};
/// All ranks send first, then receive.
struct SendsFirst {
  static void all_send_all(Ranks& ranks, std::span<float> data) {
    std::vector<float> from(data.size());
    for (int peer = 0; peer < ranks.size(); ++peer)
      if (peer != ranks.rank()) ranks.send(std::span<const float>(data), peer);
    for (int peer = 0; peer < ranks.size(); ++peer)
      if (peer != ranks.rank()) ranks.recv(std::span(from), peer);
  }
};

TEST_CASE("lab 1: the solution passes, and wrong ones do not") {
  const auto right = solved("1_bytes");
  check_empty("1_bytes", right);
  const auto passed = run(bytes_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  check_guesses(bytes_lab::run<Solution>, right,
                {{"4 devices: ddp, a rank", 2 * 2219520}, {"8 devices: all send all, a rank", 8 * 2219520}});
  check_hole(bytes_lab::run<Mine_of_1>, right, "all_send_all");
  check_wrong(bytes_lab::run<OwnFirst>, right,
              "3 devices: all_send_all ends with the sum in the order of ranks: on rank 2 number ", 3);
  check_wrong(bytes_lab::run<Library>, right, "3 devices: each rank sends its numbers once to every other rank: of grad",
              3);
  check_wrong(bytes_lab::run<SendsFirst>, right, "2 devices: all_send_all: rank ", 1);
}

}  // namespace bytes
}  // namespace labs_test
