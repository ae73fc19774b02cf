// DataParallel: state that copies share with the model besides parameters, the model's own objects in outputs, and late
// copies.
#include <atomic>
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chrono>
#include <stdexcept>
#include <thread>

#include <unit/parallel/policies.hpp>

namespace dp_copies_test {

using namespace test::names;
using namespace std::chrono_literals;

template <class Model>
struct Parallel : DataParallel<Model> {
  explicit Parallel(std::vector<int> ids, Model model = make<Model>())
      : DataParallel<Model>(std::move(model), {.device_ids = std::move(ids)}, 3) {}
};

/// Has a member that is no parameter, deep inside, and may recompute its output in backward.
template <class D>
struct Rated : nn::Module {
  struct Inner : nn::Module {
    nn::Linear<D, double> fc{5, 3};
    double rate = 1;
    CHORUS_MODULE(Inner, fc)
    auto operator()(const auto& x) const { return fc(x) * rate; }
  };
  nn::ModuleList<Inner> layers = nn::ModuleList<Inner>(std::vector<Inner>(1));
  bool anew = false;
  CHORUS_MODULE(Rated, layers)
  auto forward(const auto& x) const {
    const auto& layer = layers[0];
    const auto run = [&layer](const auto& h) { return tanh(layer(h)); };
    return anew ? checkpoint(run, x) : run(x);
  }
};

TEST_CASE("dp: the copies follow what is changed in the model beside its parameters") {
  using Model = Rated<Cpu>;
  for (const bool anew : {false, true}) {
    Parallel<Model> net({0, 0, 0});
    SingleDevice<Model> single{make<Model>(), 3};
    const auto step = [&](double rate) {
      const auto run = [&](auto& policy) {
        policy.module().layers[0].rate = rate;
        policy.module().anew = anew;
        for (const auto& named : policy.parameters()) named.parameter->set_grad_arrived(false);
        const auto y = policy(numbers(7, 5, 1));
        // Between the two others, and without effect on them.
        const NoGrad none;
        policy(numbers(4, 5, 2));
        const GradMode on(true);
        sum(square(y)).backward();
        return y.value().to_vector();
      };
      CHECK(run(net) == run(single));
      CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
    };
    for (const double rate : {1.0, 0.0, 2.5}) step(rate);
  }
}

/// Returns a parameter, and an expression of it, besides its output.
template <class D>
struct Telling : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Telling, fc)
  auto forward(const auto& x) const { return std::tuple{fc(x), fc.weight.as_variable(), exp(fc.bias)}; }
};

TEST_CASE("dp: a parameter that the model returns has its gradient, by backward and by grad") {
  using Model = Telling<Cpu>;
  for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 0}, {0, 0, 0}}) {
    const auto copies = static_cast<double>(ids.size());
    const auto loss = [](const auto& outputs, double weight) {
      const auto& [y, w, e] = outputs;
      return sum(y) + (sum(square(w)) + sum(e)) * weight;
    };
    SingleDevice<Model> single{make<Model>(), 3};
    Parallel<Model> net(ids);
    loss(single(numbers(6, 5, 1)), copies).backward();
    loss(net(numbers(6, 5, 1)), 1).backward();
    CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);

    const Variable<double, 2> x(numbers(6, 5, 1), true), same(numbers(6, 5, 1), true);
    const auto by_input = grad(loss(net(x), 1), x), expected = grad(loss(single(same), 1), same);
    CHECK(distance(by_input.to_vector(), expected.to_vector()) < rounding);
    CHECK_FALSE(net.module().fc.weight.grad().defined());
    CHECK_FALSE(net.module().fc.bias.grad().defined());
    const auto by_weight = grad(loss(net(x), 1), net.module().fc.weight);
    CHECK(distance(by_weight.to_vector(), grad(loss(single(same), copies), single.module().fc.weight).to_vector()) <
          rounding);
    CHECK_FALSE(net.module().fc.weight.grad().defined());
  }
}

TEST_CASE("dp: hooks that were registered with the model's parameters before are those of the policy's") {
  using Model = Telling<Cpu>;
  auto model = make<Model>();
  int seen = 0;
  model.fc.weight.register_hook([&](const auto& gradient) {
    ++seen;
    return gradient * 2.0;
  });
  model.fc.weight.register_hook([&] { ++seen; });
  Parallel<Model> net({0, 0}, std::move(model));
  SingleDevice<Model> single{make<Model>(), 3};
  sum(std::get<0>(net(numbers(6, 5, 1)))).backward();
  sum(std::get<0>(single(numbers(6, 5, 1)))).backward();
  CHECK(seen == 2);
  auto doubled = single.module().fc.weight.grad().to_vector();
  for (double& x : doubled) x *= 2;
  CHECK(distance(net.module().fc.weight.grad().to_vector(), doubled) < rounding);
}

/// The second device throws about when the first stops waiting for it.
template <class D>
struct Dawdling : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Dawdling, fc)
  auto forward(const auto& x, std::chrono::microseconds time) const {
    if (value_of(x).size(0) == 1) {
      const auto end = std::chrono::steady_clock::now() + time;
      while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
      throw std::runtime_error("dawdled");
    }
    return fc(x);
  }
};

TEST_CASE("dp: a copy that throws just as its time is up is late, or has thrown") {
  std::vector<std::chrono::microseconds> times;  // a late copy may still read it
  for (int i = 0; i < 200; ++i) times.push_back(900us + std::chrono::microseconds(i));
  DataParallel<Dawdling<Cpu>> net(make<Dawdling<Cpu>>(), {.device_ids = {0, 0}, .timeout = 1ms}, 3);
  for (std::size_t i = 0; i < 1500; ++i) {
    std::string error;
    try {
      net(numbers(3, 5, 1), times[i % times.size()]);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    REQUIRE_THAT(error, Contains("dawdled") || Contains("did not return within 1 ms") ||
                            Contains("has not returned from an earlier pass"));
  }
}

}  // namespace dp_copies_test
