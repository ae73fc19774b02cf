// The policies over a simulated group: the same numbers as ranks that are threads, and known times.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/simulate/simulate.hpp>
#include <cmath>
#include <exception>
#include <thread>

#include "policies.hpp"

namespace simulated_policies_test {

using namespace chorus;
using namespace test;
using comm::simulated::links_named;
using comm::simulated::simulate;
using comm::simulated::SimulatedRank;

/// Draws random numbers and has buffers.
template <class D>
struct Noisy : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 3};
  nn::BatchNorm<D, double> norm{3};
  nn::Dropout dropout{0.25};
  CHORUS_MODULE(Noisy, fc1, norm, dropout, fc2)
  auto forward(const auto& x) const {
    return fc2(dropout(tanh(flatten(norm(reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}))))));
  }
};

template <class T, int Rank>
Tensor<T, Rank> share_of(const Tensor<T, Rank>& whole, int rank, int ranks) {
  const auto n = static_cast<std::size_t>(ranks), r = static_cast<std::size_t>(rank);
  return whole.slice(0, share_begin(whole.size(0), n, r), share_begin(whole.size(0), n, r + 1));
}

/// Trains as one rank for some steps; returns the final numbers.
template <class Net>
std::vector<double> trained(comm::AnyCommunicator& c) {
  Net net(make<Noisy<Cpu>>(), c, {}, 3);
  optim::Sgd optimizer{net.parameters(), {.lr = 0.2, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 5; ++number) {
    optimizer.zero_grad();
    const Index samples = 3 * c.size() + static_cast<Index>(number);  // uneven shares
    const auto mine = share_of(labels(samples, 3, number), c.rank(), c.size());
    cross_entropy(net(share_of(numbers(samples, 5, number), c.rank(), c.size())), mine).backward();
    optimizer.step();
  }
  net.eval();
  return values(net.module());
}

template <class Net>
void check_bits() {
  for (int n = 2; n <= 8; ++n) {
    INFO(n << " ranks");
    std::vector<std::vector<double>> real(static_cast<std::size_t>(n)), simulated(real);
    auto group = comm::thread_group(n, std::chrono::seconds(60), comm::Algorithm::ring);
    std::vector<std::thread> threads;
    for (auto& c : group) threads.emplace_back([&] { real[static_cast<std::size_t>(c.rank())] = trained<Net>(c); });
    for (auto& thread : threads) thread.join();
    simulate({.ranks = n, .computing = {.jitter = 0.5}, .all_reduce = comm::Algorithm::ring}, [&](SimulatedRank& rank) {
      simulated[static_cast<std::size_t>(rank.rank())] = trained<Net>(rank.communicator());
    });
    CHECK(real == simulated);
    CHECK(real[0] == real[1]);
  }
}

TEST_CASE("simulated: DistributedDataParallel, LocalSgd and ParameterServer have the bits of ranks in threads") {
  check_bits<DistributedDataParallel<Noisy<Cpu>>>();
  check_bits<LocalSgd<Noisy<Cpu>>>();
  check_bits<ParameterServer<Noisy<Cpu>>>();
}

TEST_CASE("simulated: 64 ranks train one model") {
  std::vector<std::vector<double>> all(64);
  simulate({.ranks = 64, .links = links_named("nvlink8+25gbit")}, [&](SimulatedRank& rank) {
    all[static_cast<std::size_t>(rank.rank())] = trained<DistributedDataParallel<Noisy<Cpu>>>(rank.communicator());
  });
  for (const auto& one : all) CHECK(one == all[0]);
}

/// A rank computes this long for each parameter's gradient.
constexpr double forward_time = 2e-3, gradient_time = 1e-3;

/// Each rank's times of an iteration, with buckets of `cap_mb`; 0: one parameter each.
std::vector<DdpTimes> iteration(int ranks, const comm::simulated::Computing& computing, double cap_mb) {
  std::vector<DdpTimes> all(static_cast<std::size_t>(ranks));
  auto links = links_named("100mbit");
  links.call = 0;
  simulate({.ranks = ranks, .links = links, .computing = computing, .all_reduce = comm::Algorithm::ring},
           [&](SimulatedRank& rank) {
             DistributedDataParallel net(make<Smooth<Cpu>>(), rank.communicator(),
                                         {.first_bucket_cap_mb = cap_mb, .bucket_cap_mb = cap_mb}, 3);
             const auto& layers = net.module();
             const auto slow = [&](const auto& gradient) {
               rank.compute(gradient_time);
               return gradient;
             };
             for (const auto* layer : {&layers.fc1, &layers.fc2, &layers.fc3}) layer->weight.register_hook(slow);
             const auto loss = sum(net(numbers(4, 5, 1)));
             loss.backward();
             all[static_cast<std::size_t>(rank.rank())] = net.logging_data().last;
           });
  return all;
}

TEST_CASE("simulated: DistributedDataParallel keeps virtual times") {
  const auto one = iteration(4, {}, 25).front();  // one bucket, after the end of backward
  CHECK(std::abs(one.backward_compute_time - 3 * gradient_time) < 1e-3);
  CHECK(one.hidden() < 0.01);
  const auto each = iteration(4, {}, 0).front();
  CHECK(each.hidden() > 0.3);
  CHECK(each.exposed_comm_time > 0);
  // A straggler that is 2 ms late costs the others 2 ms of exposed communication.
  const auto late = iteration(4, {.stragglers = {{2, 1 + 2.0 / 3}}}, 25);
  CHECK(std::abs(late[0].exposed_comm_time - one.exposed_comm_time - 2e-3) < 2e-4);
  CHECK(std::abs(late[2].backward_compute_time - one.backward_compute_time - 2e-3) < 2e-4);
}

}  // namespace simulated_policies_test
