// The warning about parameters that a model uses but CHORUS_MODULE does not list.
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace unlisted_test {

using namespace test::names;

struct Forgetful : nn::Module {
  nn::Linear<Cpu, double> fc1{5, 4}, fc2{4, 3, {.bias = false}}, fc3{3, 2, {.bias = false}}, frozen{2, 3};
  CHORUS_MODULE(Forgetful, fc1)
  auto forward(const auto& x) const { return frozen(fc3(fc2(fc1(x)))); }
};
Forgetful forgetful() {
  Forgetful model;
  model.frozen.weight.set_requires_grad(false);
  model.frozen.bias.set_requires_grad(false);
  return model;
}

template <class Net>
std::string warnings_of(Net& net) {
  return test::with_stderr([&] {
    {
      const NoGrad no_grad;
      net(numbers(4, 5, 1));
    }
    for (int pass = 0; pass < 2; ++pass) mean(net(numbers(4, 5, 1))).backward();
    return "";
  });
}

const std::string warning =
    "chorus: warning: the model's forward pass uses parameters that CHORUS_MODULE does not list, of shape [3, 4], [2, "
    "3]: the policy does not train, average or save them, and all copies of the model share them\n";

TEST_CASE("a parameter that the model does not list is named, once, by every policy") {
  SingleDevice<Forgetful> single{forgetful()};
  CHECK(warnings_of(single) == warning);
  DataParallel<Forgetful> dp{forgetful(), {.device_ids = {0, 1}}};
  CHECK(warnings_of(dp) == warning);
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Forgetful> rank(world, {}, forgetful());
                       return warnings_of(rank.net);
                     }).texts();
  CHECK(texts == std::vector<std::string>{warning, ""});
}

struct Tied : nn::Module {
  nn::Linear<Cpu, double> fc1{5, 5}, fc2{5, 5};
  Tied() { fc2.weight = fc1.weight; }
  CHORUS_MODULE(Tied, fc1, fc2)
  auto forward(const auto& x) const { return fc2(fc1(x)); }
};

TEST_CASE("parameters that are frozen, shared by layers, or another model's input's are none of these") {
  SingleDevice<Tied> tied{Tied{}};
  CHECK(warnings_of(tied).empty());
  SingleDevice<test::Smooth<Cpu>> behind{make<test::Smooth<Cpu>>()};
  CHECK(test::with_stderr([&] {
          mean(behind(tied(numbers(4, 5, 1)))).backward();
          return "";
        }).empty());
}

}  // namespace unlisted_test
