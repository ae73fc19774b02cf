// DataParallel on two GPUs and more, over NCCL: the steps of copies that share one GPU.
#include <catch.hpp>
#include <chorus/comm/nccl.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <cstdio>

#include "gpu.hpp"

namespace data_parallel_nccl_test {

using namespace chorus;

struct Net : nn::Module {
  nn::Linear<Cuda> fc1{16, 64}, fc2{64, 4};
  nn::BatchNorm<Cuda> norm{64};
  CHORUS_MODULE(Net, fc1, norm, fc2)
  auto forward(const auto& x) const { return fc2(tanh(norm(fc1(x)))); }
};

struct Result {
  std::vector<double> losses;
  std::vector<float> parameters;
};

// Batches of 24, and in between one that is smaller than the number of devices.
Result train(const std::vector<int>& ids) {
  manual_seed(4);
  DataParallel<Net> net{Net{}, {.device_ids = ids}, 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  Result result;
  for (std::uint32_t i = 0; i < 10; ++i) {
    const Index rows = i == 5 ? 1 : 24;
    auto x = Tensor<float, 2>::empty({rows, 16});
    auto y = Tensor<std::int64_t, 1>::empty({rows});
    for (Index row = 0; row < rows; ++row) {
      for (Index c = 0; c < 16; ++c)
        x(row, c) = unit_float(philox(1, {static_cast<std::uint32_t>(row * 16 + c), i, 0, 0})[0]) - 0.5f;
      y(row) = x(row, 0) > 0 ? 0 : x(row, 1) > 0 ? 1 : x(row, 2) > 0 ? 2 : 3;
    }
    if (i == 5) net.eval();  // one row has no variance
    optimizer.zero_grad();
    const auto loss = cross_entropy(net(x), y);
    loss.backward();
    optimizer.step();
    net.train();
    result.losses.push_back(static_cast<double>(loss.item()));
  }
  for (const auto& named : net.parameters()) {
    std::vector<float> values(static_cast<std::size_t>(named.parameter->count()));
    copy_bytes(Cpu{}, values.data(), named.parameter->where(), named.parameter->value_data(),
               named.parameter->size_bytes());
    result.parameters.insert(result.parameters.end(), values.begin(), values.end());
  }
  return result;
}

TEST_CASE("DataParallel over NCCL takes the steps of copies on one GPU", "[cuda]") {
  CHORUS_NEEDS_GPU;
  REQUIRE(comm::device_group_maker() != nullptr);
  const int there = cuda::device_count();
  if (there < 2) {
    std::puts("SKIPPED: DataParallel over NCCL needs 2 GPUs, this machine has 1");
    WARN("SKIPPED: DataParallel over NCCL needs 2 GPUs, this machine has 1");
    return;
  }
  for (int count = 2; count <= there; count *= 2) {
    std::vector<int> apart, together(static_cast<std::size_t>(count), 0);
    for (int i = 0; i < count; ++i) apart.push_back(i);
    INFO(count << " GPUs");
    const auto expected = train(together), got = train(apart), again = train(apart);
    CHECK(expected.losses.back() < expected.losses.front());
    for (std::size_t i = 0; i < got.losses.size(); ++i) CHECK(got.losses[i] == Approx(expected.losses[i]).margin(1e-4));
    for (std::size_t i = 0; i < got.parameters.size(); ++i)
      REQUIRE(got.parameters[i] == Approx(expected.parameters[i]).margin(1e-4));
    CHECK(again.losses == got.losses);
    CHECK(again.parameters == got.parameters);
  }
}

// The group of one that a single GPU can have: the calls of NCCL themselves, and an end in order.
TEST_CASE("NCCL's broadcast and reduce of a group of GPUs", "[cuda]") {
  CHORUS_NEEDS_GPU;
  const std::vector<int> devices{0};
  const auto group = comm::device_group_maker()(devices, std::chrono::seconds(60));
  group->join(0);
  const auto x = Tensor<float, 1, Cuda>::from({1, 2, 3}, {3});
  const auto y = Tensor<double, 1, Cuda>::from({4, 5}, {2});
  const std::vector<comm::DevicePiece> pieces{{x.data(), 3, DType::f32}, {y.data(), 2, DType::f64}};
  group->broadcast(0, pieces);
  group->reduce(0, pieces);
  CHECK(x.to_vector() == std::vector<float>{1, 2, 3});
  CHECK(y.to_vector() == std::vector<double>{4, 5});
  group->leave(0);
}

}  // namespace data_parallel_nccl_test
