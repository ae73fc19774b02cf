#pragma once
/// Training steps of TensorParallel for the tests, and one device's.

#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../parallel/ranks.hpp"

namespace test {

/// A rank's net with its communicator.
template <class Model, class Sequence = ch::NoSequenceSplit>
struct Shared {
  ch::comm::AnyCommunicator communicator;
  ch::TensorParallel<Model, Sequence> net;

  explicit Shared(const ch::comm::World& world, const ch::TensorParallelOptions& options = {.check_every = 1},
                  Model model = make<Model>())
      : communicator(ch::comm::connect(world)), net(std::move(model), communicator, options, 3) {}
};

/// The number of collective calls that a rank has made.
inline int calls(const ch::comm::AnyCommunicator& communicator) {
  const auto record = communicator.flight_record();
  return record.empty() ? 0 : std::stoi(record.substr(record.rfind("call ") + 5)) + 1;
}

/// Two layers with a number of columns that few numbers of ranks divide, with dropout inside and after them.
template <class D>
struct Pair : ch::nn::Module {
  ch::nn::Linear<D, double> first{5, 6};
  ch::nn::ColumnParallelLinear<D, double> up{6, 13};
  ch::nn::RowParallelLinear<D, double> down{13, 6};
  ch::nn::Linear<D, double> last{6, 3};
  ch::nn::Dropout inner{0.4}, outer{0.2};
  CHORUS_MODULE(Pair, first, up, down, last, inner, outer)
  auto forward(const auto& x) const {
    const auto h = ch::tanh(first(x));
    return last(h + outer(down(inner(ch::gelu(up(h))))));
  }
};

/// 20 steps of Adam on whole batches of 12: the losses, then the parameters of one device's model.
template <class Net>
std::vector<double> losses_of(Net& net, const auto& each_step) {
  ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
  std::vector<double> losses;
  for (std::uint32_t i = 0; i < 20; ++i) {
    losses.push_back(step(net, optimizer, i, 12));
    each_step();
  }
  return losses;
}
template <class Model>
std::vector<double> one_device() {
  ch::SingleDevice<Model> net{make<Model>(), 3};
  auto all = losses_of(net, [] {});
  const auto last = values(net.module());
  all.insert(all.end(), last.begin(), last.end());
  return all;
}
template <class Model, class Sequence>
std::string shared_out(const ch::comm::World& world) {
  Shared<Model, Sequence> rank(world);
  auto all = losses_of(rank.net, [] {});
  rank.net.gathered([&](Model& whole) {
    const auto last = values(whole);
    all.insert(all.end(), last.begin(), last.end());
  });
  return text_of(all);
}

/// Checks that all ranks end with one device's result.
template <class Model, class Sequence = ch::NoSequenceSplit>
void check_same_as_one_device(int ranks, double allowed = 1e-9,
                              ch::comm::Backend backend = ch::comm::Backend::automatic) {
  const auto expected = one_device<Model>();
  const auto texts = Ranks(ranks, [backend](ch::comm::World world) {
                       world.backend = backend;
                       return shared_out<Model, Sequence>(world);
                     }).texts();
  INFO(ranks << " ranks over " << ch::comm::name(backend) << ": " << texts[0].substr(0, 300));
  for (const auto& text : texts) CHECK(text == texts[0]);
  CHECK(distance(numbers_in(texts[0]), expected) < allowed);
}

}  // namespace test
