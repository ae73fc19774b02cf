#include <chorus/nn/flat_parameters.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/reduction.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace flat_parameters_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;

struct Mixed : nn::Module {
  nn::Linear<Cpu> first{2, 3}, last{3, 1};
  nn::Linear<Cpu, double> precise{2, 1};
  CHORUS_MODULE(Mixed, first, last, precise)

  auto forward(const auto& x) const { return last(first(x)); }
};
std::vector<std::string> names(const nn::FlatParameters<Cpu>& flat) {
  std::vector<std::string> out;
  for (const auto& entry : flat.entries()) out.push_back(entry.named.name);
  return out;
}

TEST_CASE("parameters lie in one buffer per dtype, the last layer first, frozen ones behind") {
  Mixed model;
  model.last.bias.set_requires_grad(false);
  const auto before = model.first.weight.value().to_vector();
  const nn::FlatParameters<Cpu> flat(model);
  CHECK(names(flat) == std::vector<std::string>{"precise.bias", "precise.weight", "last.weight", "first.bias",
                                                "first.weight", "last.bias"});
  REQUIRE(flat.groups().size() == 2);
  CHECK(flat.groups()[0].dtype == ch::DType::f64);
  CHECK(flat.groups()[1].count == 3 + 3 + 6 + 1);
  CHECK(flat.groups()[1].trainable == 3 + 3 + 6);
  CHECK(flat.bytes() == 13 * 4 + 3 * 8);
  CHECK(model.first.weight.value().to_vector() == before);
  CHECK(model.first.bias.value().data() == model.last.weight.value().data() + 3);
}

struct Wide : nn::Module {
  nn::Linear<Cpu> first{32, 33}, last{33, 1};  // a weight of more than a page after three small ones
  CHORUS_MODULE(Wide, first, last)

  auto forward(const auto& x) const { return last(first(x)); }
};

TEST_CASE("large parameters begin with a cache line, behind zeros that count as the one's before") {
  Wide model;
  const auto before = model.first.weight.value().to_vector();
  {  // the memory that it will get is not zeroed
    const ch::Storage<Cpu> values(Cpu{}, (80 + 32 * 33) * 4), grads(Cpu{}, (80 + 32 * 33) * 4);
    for (const auto& memory : {values, grads}) std::fill_n(static_cast<float*>(memory.data()), 80 + 32 * 33, 7.0f);
  }
  const nn::FlatParameters<Cpu> flat(model);
  CHECK(names(flat) == std::vector<std::string>{"last.bias", "last.weight", "first.bias", "first.weight"});
  std::vector<std::size_t> begins, counts;
  for (const auto& entry : flat.entries()) {
    begins.push_back(entry.begin);
    counts.push_back(entry.count);
  }
  CHECK(begins == std::vector<std::size_t>{0, 1, 34, 80});
  CHECK(counts == std::vector<std::size_t>{1, 33, 46, 32 * 33});
  CHECK(flat.bytes() == (80 + 32 * 33) * 4);
  CHECK(reinterpret_cast<std::uintptr_t>(model.first.weight.value().data()) % 64 == 0);
  CHECK(model.first.weight.value().to_vector() == before);
  for (std::size_t i = 34 + 33; i < 80; ++i) {
    CHECK(*reinterpret_cast<const float*>(flat.groups()[0].value(i)) == 0);
    CHECK(*reinterpret_cast<const float*>(flat.groups()[0].grad(i)) == 0);
  }
}

TEST_CASE("gradients arrive in the flat buffer, and what was there stays") {
  Mixed model;
  const auto x = ch::Tensor<float, 2>::ones({1, 2});
  ch::sum(model.first(x)).backward();
  const nn::FlatParameters<Cpu> flat(model);
  CHECK(model.first.bias.grad().to_vector() == std::vector<float>{1, 1, 1});
  ch::sum(model.first(x)).backward();
  const auto& entry = flat.entries()[4];
  REQUIRE(entry.named.name == "first.bias");
  CHECK(reinterpret_cast<const float*>(flat.groups()[entry.group].grad(entry.begin))[2] == 2);
}

TEST_CASE("the order can be changed, and the numbers stay") {
  Mixed model;
  nn::FlatParameters<Cpu> flat(model);
  const auto weight = model.last.weight.value().to_vector();
  const std::vector<std::size_t> order{5, 4, 3, 2, 1, 0};
  flat.reorder(order);
  CHECK(names(flat).front() == "first.weight");
  CHECK(model.last.weight.value().to_vector() == weight);
  CHECK(message_of<ch::UsageError>([&] { flat.reorder(std::vector<std::size_t>{0}); }) ==
        "FlatParameters::reorder: 1 indices for 6 parameters");
}

TEST_CASE("flat buffers are accounted as parameters and gradients") {
  const auto held = [](ch::trace::Memory kind) { return ch::trace::memory(0, kind); };
  Mixed model;
  const auto parameters = held(ch::trace::Memory::parameters), gradients = held(ch::trace::Memory::gradients);
  const nn::FlatParameters<Cpu> flat(model);
  CHECK(held(ch::trace::Memory::gradients) > gradients);
  CHECK(held(ch::trace::Memory::parameters) <= parameters);
}

}  // namespace flat_parameters_test
