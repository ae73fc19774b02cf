// Models in bf16 and half: float layers stay float, copies follow the parameters, all policies take the same steps.
#include <catch.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <cmath>

#include "../io/files.hpp"
#include "ranks.hpp"

namespace mixed_precision_test {

using namespace test::names;

template <class D>
struct Net : nn::Module {
  nn::Linear<D> fc1{5, 32}, fc2{32, 16}, fc3{16, 3};
  CHORUS_MODULE(Net, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};

Tensor<float, 2> floats(Index rows, std::uint32_t key) { return to<float>(numbers(rows, 5, key)); }

/// Which of three corners is nearest to the sample: a task that can be learnt.
Tensor<std::int64_t, 1> targets(const Tensor<float, 2>& x) {
  auto out = Tensor<std::int64_t, 1>::empty({x.size(0)});
  for (Index i = 0; i < x.size(0); ++i) out(i) = x(i, 0) > 0.2f ? 0 : x(i, 1) > 0 ? 1 : 2;
  return out;
}

template <class Policy>
double train(Policy& net, int steps, double lr = 0.1) {
  optim::Sgd optimizer{net.parameters(), {.lr = lr, .momentum = 0.9}};
  optim::GradScaler scaler{net.parameters(), {.init_scale = 1024}};
  double last = 0;
  for (int i = 0; i < steps; ++i) {
    const auto x = floats(32, static_cast<std::uint32_t>(i));
    optimizer.zero_grad();
    const auto loss = cross_entropy(net(x), targets(x));
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    last = i < steps - 20 ? 0 : last + loss.item() / 20;
  }
  return last;
}

template <class T>
void learns_like_float() {
  manual_seed(5);
  SingleDevice<Net<Cpu>> exact{Net<Cpu>{}};
  manual_seed(5);
  SingleDevice<nn::MixedPrecision<Net<Cpu>, T>> mixed{nn::MixedPrecision<Net<Cpu>, T>{}};
  const double float_loss = train(exact, 400), loss = train(mixed, 400);
  CHECK(float_loss < 0.2);
  CHECK(loss < float_loss + 0.03);
  CHECK(loss != float_loss);
}

TEST_CASE("mixed precision learns what float learns", "[parallel]") {
  learns_like_float<bf16>();
  learns_like_float<half>();
}

TEST_CASE("mixed precision: its copies follow what is loaded", "[parallel]") {
  const chorus_test::TemporaryFolder folder;
  using Model = nn::MixedPrecision<Net<Cpu>>;
  SingleDevice<Model> saved{Model{}}, single{Model{}};
  DataParallel<Model> dp{Model{}, {.device_ids = {0, 1}}};
  io::save(saved.module(), folder / "model");
  const auto output = [](auto& net) { return net(floats(4, 1)).value().to_vector(); };
  const auto expected = output(saved);
  CHECK(output(single) != expected);
  CHECK(output(dp) != expected);
  io::load(single.module(), folder / "model");
  io::load(dp.module(), folder / "model");
  CHECK(output(single) == expected);
  CHECK(output(dp) == expected);
}

TEST_CASE("mixed precision keeps names, float parameters and float gradients", "[parallel]") {
  SingleDevice<nn::MixedPrecision<Net<Cpu>>> net{nn::MixedPrecision<Net<Cpu>>{}};
  const auto parameters = nn::named_parameters<Cpu>(net.module());
  REQUIRE(parameters.size() == 6);
  CHECK(parameters[0].name == "fc1.weight");
  const auto out = net(floats(4, 1));
  static_assert(std::is_same_v<decltype(out.item()), float>);
  sum(out).backward();
  for (const auto& named : parameters) {
    CHECK(named.parameter->dtype() == DType::f32);
    CHECK(named.parameter->grad_arrived());
  }
  // The weight took part as bf16, without its last 16 bits.
  const auto weight = net.module().model().fc1.weight.template narrow_copy<bf16>();
  REQUIRE(weight.defined());
  CHECK(static_cast<float>(weight(0, 0)) == static_cast<float>(bf16(net.module().model().fc1.weight.value()(0, 0))));
}

TEST_CASE("mixed precision's copies follow the parameters, and nothing is converted twice", "[parallel]") {
  using Model = nn::MixedPrecision<Net<Cpu>>;
  SingleDevice<Model> net{Model{}};
  const auto x = floats(4, 1);
  const auto before = net(x).value().to_vector();
  const auto* copy = net.module().model().fc2.weight.template narrow_copy<bf16>().data();
  CHECK(net(x).value().to_vector() == before);
  CHECK(net.module().model().fc2.weight.template narrow_copy<bf16>().data() == copy);

  net.module().model().fc2.weight.assign(Tensor<float, 2>::zeros({16, 32}));
  CHECK(!net.module().model().fc2.weight.template narrow_copy<bf16>().defined());
  CHECK(net(x).value().to_vector() != before);
  CHECK(static_cast<float>(net.module().model().fc2.weight.template narrow_copy<bf16>()(3, 3)) == 0);

  // A copy of the model has its own parameters after a policy has moved them, and must not share the narrow copies.
  DataParallel<Model> parallel{net.module(), {.device_ids = {0, 1}}};
  CHECK(distance(
            [&] {
              const auto v = to<double>(parallel(x).value()).to_vector();
              return v;
            }(),
            [&] {
              const auto v = to<double>(net(x).value()).to_vector();
              return v;
            }()) < 1e-6);
}

TEST_CASE("mixed precision's copies on all of DataParallel's devices follow the parameters", "[parallel]") {
  using Model = nn::MixedPrecision<Net<Cpu>>;
  SingleDevice<Model> single{Model{}};
  DataParallel<Model> net{single.module(), {.device_ids = {0, 1, 2}}};
  const auto x = floats(9, 1);
  for (const double value : {0.1, 0.2, 0.3}) {
    for (auto* model : {&single.module(), &net.module()})
      model->model().fc1.weight.assign(Tensor<float, 2>::full({32, 5}, static_cast<float>(value)));
    CHECK(net(x).value().to_vector() == single(x).value().to_vector());
  }
}

TEST_CASE("mixed precision's copies follow parameters that come at the end of a join", "[parallel]") {
  const auto text = test::common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    using Model = nn::MixedPrecision<Net<Cpu>, bf16>;
    DistributedDataParallel<Model> net{Model{Net<Cpu>{}}, communicator, {}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.5}};
    const auto outputs = [&] {
      const NoGrad scope;
      return to<double>(net(floats(4, 1))).value().to_vector();
    };
    net.join([&] {
      for (int step = 0; step < 1 + 2 * world.rank; ++step) {
        optimizer.zero_grad();
        mean(square(to<float>(net(floats(4, static_cast<std::uint32_t>(step + 10 * world.rank)))))).backward();
        optimizer.step();
      }
      outputs();  // makes narrow copies of the current parameters
    });
    return test::text_of(outputs());
  });
  CHECK(test::numbers_in(text).size() == 12);
}

TEST_CASE("a step that overflowed is left out and the scale shrinks", "[parallel]") {
  using Model = nn::MixedPrecision<Net<Cpu>, half>;
  SingleDevice<Model> net{Model{}};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  optim::GradScaler scaler{net.parameters(), {.init_scale = 1e9, .growth_interval = 3}};
  const auto x = floats(8, 1);
  const auto hash = [&] { return io::parameters_sha256(net.module()); };
  const auto before = hash();
  int skipped = 0;
  for (int i = 0; i < 40; ++i) {
    optimizer.zero_grad();
    scaler.scale(cross_entropy(net(x), targets(x))).backward();
    const double scale = scaler.loss_scale();
    if (scaler.step(optimizer)) break;
    CHECK(scaler.loss_scale() == scale / 2);
    CHECK(hash() == before);
    ++skipped;
  }
  CHECK(skipped > 5);
  CHECK(skipped < 40);
  CHECK(scaler.skipped_steps() == skipped);
  CHECK(hash() != before);
  const double scale = scaler.loss_scale();
  for (int i = 0; i < 2; ++i) {
    CHECK(scaler.loss_scale() == scale);
    optimizer.zero_grad();
    cross_entropy(net(x), targets(x)).backward();
    scaler.step(optimizer);
  }
  CHECK(scaler.loss_scale() == 2 * scale);
}

TEST_CASE("the scale does not change the step", "[parallel]") {
  std::vector<std::vector<double>> ends;
  for (const double scale : {1.0, 4096.0}) {
    manual_seed(5);
    SingleDevice<Net<Cpu>> net{Net<Cpu>{}};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    optim::GradScaler scaler{net.parameters(), {.init_scale = scale}};
    const auto x = floats(8, 1);
    scaler.scale(cross_entropy(net(x), targets(x))).backward();
    CHECK(scaler.unscale());
    optim::clip_grad_norm(net.parameters(), 0.1);
    CHECK(scaler.step(optimizer));
    std::vector<double> end;
    for (const auto& named : nn::named_parameters<Cpu>(net.module()))
      for (Index i = 0; i < named.parameter->count(); ++i)
        end.push_back(static_cast<const float*>(named.parameter->value_data())[i]);
    ends.push_back(end);
  }
  CHECK(distance(ends[0], ends[1]) < 1e-7);
}

TEST_CASE("one rank's overflow is left out by all ranks", "[parallel]") {
  const auto text = common_text(3, [](const World& world) {
    using Model = nn::MixedPrecision<Net<Cpu>, half>;
    manual_seed(5);
    Distributed<Model> rank(world, {}, Model{});
    auto& net = rank.net;
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    optim::GradScaler scaler{net.parameters(), {.init_scale = 256}};
    std::string out;
    for (std::uint32_t i = 0; i < 12; ++i) {
      const auto x = test::share(floats(12, i), world);
      optimizer.zero_grad();
      auto loss = scaler.scale(cross_entropy(net(x), targets(x)));
      if (i % 4 == 1 && world.rank == 2) loss = loss * 1e30f;  // inf
      if (i % 4 == 2 && world.rank == 1) loss = loss * std::numeric_limits<float>::quiet_NaN();
      loss.backward();
      out += scaler.step(optimizer) ? "stepped " : "skipped ";
      out += cat(scaler.loss_scale(), " ", io::parameters_sha256(net.module()).substr(0, 12), "\n");
    }
    return out;
  });
  CHECK(std::count(text.begin(), text.end(), '\n') == 12);
  std::size_t skipped = 0;
  for (auto at = text.find("skipped"); at != std::string::npos; at = text.find("skipped", at + 1)) ++skipped;
  CHECK(skipped == 6);
}

TEST_CASE("an overflow in a rank's own parameter is left out by all ranks that ask", "[parallel]") {
  const auto text = common_text(2, [](const World& world) {
    manual_seed(5);
    Distributed<Net<Cpu>> rank(world, {.parameters_and_buffers_to_ignore = {"fc3.bias"}}, Net<Cpu>{});
    auto& net = rank.net;
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    optim::GradScaler scaler{net, {.init_scale = 256}};
    std::string out;
    for (std::uint32_t i = 0; i < 4; ++i) {
      const auto x = test::share(floats(12, i), world);
      optimizer.zero_grad();
      scaler.scale(cross_entropy(net(x), targets(x))).backward();
      if (i == 1 && world.rank == 1) net.module().fc3.bias.grad()(0) = std::numeric_limits<float>::infinity();
      out += scaler.step(optimizer) ? "stepped " : "skipped ";
    }
    return cat(out, scaler.loss_scale());
  });
  CHECK(text == "stepped skipped stepped stepped 128");
}

struct Words : nn::Module {
  nn::Embedding<Cpu> word{7, 8}, place{4, 8};
  nn::Linear<Cpu> head{8, 3};
  CHORUS_MODULE(Words, word, place, head)
  auto forward(const auto& words) const {
    const auto x = word(words);
    static_assert(NarrowOperand<decltype(x)> == NarrowOperand<decltype(head(x))>);
    const auto places = Tensor<std::int64_t, 1>::from({0, 1, 2, 3}, {4});
    narrow = NarrowOperand<decltype(x)>;
    return head(tanh(reshape(x + type_as(place(places), x), Shape<2>{4 * words.size(0), 8})));
  }
  mutable bool narrow = false;
};

TEST_CASE("mixed precision: what is looked up by integers is narrow, and its gradients are added up in float",
          "[parallel]") {
  const auto words = Tensor<std::int64_t, 2>::from({0, 1, 1, 1, 1, 6, 1, 1}, {2, 4});
  const auto labels = Tensor<std::int64_t, 1>::from({0, 1, 2, 0, 1, 2, 0, 1}, {8});
  const auto gradient = [&]<class Model>(bool narrow) {
    manual_seed(4);
    SingleDevice net{Model{}, 3};
    const auto scores = net(words);
    static_assert(std::is_same_v<typename tensor_of<decltype(scores)>::value_type, float>);
    cross_entropy(scores, labels).backward();
    auto& words_of = [&]() -> Words& {
      if constexpr (requires { net.module().model(); })
        return net.module().model();
      else
        return net.module();
    }();
    CHECK(words_of.narrow == narrow);
    return words_of.word.weight.grad().to_vector();
  };
  const auto exact = gradient.template operator()<Words>(false);
  const auto mixed = gradient.template operator()<nn::MixedPrecision<Words>>(true);
  REQUIRE(exact.size() == mixed.size());
  double largest = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    CHECK(std::abs(exact[i] - mixed[i]) < 0.005);
    largest = std::max(largest, std::abs(double{exact[i]}));
  }
  CHECK(largest > 0.03);
  CHECK(exact != mixed);
}

}  // namespace mixed_precision_test
