/// A graph network (Kipf, Welling 2017; means as in GraphSAGE) that learns the groups of a graph's nodes from a half of
/// them. The samples are nodes; each device has the whole graph.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <chorus/parallel/scores.hpp>
#include <cstdio>
#include <random>

namespace ch = chorus;

namespace {

/// nodes: [samples]; from, to: [edges] of the whole graph -> logits of the groups: [samples, 3]
template <class Device>
struct GraphNetwork : ch::nn::Module {
  ch::Parameter<float, 2, Device> features{ch::nn::init::normal<float, Device, 2>({60, 8}, 0, 1)};
  ch::nn::Linear<Device> first{8, 16}, second{16, 3};
  CHORUS_MODULE(GraphNetwork, features, first, second)

  auto forward(const auto& nodes, const auto& from, const auto& to) const {
    const auto neighbours = [&](const auto& h) {  // the mean of a node and those that point to it
      const auto ones = ch::Tensor<float, 2, Device>::ones({from.size(0), 1});
      const auto degree = ch::index_add(ch::Tensor<float, 2, Device>::ones({60, 1}), 0, to, ones);
      return ch::index_add(h, 0, to, ch::index_select(h, 0, from)) / degree;
    };
    const auto h = ch::relu(first(neighbours(ch::index_select(features, 0, ch::arange(60)))));
    return ch::index_select(second(neighbours(h)), 0, nodes);
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = GraphNetwork<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    std::mt19937 random{3};
    auto from = ch::Tensor<std::int64_t, 1>::empty({360}), to = ch::Tensor<std::int64_t, 1>::empty({360});
    for (ch::Index i = 0; i < 360;) {  // node k is of group k % 3, where most of its edges stay
      from(i) = static_cast<std::int64_t>(random() % 60);
      to(i) = static_cast<std::int64_t>(random() % 60);
      if (from(i) % 3 == to(i) % 3 || random() % 8 == 0) ++i;
    }
    const auto groups = ch::flatten<0>(ch::expand(ch::arange(3), ch::Shape<2>{10, 3}));
    const ch::data::TensorDataset data{ch::arange(30), groups}, test{ch::arange(30, 60), groups};
    Net net{Model{}, run};
    ch::data::DataLoader loader{data, net.sampler(data), {.batch = 30}};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.03}};
    for (int epoch = 0; epoch < 30; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [nodes, group] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(nodes, ch::whole(from), ch::whole(to)), group);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), nodes.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    net.eval();
    const ch::NoGrad none;
    ch::scores::ConfusionMatrix matrix{3};
    ch::data::DataLoader of_test{test, net.sampler(test, {.shuffle = false}), {.batch = 30}};
    for (auto& [nodes, group] : of_test) matrix.add(net(nodes, ch::whole(from), ch::whole(to)).value(), group);
    matrix.sum(net);
    if (run.is_main()) std::printf("accuracy %.7f\n", matrix.accuracy());
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
