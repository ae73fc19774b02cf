// Device memory over a communicator of host memory: each call gives the host's result, and fails as the host's does. So
// DistributedDataParallel trains on GPUs without NCCL, in several processes.
#include <catch.hpp>
#include <chorus/comm/staged.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <concepts>

#include "../../unit/comm/processes.hpp"
#include "../../unit/message_of.hpp"
#include "emulated_engine.hpp"

namespace staged_test {

using namespace chorus;
using namespace std::chrono_literals;

template <class T, class D>
Tensor<T, 1, D> numbers(int rank, Index count) {
  auto out = Tensor<T, 1>::empty({count});
  for (Index i = 0; i < count; ++i) out.data()[i] = static_cast<T>(0.1f * static_cast<float>((rank + 2) * (i % 7 + 1)));
  return to_device(out, D{});
}
template <class T, class D>
std::span<T> span_of(const Tensor<T, 1, D>& x) {
  return {x.data(), static_cast<std::size_t>(x.numel())};
}

/// The results of all calls, for numbers in the memory of D. Calls in the background overlap.
template <class T, class D>
std::string results(comm::AnyCommunicator& c, Index count) {
  const int rank = c.rank(), next = (rank + 1) % c.size(), before = (rank + c.size() - 1) % c.size();
  const auto make = [&](Index n) { return numbers<T, D>(rank, n); };
  const auto sums = make(count), largest = make(count), from_1 = make(count), mine = make(count);
  const auto all = make(count * c.size()), part = make(count), sent = make(count), received = make(count);
  const auto in_place = make(count * c.size()), again = make(count), one = make(1);
  {
    auto work = c.all_reduce_async(span_of(sums), comm::ReduceOp::sum, {.scale = std::integral<T> ? 1 : 0.5});
    auto more = c.broadcast_async(span_of(from_1), 1);
    const auto whole = make(count * c.size());
    auto scattered = c.reduce_scatter_async(std::span<const T>(span_of(whole)), span_of(part));
    more.wait();
    while (!work.done()) std::this_thread::yield();
    auto gathered = c.all_gather_async(std::span<const T>(span_of(mine)), span_of(all));
    if (rank == 0) c.send(span_of(sent), next);
    c.recv(span_of(received), before);
    if (rank != 0) c.send(span_of(sent), next);
    scattered.wait();
  }
  c.all_reduce(span_of(largest), comm::ReduceOp::max);
  const auto chunk = span_of(in_place).subspan(static_cast<std::size_t>(rank * count), static_cast<std::size_t>(count));
  c.all_gather(std::span<const T>(chunk), span_of(in_place));
  for (int i = 0; i < 3; ++i) c.all_reduce(span_of(again));
  c.all_reduce(span_of(one));
  std::int64_t control = rank;
  c.all_reduce(std::span(&control, 1));
  c.barrier();
  std::string text = cat(control);
  for (const auto& x : {sums, largest, from_1, all, part, received, in_place, again, one})
    for (const T number : x.to_vector()) text += cat(' ', static_cast<double>(number));
  return text;
}

template <class T>
std::string on_device(comm::AnyCommunicator& host, Index count) {
  comm::StagedCommunicator staged(host);
  const auto expected = results<T, Cpu>(host, count), got = results<T, Cuda>(staged, count);
  return got == expected ? "" : cat("expected\n", expected, "\ngot\n", got);
}

TEST_CASE("staged: calls on device memory give the host's results, also in the background", "[cuda]") {
  const auto texts = test::Ranks(3, [](const comm::World& world) {
                       auto host = comm::connect(world);
                       std::string wrong;
                       for (const Index count : {0, 1, 5, 3000}) wrong += on_device<float>(host, count);
                       return wrong + on_device<bf16>(host, 33) + on_device<std::int64_t>(host, 33);
                     }).texts();
  for (const auto& text : texts) CHECK(text == "");
}

TEST_CASE("staged: calls fail as the host's do, and go on failing", "[cuda]") {
  const auto texts = test::Ranks(
                         2,
                         [](const comm::World& world) {
                           auto host = comm::connect(world);
                           comm::StagedCommunicator staged(host);
                           const auto x = numbers<float, Cuda>(world.rank, 10);
                           if (world.rank == 1) {
                             staged.all_reduce(span_of(x));
                             std::this_thread::sleep_for(1s);
                             return std::string();
                           }
                           staged.all_reduce(span_of(x));
                           auto first = staged.all_reduce_async(span_of(x)),
                                second = staged.broadcast_async(span_of(x), 1);
                           const auto of_second = message_of<CommError>([&] { second.wait(); });
                           const auto of_first = message_of<CommError>([&] { first.wait(); });
                           const auto of_later = message_of<CommError>([&] { staged.all_reduce(span_of(x)); });
                           return cat(of_first == of_second ? "" : of_second + "\n", of_first, '\n', of_later);
                         },
                         300ms)
                         .texts();
  CHECK_THAT(texts[0], Catch::Matchers::StartsWith("rank 0: all_reduce #1 (sum of 10 F32): "));
  CHECK_THAT(texts[0], Catch::Matchers::Contains("\nrank 0: all_reduce #") &&
                           Catch::Matchers::Contains("this communicator has failed before"));
}

TEST_CASE("staged: what can't be is refused by name", "[cuda]") {
  comm::AnyCommunicator host;
  comm::StagedCommunicator staged(host);
  const auto x = numbers<float, Cuda>(0, 4), other = Tensor<float, 1, Cuda>::zeros({4}, Cuda{1});
  const auto to_other = [&] { staged.all_gather(std::span<const float>(span_of(x)), span_of(other)); };
  CHECK_THROWS_WITH(to_other(), "all_gather: expected both arguments in one device's memory");
  const cuda::Stream stream(Cuda{0});
  const cuda::StreamScope scope(stream);
  CHORUS_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const auto captured = message_of<UsageError>([&] { staged.all_reduce(span_of(x)); });
  cudaGraph_t graph = nullptr;
  CHORUS_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CHORUS_CUDA_CHECK(cudaGraphDestroy(graph));
  CHECK_THAT(captured,
             Catch::Matchers::StartsWith("all_reduce: alone carries it through the host's memory, which can't "
                                         "be captured"));
}

template <class D>
struct Perceptron : nn::Module {
  nn::Linear<D> fc1{16, 64}, fc2{64, 64}, fc3{64, 4};
  nn::Dropout drop{0.2};
  CHORUS_MODULE(Perceptron, fc1, fc2, fc3, drop)
  auto forward(const auto& x) const { return fc3(drop(tanh(fc2(tanh(fc1(x)))))); }
};

const DistributedDataParallelOptions small_buckets{.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-2};

/// Losses of 8 steps, then the parameters' hash.
template <class Net>
std::string train(Net& net, const comm::World& world) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  std::vector<double> losses;
  const auto step = [&](const auto& x, const auto& y) {
    optimizer.zero_grad();
    auto loss = cross_entropy(net(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  };
  const Index global = 25, each = global / world.size, first = each * world.rank;
  const Index mine = world.rank == world.size - 1 ? global - first : each;
  for (std::uint32_t i = 0; i < 8; ++i) {
    auto x = Tensor<float, 2>::empty({mine, 16});
    auto y = Tensor<std::int64_t, 1>::empty({mine});
    for (Index row = 0; row < mine; ++row) {
      for (Index c = 0; c < 16; ++c)
        x(row, c) = unit_float(philox(1, {static_cast<std::uint32_t>((first + row) * 16 + c), i, 0, 0})[0]) - 0.5f;
      y(row) = x(row, 0) > 0 ? 0 : x(row, 1) > 0 ? 1 : x(row, 2) > 0 ? 2 : 3;
    }
    losses.push_back(net.mean(step(x, y).item(), mine));
  }
  std::string text;
  for (const double loss : losses) text += cat(loss, ' ');
  return text + "|" + io::parameters_sha256(net.module());
}

template <class D>
std::string train_from_run(const comm::World& world) {
  manual_seed(4);
  Run run({}, {.seed = 9, .timeout = 10s}, world);
  DistributedDataParallel<Perceptron<D>> net{Perceptron<D>{}, run, small_buckets};
  return train(net, world);
}
std::string train_directly(const comm::World& world) {
  manual_seed(4);
  comm::AnyCommunicator direct(std::make_shared<test::EmulatedEngine>(world));
  DistributedDataParallel<Perceptron<Cuda>> net{Perceptron<Cuda>{}, direct, small_buckets, 9};
  return train(net, world);
}

TEST_CASE("staged: without NCCL, DistributedDataParallel in several processes takes the steps of CPUs", "[cuda]") {
  for (const int size : {1, 2, 3}) {
    const auto cpu = test::Ranks(size, train_from_run<Cpu>).texts(),
               gpu = test::Ranks(size, train_from_run<Cuda>).texts();
    const auto direct = test::Ranks(size, train_directly).texts();
    INFO(size << " ranks\n" << cpu[0] << '\n' << gpu[0]);
    for (const auto& text : gpu) CHECK(text == gpu[0]);
    CHECK(gpu[0] == direct[0]);  // the same bits as without copies
    const char *at = gpu[0].c_str(), *expected = cpu[0].c_str();
    for (int step = 0; step < 8; ++step) {
      char *end = nullptr, *expected_end = nullptr;
      CHECK(std::strtod(at, &end) == Approx(std::strtod(expected, &expected_end)).margin(1e-5));
      at = end;
      expected = expected_end;
    }
  }
}

}  // namespace staged_test
