// Lab 1: its solution passes; what is wrong is noticed.
#define main main_of_1_bytes
#define Mine Mine_of_1
#include "../../examples/lessons/labs/1_bytes/bytes.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace bytes {

using Ranks = ch::comm::AnyCommunicator;

struct Solution {
  static void all_send_all(Ranks& ranks, std::span<float> data) {
    const std::vector<float> own(data.begin(), data.end());
    std::vector<float> from(data.size());
    std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks.size()));
    for (int peer = 0; peer < ranks.size(); ++peer) {
      if (peer == ranks.rank()) continue;
      if (ranks.rank() < peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      ranks.recv(std::span(from), peer);
      if (ranks.rank() > peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      all[static_cast<std::size_t>(peer)] = from;
    }
    all[static_cast<std::size_t>(ranks.rank())] = own;
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = all[0][i];
      for (std::size_t rank = 1; rank < all.size(); ++rank) data[i] += all[rank][i];
    }
  }
};
/// Adds its own numbers first: ranks get other bits.
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

json solved() {
  constexpr double k = 2219520;
  json out;
  for (const int n : {2, 3, 4, 8}) {
    const auto name = [n](const char* what) { return ch::cat(n, " devices: ", what); };
    out[name("dp, device 0")] = (n - 1) * k;
    out[name("dp, another device")] = k;
    out[name("ddp, a rank")] = 2 * (n - 1) * k / n;
    out[name("parameter server, rank 0")] = (n - 1) * k;
    out[name("parameter server, a worker")] = k;
    out[name("all send all, a rank")] = (n - 1) * k;
  }
  return out;
}

TEST_CASE("lab 1: the solution passes, and wrong ones do not") {
  check_empty("1_bytes", solved());
  const auto right = run(bytes_lab::run<Solution>, solved());
  INFO(right);
  CHECK(passes(right));
  auto guess = solved();
  guess["4 devices: ddp, a rank"] = 2 * 2219520;
  guess["8 devices: dp, device 0"] = 2219520;
  const auto guessed = run(bytes_lab::run<Solution>, guess);
  CHECK(is_wrong(guessed, "4 devices: ddp, a rank"));
  CHECK(is_wrong(guessed, "8 devices: dp, device 0"));
  CHECK(guessed.ends_with("2 lines are wrong\n"));
  CHECK(is_wrong(run(bytes_lab::run<OwnFirst>, solved()), "3 devices: all_send_all ends with the sum"));
  CHECK(is_wrong(run(bytes_lab::run<Library>, solved()), "3 devices: all send all, a rank"));
  CHECK(run(bytes_lab::run<Mine_of_1>, solved()).find("there is a hole: write all_send_all") != std::string::npos);
}

}  // namespace bytes
}  // namespace labs_test
