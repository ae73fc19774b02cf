// With one seed all policies follow one trajectory on images: a convolutional net in single precision, with the
// loader's batches, which don't divide. They can, because a sample's numbers don't depend on its batch.
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <cstring>

#include "ranks.hpp"

namespace trajectories_test {

using namespace test::names;

/// The structure of train_classifier's toy model.
template <class D, class T = float>
struct Lenet : nn::Module {
  nn::Conv2d<D, T> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  nn::Linear<D, T> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(Lenet, conv1, conv2, fc1, fc2, fc3)
  auto forward(const auto& images) const {
    auto x = max_pool2d(relu(conv1(to<T>(images))), 2);
    x = max_pool2d(relu(conv2(x)), 2);
    return fc3(relu(fc2(relu(fc1(flatten(x))))));
  }
};
using Model = Lenet<Cpu>;

template <class M = Model>
M seeded() {
  manual_seed(1);
  return {};
}

struct Plan {
  Index images, batch;
  int epochs;
  double lr;
};

/// The losses of three epochs of 46 images in batches of 32 (the last batch has 14), or of another plan.
template <class Net>
std::vector<double> losses(Net& net, const Plan& plan = {46, 32, 3, 0.01}) {
  const data::SyntheticImages images{plan.images, 1};
  data::DataLoader loader{images, net.sampler(images), {.batch = plan.batch, .workers = 1}};
  optim::Sgd optimizer{net.parameters(), {.lr = plan.lr, .momentum = 0.9}};
  std::vector<double> out;
  for (int epoch = 0; epoch < plan.epochs; ++epoch) {
    loader.set_epoch(epoch);
    for (auto& [x, y] : loader) {
      optimizer.zero_grad();
      const auto loss = cross_entropy(net(x), y);
      loss.backward();
      optimizer.step();
      out.push_back(net.mean(static_cast<double>(loss.item()), y.numel()));
    }
  }
  return out;
}

void require_same(const std::vector<double>& got, const std::vector<double>& expected, double tolerance = 1e-4) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("step " << i);
    CHECK(got[i] == Approx(expected[i]).epsilon(tolerance));
  }
}

template <int Rank>
Tensor<float, Rank> noise(const Shape<Rank>& shape, std::uint32_t key) {
  auto out = Tensor<float, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i)
    out.data()[i] = 2 * unit_float(philox(key, {static_cast<std::uint32_t>(i), 0, 0, 0})[0]) - 1;
  return out;
}

/// Whether each sample's outputs of `f`, and the gradients of its input, have the same bits in a batch of 64 and in
/// shares of it.
template <int Rank, class F>
bool independent_of_batch(const Shape<Rank>& shape, const F& f) {
  const Variable<float, Rank> whole(noise<Rank>(shape, 5), true);
  const auto y = f(whole);
  const auto seed = noise<std::remove_cvref_t<decltype(y)>::rank>(y.shape(), 6);
  y.backward(seed);
  const auto grad = whole.grad();
  const auto same = [](const auto& a, const auto& b) {
    const auto x = contiguous(a), z = contiguous(b);
    return x.shape() == z.shape() && std::memcmp(x.data(), z.data(), x.bytes()) == 0;
  };
  constexpr std::pair<Index, Index> shares[] = {{0, 32}, {32, 64}, {0, 22},  {22, 43}, {43, 64},
                                                {0, 16}, {48, 64}, {41, 42}, {7, 14}};
  for (const auto& [begin, end] : shares) {
    const Variable<float, Rank> part(contiguous(whole.value().slice(0, begin, end)), true);
    const auto out = f(part);
    out.backward(contiguous(seed.slice(0, begin, end)));
    const bool forward = same(out.value(), y.value().slice(0, begin, end));
    const bool backward = same(part.grad(), grad.slice(0, begin, end));
    if (!forward) UNSCOPED_INFO("outputs of samples " << begin << " to " << end << " differ");
    if (!backward) UNSCOPED_INFO("gradients of samples " << begin << " to " << end << " differ");
    if (!forward || !backward) return false;
  }
  return true;
}

TEST_CASE("trajectories: a convolutional net's losses are the same under all policies, to 1e-4") {
  SingleDevice<Model> single{seeded(), 1};
  const auto expected = losses(single);
  REQUIRE(expected.size() == 6);
  for (const int devices : {2, 3}) {
    INFO(devices << " devices");
    std::vector<int> ids{0, 1, 2};
    ids.resize(static_cast<std::size_t>(devices));
    {
      DataParallel<Model> dp{seeded(), {.device_ids = ids}, 1};
      require_same(losses(dp), expected);
    }  // its threads must end before the fork
    const auto text = common_text(devices, [](const World& world) {
      auto communicator = comm::connect(world);
      DistributedDataParallel<Model> ddp{seeded(), communicator, {}, 1};
      const auto all = losses(ddp);
      return test::text_of(all) + "|" + io::parameters_sha256(ddp.module());
    });
    require_same(test::numbers_in(text), expected);
  }
}

TEST_CASE("trajectories: in double, the losses of 100 fast steps are the same under all policies, to 1e-9") {
  // At this learning rate, a rounding error in single precision can flip a ReLU, which changes all later steps.
  using Precise = Lenet<Cpu, double>;
  const Plan plan{600, 64, 10, 0.02};
  SingleDevice<Precise> single{seeded<Precise>(), 1};
  const auto expected = losses(single, plan);
  REQUIRE(expected.size() == 100);
  for (const int devices : {2, 3}) {
    INFO(devices << " devices");
    std::vector<int> ids{0, 1, 2};
    ids.resize(static_cast<std::size_t>(devices));
    {
      DataParallel<Precise> dp{seeded<Precise>(), {.device_ids = ids}, 1};
      require_same(losses(dp, plan), expected, 1e-9);
    }
    const auto text = common_text(
        devices,
        [&](const World& world) {
          auto communicator = comm::connect(world);
          DistributedDataParallel<Precise> ddp{seeded<Precise>(), communicator, {}, 1};
          return test::text_of(losses(ddp, plan));
        },
        std::chrono::seconds(60));
    require_same(test::numbers_in(text), expected, 1e-9);
  }
}

TEST_CASE("trajectories: a sample's numbers don't depend on the batch it is in") {
  const auto w1 = noise<4>({6, 3, 5, 5}, 1), w2 = noise<4>({16, 6, 5, 5}, 2), w3 = noise<4>({8, 6, 3, 3}, 3);
  const auto b1 = noise<1>({6}, 4), b2 = noise<1>({16}, 4), b3 = noise<1>({8}, 4);
  CHECK(independent_of_batch<4>({64, 3, 18, 18}, [&](const auto& x) { return conv2d(x, w1, b1); }));
  CHECK(independent_of_batch<4>({64, 6, 9, 9}, [&](const auto& x) { return conv2d(x, w2, b2); }));
  CHECK(independent_of_batch<4>({64, 6, 9, 7},
                                [&](const auto& x) { return conv2d(x, w3, b3, {.stride = 2, .padding = 1}); }));
  for (const auto& [in, out] : {std::pair<Index, Index>{400, 120}, {120, 84}, {84, 10}, {784, 256}, {5, 1}}) {
    INFO("linear " << in << " to " << out);
    const auto w = noise<2>({out, in}, 1);
    const auto b = noise<1>({out}, 2);
    CHECK(independent_of_batch<2>({64, in}, [&](const auto& x) { return linear(x, w, b); }));
    CHECK(independent_of_batch<2>({64, in}, [&](const auto& x) { return linear(x, w); }));
  }
  CHECK(independent_of_batch<4>({64, 6, 10, 10}, [](const auto& x) { return max_pool2d(x, 2); }));
  CHECK(independent_of_batch<4>({64, 6, 9, 9}, [](const auto& x) { return avg_pool2d(x, 3, {.stride = 2}); }));
  CHECK(independent_of_batch<4>({64, 6, 9, 9}, [](const auto& x) { return relu(x); }));
  CHECK(independent_of_batch<2>({64, 37}, [](const auto& x) { return tanh(x); }));
  CHECK(independent_of_batch<2>({64, 10}, [](const auto& x) { return log_softmax(x, 1); }));
  const auto mean = noise<1>({6}, 1), variance = Tensor<float, 1>::full({6}, 2), w = noise<1>({6}, 3);
  CHECK(independent_of_batch<4>({64, 6, 5, 5},
                                [&](const auto& x) { return batch_norm(x, w, mean, mean, variance, false); }));
}

}  // namespace trajectories_test
