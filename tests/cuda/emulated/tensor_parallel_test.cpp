// TensorParallel on devices, in several processes, without NCCL: the steps of CPUs, with dropout in divided columns and
// clipped gradients.
#include <catch.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <cstdlib>

#include "../../unit/comm/processes.hpp"
#include "../compare.hpp"

namespace tensor_parallel_cuda_test {

using namespace chorus;
using namespace std::chrono_literals;

TEST_CASE("dropout of a range of columns on a GPU keeps the CPU's elements", "[cuda]") {
  const auto check = [&]<class T>(T, const kernels::ColumnsOfRow& columns, bool accumulate) {
    CAPTURE(columns.width, columns.begin, columns.count, accumulate);
    constexpr Index samples = 3, rows = 5;
    compare(
        near<T>,
        [&](auto device, const T* in, T* out) {
          kernels::dropout_columns(device, samples, rows, columns, in, out, 0.4,
                                   {.seed = 7, .step = 3, .operation = 2, .first_sample = 11}, accumulate);
        },
        numbers<T>(samples * rows * columns.count, 1), numbers<T>(samples * rows * columns.count, 2));
  };
  for (const bool accumulate : {false, true}) {
    for (const Index begin : {0, 1, 6}) check(0.0f, {13, begin, 7}, accumulate);
    check(0.0, {8, 4, 4}, accumulate);
    check(bf16(), {9, 3, 1}, accumulate);
  }
}

template <class D>
struct Model : nn::Module {
  nn::Linear<D> first{5, 6};
  nn::ColumnParallelLinear<D> up{6, 13};
  nn::RowParallelLinear<D> down{13, 6};
  nn::Linear<D> last{6, 3};
  nn::Dropout inner{0.4}, outer{0.2};
  CHORUS_MODULE(Model, first, up, down, last, inner, outer)
  auto forward(const auto& x) const { return last(outer(down(inner(tanh(up(tanh(first(x)))))))); }
};

/// Losses and norms of eight steps.
template <class D>
std::string train(const comm::World& world) {
  manual_seed(4);
  Run run({}, {.seed = 9, .timeout = 10s}, world);
  TensorParallel<Model<D>> net{Model<D>{}, run};
  optim::Sgd<D> optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  std::string text;
  for (unsigned step = 0; step < 8; ++step) {
    const auto x = Tensor<float, 2>::from(numbers<float>(40, step), {8, 5});
    auto y = Tensor<std::int64_t, 1>::empty({8});
    for (Index row = 0; row < 8; ++row) y(row) = x(row, 0) > 0 ? 0 : x(row, 1) > 0 ? 1 : 2;
    optimizer.zero_grad();
    const auto loss = cross_entropy(net(x), y);
    loss.backward();
    text += cat(loss.item(), ' ', net.clip_grad_norm(0.1), ' ');
    optimizer.step();
  }
  return text;
}

TEST_CASE("TensorParallel on devices takes the steps of CPUs, with dropout and clipping", "[cuda]") {
  for (const int size : {1, 2, 3}) {
    const auto cpu = test::Ranks(size, train<Cpu>).texts(), gpu = test::Ranks(size, train<Cuda>).texts();
    INFO(size << " ranks\n" << cpu[0] << '\n' << gpu[0]);
    for (const auto& text : gpu) CHECK(text == gpu[0]);
    const char *at = gpu[0].c_str(), *expected = cpu[0].c_str();
    for (int i = 0; i < 16; ++i) {
      char *end = nullptr, *expected_end = nullptr;
      CHECK(std::strtod(at, &end) == Approx(std::strtod(expected, &expected_end)).margin(1e-5));
      REQUIRE(end != at);
      at = end;
      expected = expected_end;
    }
  }
}

}  // namespace tensor_parallel_cuda_test
