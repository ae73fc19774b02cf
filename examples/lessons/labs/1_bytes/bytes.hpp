#pragma once
/// What lab 1 measures: a step under each policy, on 2, 3, 4 and 8 devices.

#include <chorus/parallel/parameter_server.hpp>
#include <numeric>

#include "../lab.hpp"

namespace bytes_lab {

inline constexpr const char* title = "Lab 1: bytes on the wire, a step";

/// 554,880 numbers; each parameter can be cut into 2, 3, 4 and 8 equal chunks.
template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D> fc1{744, 624}, fc2{624, 144};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(x))); }
};
using Model = Net<ch::Cpu>;
using ch::trace::Traffic;

inline double sent(int device, Traffic kind) { return static_cast<double>(ch::trace::bytes_sent(device, kind)); }

/// Two steps of training, of which the second one is counted. `meet()` is called between them by all.
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

template <class Student>
void run(lab::Lab& lab) {
  for (const int n : {2, 3, 4, 8}) {
    const auto name = [n](const char* what) { return ch::cat(n, " devices: ", what); };
    {
      std::vector<int> ids(static_cast<std::size_t>(n));
      std::iota(ids.begin(), ids.end(), 0);
      ch::DataParallel<Model> net{Model{}, {.device_ids = ids}};
      train(net, 2 * n, [] { ch::trace::reset_traffic(); });
      lab.compare(name("dp, device 0"), sent(0, Traffic::parameters));
      lab.compare(name("dp, another device"), sent(n - 1, Traffic::gradients));
    }
    train_ranks<ch::DistributedDataParallel<Model>>(n);
    lab.compare(name("ddp, a rank"), sent(n - 1, Traffic::gradients));
    train_ranks<ch::ParameterServer<Model>>(n);
    lab.compare(name("parameter server, rank 0"), sent(0, Traffic::parameters));
    lab.compare(name("parameter server, a worker"), sent(n - 1, Traffic::gradients));

    constexpr std::size_t count = 554880;
    bool right = true;
    std::mutex mutex;
    ch::trace::reset_traffic();
    lab::on_ranks(n, [&](ch::comm::AnyCommunicator& ranks) {
      std::vector<float> numbers(count);
      const auto number_of = [](int rank, std::size_t i) { return 0.1f * static_cast<float>(i % 97) + static_cast<float>(rank); };
      for (std::size_t i = 0; i < count; ++i) numbers[i] = number_of(ranks.rank(), i);
      Student::all_send_all(ranks, numbers);
      for (std::size_t i = 0; i < count; ++i) {
        float sum = number_of(0, i);
        for (int rank = 1; rank < ranks.size(); ++rank) sum += number_of(rank, i);
        if (numbers[i] == sum) continue;
        const std::lock_guard lock(mutex);
        right = false;
      }
    });
    lab.require(name("all_send_all ends with the sum"), right, "numbers differ from the sum in the order of ranks");
    lab.compare(name("all send all, a rank"), sent(n - 1, Traffic::gradients));
  }
}

}  // namespace bytes_lab
