/// Measurements of lab 1: a step under each policy, on 2, 3, 4 and 8 devices. SPOILERS: read this when your lab is right.

#include <chorus/chorus.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <cmath>
#include <numeric>

#include "bytes.hpp"

namespace bytes_lab {
namespace {

/// The number of parameters; each can be cut into 2, 3, 4 and 8 equal chunks.
constexpr std::size_t count = 554'880;
template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D> fc1{744, 624}, fc2{624, 144};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(x))); }
};
using Model = Net<ch::Cpu>;
using ch::trace::Traffic;

double sent(int device, Traffic kind) { return static_cast<double>(ch::trace::bytes_sent(device, kind)); }

/// Two training steps; the second one is counted. All ranks call `meet()` between them.
template <class Policy, class Meet>
void train(Policy& net, ch::Index samples, const Meet& meet) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01}};
  const auto inputs = ch::Tensor<float, 2>::zeros({samples, 744});
  const auto labels = ch::Tensor<std::int64_t, 1>::zeros({samples});
  for (int step = 0; step < 2; ++step) {
    if (step == 1) meet();
    optimizer.zero_grad();
    ch::cross_entropy(net(inputs), labels).backward();
    optimizer.step();
  }
}
/// The same under a policy of ranks.
template <class Policy>
void train_ranks(int n) {
  lab::on_ranks(n, [](ch::comm::AnyCommunicator& ranks) {
    Policy net{Model{}, ranks};
    train(net, 2, [&] {
      ranks.barrier();
      if (ranks.rank() == 0) ch::trace::reset_traffic();
      ranks.barrier();
    });
    ranks.barrier();
  });
}

/// All ranks send all their numbers to all others; this does not add them.
void send_all(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  std::vector<float> from(data.size());
  for (int peer = 0; peer < ranks.size(); ++peer) {
    const bool first = ranks.rank() < peer;
    if (peer == ranks.rank()) continue;
    if (first) ranks.send(std::span<const float>(data), peer, {.traffic = Traffic::gradients});
    ranks.recv(std::span(from), peer);
    if (!first) ranks.send(std::span<const float>(data), peer, {.traffic = Traffic::gradients});
  }
}
/// The bytes that the last of n ranks sends if all send all their numbers to all others.
double sent_by_all_send_all(int n) {
  ch::trace::reset_traffic();
  lab::on_ranks(n, [](ch::comm::AnyCommunicator& ranks) {
    std::vector<float> data(count);
    send_all(ranks, data);
  });
  return sent(n - 1, Traffic::gradients);
}

/// The numbers of each rank. Their sums are rounded, so that the order of additions shows. They are computed once, so
/// that all uses have the same bits.
std::vector<std::vector<float>> numbers_of(int ranks) {
  std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks), std::vector<float>(count));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < count; ++i)
      all[rank][i] = 1.0f / (1.0f + static_cast<float>((i * 31 + rank * 17) % 1009));
  return all;
}

/// Checks the result of the student's function on n ranks, and the bytes it sends. Returns whether it ended.
bool judge(lab::Lab& lab, const Code& code, int n) {
  const auto name = [n](const char* what) { return ch::cat(n, " devices: ", what); };
  const auto all = numbers_of(n);
  auto sum = all[0];
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < count; ++i) sum[i] += all[rank][i];
  auto got = all;
  ch::trace::reset_traffic();
  if (!lab.run(name("all_send_all"), [&] {
        lab::on_ranks(
            n,
            [&](ch::comm::AnyCommunicator& ranks) {
              code.all_send_all(ranks, got[static_cast<std::size_t>(ranks.rank())]);
            },
            std::chrono::seconds(5));
      }))
    return false;
  std::string why;
  for (std::size_t rank = 0; rank < got.size() && why.empty(); ++rank)
    for (std::size_t i = 0; i < count && why.empty(); ++i)
      if (const float is = got[rank][i]; is != sum[i]) {
        const auto close_to = [&](float x) { return std::abs(is - x) <= 1e-5f * sum[i]; };
        why = ch::cat("on rank ", rank, " number ", i,
                      close_to(sum[i])                  ? " is right but for its rounding: added in another order"
                      : close_to(sum[i] - all[rank][i]) ? " is the sum without the rank's own number"
                      : close_to(all[rank][i])          ? " is still the rank's own number"
                      : is > sum[i]                     ? " is larger than the sum: what was added twice?"
                                                        : " is not the sum");
      }
  lab.require(name("all_send_all ends with the sum in the order of ranks"), why.empty(), why);
  const double bytes = sent(n - 1, Traffic::gradients), has_to_send = (n - 1) * 4.0 * count;
  lab.require(name("each rank sends its numbers once to every other rank"), bytes == has_to_send,
              bytes == 0 ? "the last rank has sent no bytes of gradients: name the traffic in the call of send"
                         : ch::cat("the last rank has sent ", bytes, " bytes of gradients, which is ",
                                   bytes < has_to_send ? "less" : "more"));
  return true;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  for (const int n : {2, 3, 4, 8})
    if (!judge(lab, code, n)) break;
  for (const int n : {2, 3, 4, 8}) {
    const auto name = [n](const char* what) { return ch::cat(n, " devices: ", what); };
    {
      std::vector<int> ids(static_cast<std::size_t>(n));
      std::iota(ids.begin(), ids.end(), 0);
      ch::DataParallel<Model> net{Model{}, {.device_ids = ids}};
      train(net, 2 * n, [] { ch::trace::reset_traffic(); });
      lab.compare(name("dp, device 0"), sent(0, Traffic::parameters), 0, "To whom does it send the parameters?");
      lab.compare(name("dp, another device"), sent(n - 1, Traffic::gradients), 0,
                  "To whom does it send its gradients?");
    }
    train_ranks<ch::DistributedDataParallel<Model>>(n);
    lab.compare(name("ddp, a rank"), sent(n - 1, Traffic::gradients), 0,
                "Lesson 6 counts how many chunks a rank sends, and their sizes.");
    train_ranks<ch::ParameterServer<Model>>(n);
    lab.compare(name("parameter server, rank 0"), sent(0, Traffic::parameters), 0, "Who needs the new parameters?");
    lab.compare(name("parameter server, a worker"), sent(n - 1, Traffic::gradients), 0, "To which ranks does it send?");
    lab.compare(name("all send all, a rank"), sent_by_all_send_all(n), 0,
                "To how many ranks does it send all its numbers?");
  }
}

}  // namespace bytes_lab
