// Tensors that a model makes without naming a device are made on the device that computes, forward and backward.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/autograd/custom_function.hpp>
#include <chorus/nn/summary.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/same_bits.hpp>
#include <type_traits>
#include <unit/parallel/policies.hpp>
#include <vector>

namespace dp_default_device_test {

using namespace test::names;
using Row = Tensor<double, 1>;

/// x -> [samples, 3]; every operand besides x and the parameters is made in the pass, with and without the tape.
template <class D, class Norm = nn::Linear<D, double>>
struct Maker : nn::Module {
  nn::Linear<D, double> fc1{5, 3};
  Norm other{3, 3};
  CHORUS_MODULE(Maker, fc1, other)

  static auto backward_with_new_tensors(const auto& x) {
    return custom_function(
        "own", [](const auto& in) { return in * Row::full({3}, 2); },
        [](const auto& dy, const auto&, const auto& in) {
          return dy * Row::ones({3}) * 2.0 + Tensor<double, 2>::zeros(in.shape());
        },
        x);
  }
  auto forward(const auto& x) const {
    auto h = fc1(x) + Row::from({1, 2, 3}, {3}) * 0.1 + arange<double>(0, 3) * 0.1;
    h = checkpoint([](const auto& in) { return tanh(backward_with_new_tensors(in) + linspace<double>(0, 1, 3)); }, h);
    h = backward_with_new_tensors(h) + Tensor<double, 2>::zeros({x.size(0), 3});
    h = matmul(h, eye<double>(3, 3) + eye<double>(3)) + to<double>(one_hot(arange(3), 3))[1];
    if constexpr (std::is_same_v<Norm, nn::Linear<D, double>>)
      return other(h);
    else
      return reshape(other(reshape(h, Shape<3>{-1, 3, 1})), Shape<2>{-1, 3});
  }
};
/// SyncBatchNorm, for which canonical shares have their own threads.
struct Norm : nn::SyncBatchNorm<Cpu, double> {
  Norm(Index channels, Index) : nn::SyncBatchNorm<Cpu, double>(channels) {}
};

template <class Model, class Net>
std::vector<double> trained(Net& net) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  std::vector<double> out;
  for (std::uint32_t step = 0; step < 3; ++step) {
    const Index size = step == 1 ? 7 : 12;
    optimizer.zero_grad();
    const auto loss = mse_loss(net(numbers(size, 5, step)), numbers(size, 3, step + 10));
    loss.backward();
    out.push_back(loss.item());
    optimizer.step();
  }
  for (const double v : test::values(net.module())) out.push_back(v);
  return out;
}

template <class Model>
void check_as_one_device() {
  const auto check = []<class M>(std::type_identity<M>) {
    SingleDevice<M> one{make<Model>(), 3};
    const auto right = trained<Model>(one);
    for (const std::vector<int>& ids : {std::vector{0}, {0, 1}, {0, 2, 1}}) {
      DataParallel<M> net{make<Model>(), {.device_ids = ids}, 3};
      CHECK(distance(trained<Model>(net), right) < rounding);
    }
  };
  check(std::type_identity<Model>{});
  check(std::type_identity<SameBits<Model, 4>>{});
}

TEST_CASE("dp default device: a model that names no devices runs on several, with its backward functions") {
  check_as_one_device<Maker<Cpu>>();
  check_as_one_device<Maker<Cpu, Norm>>();
}

/// Reports where tensors are made.
template <class D>
struct Where : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Where, fc)
  auto forward(const auto& x) const {
    const auto there = static_cast<double>(Row::empty({1}).device().index);
    const auto elsewhere = static_cast<double>(Row::zeros({1}, Cpu{5}).device().index);
    return Tensor<double, 2>::from({there, elsewhere, static_cast<double>(x.device().index)}, {1, 3});
  }
};

TEST_CASE("dp default device: a named one stays, and outside of a pass nothing has changed") {
  DataParallel<Where<Cpu>> net{make<Where<Cpu>>(), {.device_ids = {2, 1}}, 3};
  CHECK(net(numbers(4, 5, 1)).to_vector() == std::vector<double>{2, 5, 2, 1, 5, 1});
  CHECK(Row::empty({1}).device() == Cpu{});
  SingleDevice<Where<Cpu>> one{copy_of(make<Where<Cpu>>(), Cpu{3}), 3};
  CHECK(one(numbers(4, 5, 1)).to_vector()[0] == 3);
  CHECK(Row::empty({1}).device() == Cpu{});
  CHECK_NOTHROW(summary(one.module(), numbers(4, 5, 1)));
}

}  // namespace dp_default_device_test
