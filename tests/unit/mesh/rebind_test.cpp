// Two nets of one program under one policy: `Rebind<Net, Other>`.
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/tensor_parallel.hpp>

#include "mesh.hpp"

namespace rebind_test {

using namespace test::names;
using mesh::Pipe, mesh::Tensor;

template <int In>
struct Pair : nn::Module {
  nn::ColumnParallelLinear<Cpu, double> up{In, 6};
  nn::RowParallelLinear<Cpu, double> down{6, 4};
  CHORUS_MODULE(Pair, up, down)
  auto forward(const auto& x) const { return down(up(x)); }
};
struct First : nn::Module {
  Pair<5> pair;
  nn::Linear<Cpu, double> last{4, 4};
  CHORUS_MODULE(First, pair, last)
  CHORUS_PIPELINE(pair, last)
};
struct Second : nn::Module {
  Pair<4> pair;
  nn::Linear<Cpu, double> last{4, 3};
  CHORUS_MODULE(Second, pair, last)
  CHORUS_PIPELINE(pair, last)
};

/// Losses of two nets that train alternately: the first by the second's output for its numbers, the second by labels.
std::vector<double> losses(auto& first, auto& second) {
  optim::Sgd<Cpu> steps_first{first.parameters(), {.lr = 0.1}}, steps_second{second.parameters(), {.lr = 0.1}};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const auto x = test::numbers(6, 5, i);
    const auto y = test::labels(6, 3, i);
    steps_first.zero_grad();
    steps_second.zero_grad();
    const auto middle = first(x).value();
    const auto loss = cross_entropy(second(middle), y);
    loss.backward();
    steps_second.step();
    const auto own = mean(square(first(x)));
    own.backward();
    steps_first.step();
    out.push_back(loss.item());
    out.push_back(own.item());
  }
  return out;
}

template <class Net>
void check(const std::vector<double>& expected) {
  const auto text = common_text(2, [](const World& world) {
    auto communicator = comm::connect(world);
    const auto with = [&]<class N, class Model>(std::type_identity<N>, Model model) {
      if constexpr (std::is_constructible_v<N, Model, comm::AnyCommunicator&, const World&>)
        return N(std::move(model), communicator, world);
      else
        return N(std::move(model), communicator);
    };
    auto first = with(std::type_identity<Net>(), test::make<First>());
    auto second = with(std::type_identity<Rebind<Net, Second>>(), test::make<Second>());
    return test::text_of(losses(first, second));
  });
  INFO(text);
  CHECK(distance(test::numbers_in(text), expected) < 1e-9);
}

TEST_CASE("Rebind: two nets side by side under tensor parallelism, in a pipeline and on a mesh learn as on one device") {
  SingleDevice<First> first{test::make<First>()};
  Rebind<SingleDevice<First>, Second> second{test::make<Second>()};
  const auto expected = losses(first, second);
  check<TensorParallel<First>>(expected);
  check<Pipeline<First>>(expected);
  check<Mesh<First, Tensor<2>>>(expected);
}

}  // namespace rebind_test
