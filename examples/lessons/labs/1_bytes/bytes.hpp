#pragma once
/// Measurements of lab 1: a step under each policy, on 2, 3, 4 and 8 devices.

#include <chorus/parallel/parameter_server.hpp>
#include <numeric>

#include "../answers.hpp"

namespace bytes_lab {

inline constexpr const char* title = "Lab 1: bytes on the wire, a step";

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

inline double sent(int device, Traffic kind) { return static_cast<double>(ch::trace::bytes_sent(device, kind)); }

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

/// The numbers of each rank. Their sums are rounded, so that the order of additions shows. They are computed once, so
/// that all uses have the same bits.
inline std::vector<std::vector<float>> numbers_of(int ranks) {
  std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks), std::vector<float>(count));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < count; ++i)
      all[rank][i] = 1.0f / (1.0f + static_cast<float>((i * 31 + rank * 17) % 1009));
  return all;
}

/// Checks the result of the student's function on n ranks, and the bytes it sends. Returns whether it ended.
template <class Student>
bool judge(lab::Lab& lab, int n) {
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
              Student::all_send_all(ranks, got[static_cast<std::size_t>(ranks.rank())]);
            },
            std::chrono::seconds(5));
      }))
    return false;
  std::string why;
  for (std::size_t rank = 0; rank < got.size() && why.empty(); ++rank)
    for (std::size_t i = 0; i < count && why.empty(); ++i)
      if (const float is = got[rank][i]; is != sum[i]) {
        const bool rounding = std::abs(is - sum[i]) <= 1e-5f * sum[i];
        why = ch::cat("on rank ", rank, " number ", i,
                      rounding ? " is right but for its rounding: added in another order" : " is not the sum");
      }
  lab.require(name("all_send_all ends with the sum in the order of ranks"), why.empty(), why);
  const double bytes = sent(n - 1, Traffic::gradients);
  lab.require(name("each rank sends its numbers once to every other rank"),
              bytes == answers::all_send_all(n, 4.0 * count),
              ch::cat("of gradients, the last rank has sent ", bytes, " bytes"));
  return true;
}

template <class Student>
void run(lab::Lab& lab) {
  constexpr double bytes = 4.0 * count;
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
    lab.compare(name("all send all, a rank"), answers::all_send_all(n, bytes), 0,
                "To how many ranks does it send all its numbers?");
  }
  for (const int n : {2, 3, 4, 8})
    if (!judge<Student>(lab, n)) return;
}

}  // namespace bytes_lab
