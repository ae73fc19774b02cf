// Layers whose backward function runs another backward pass, which reaches some parameters first: policies treat both
// as one pass.
#include <catch.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>

#include "ranks.hpp"

namespace nested_backward_test {

using namespace test::names;

/// Saves no activations of its last layer, and recomputes them in backward; that layer's gradients come from a nested
/// backward pass.
template <class D>
struct Reentrant : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  bool nested = true;
  CHORUS_MODULE(Reentrant, fc1, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    if (!nested) return fc2(h);
    const auto value = [&] {
      const NoGrad none;
      return fc2(h.detach()).value();
    }();
    const auto backward = [this, kept = h.value()](const auto& dy, auto dx) {
      const GradMode on(true);
      const Variable<double, 2> leaf(kept, true);
      fc2(leaf).backward(contiguous(dy));
      dx->add(leaf.grad());
    };
    return record("reentrant", value, backward, h);
  }
};
using Model = Reentrant<Cpu>;

TEST_CASE("nested backward: what is to be done at the end waits for the outermost pass") {
  std::vector<std::string> seen;
  const Variable<double, 1> x(Tensor<double, 1>::ones({2}), true);
  const auto y = record(
      "nested", x.value(),
      [&](const auto& dy, auto dx) {
        const GradMode on(true);
        const Variable<double, 1> leaf(dy, true);
        leaf.register_hook([&] {
          seen.push_back("inner gradient");
          at_backward_end([&] { seen.push_back("end"); });
        });
        sum(leaf * 2.0).backward();
        seen.push_back("inner pass");
        dx->add(dy);
      },
      x);
  x.register_hook([&] { seen.push_back("outer gradient"); });
  sum(y).backward();
  CHECK(seen == std::vector<std::string>{"inner gradient", "inner pass", "outer gradient", "end"});
}

TEST_CASE("nested backward: under DistributedDataParallel, also where its layer is the last") {
  SingleDevice<Model> single{make<Model>(), 3};
  single.module().nested = false;
  cross_entropy(single(numbers(6, 5, 1)), labels(6, 3, 1)).backward();
  const auto expected = test::gradients(single.module());
  for (const auto& options :
       {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0},
        DistributedDataParallelOptions{.static_graph = true},
        DistributedDataParallelOptions{.find_unused_parameters = true}}) {
    INFO(options.describe<Cpu>());
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Model> rank(world, options);
      for (int pass = 0; pass < 3; ++pass) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        cross_entropy(rank.net(test::share(numbers(6, 5, 1), world)), test::share(labels(6, 3, 1), world)).backward();
      }
      return test::text_of(test::gradients(rank.net.module()));
    });
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("nested backward: under ParameterServer and LocalSgd it is one step") {
  SingleDevice<Model> single{make<Model>(), 3};
  cross_entropy(single(numbers(6, 5, 1)), labels(6, 3, 1)).backward();
  const auto texts =
      Ranks(2, [&](const World& world) {
        auto communicator = comm::connect(world);
        ParameterServer<Model> net{make<Model>(), communicator, 3};
        cross_entropy(net(test::share(numbers(6, 5, 1), world)), test::share(labels(6, 3, 1), world)).backward();
        return world.rank == 0 ? test::text_of(test::gradients(net.module())) : "";
      }).texts();
  CHECK(distance(test::numbers_in(texts[0]), test::gradients(single.module())) < rounding);
  const auto kept = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    LocalSgd<Model> net{make<Model>(), communicator, {.period = 8}, 3};
    cross_entropy(net(test::share(numbers(6, 5, 1), world)), test::share(labels(6, 3, 1), world)).backward();
    return cat(net.kept()[0], " ", net.kept()[1]);
  });
  CHECK(kept == "1 3");
}

}  // namespace nested_backward_test
