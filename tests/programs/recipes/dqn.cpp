/// Deep Q-learning (Mnih et al. 2015) in a corridor of 6 cells, with a memory of moves and a target network. All ranks
/// play the same moves, and each learns from its share of a batch of them.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <random>
#include <vector>

namespace ch = chorus;

namespace {

constexpr std::int64_t cells = 6;

/// Action 1 is a step to the right, 0 to the left. The last cell ends an episode, with a reward of 1.
struct Move {
  std::int64_t from, action, to;
  float reward;
};
Move move_from(std::int64_t cell, std::int64_t action) {
  const std::int64_t to = action == 1 ? cell + 1 : std::max<std::int64_t>(cell - 1, 0);
  return {cell, action, to, to == cells - 1 ? 1.0F : 0.0F};
}

/// cells: [samples] -> what each of the two actions is worth there: [samples, 2]
template <class Device>
struct Worth : ch::nn::Module {
  ch::nn::Embedding<Device> embedding{cells, 16};
  ch::nn::Linear<Device> fc{16, 2};
  CHORUS_MODULE(Worth, embedding, fc)
  auto forward(const auto& at) const { return fc(ch::relu(embedding(at))); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Worth<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    Net net{Model{}, run}, target{Model{}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    std::mt19937 random{5};
    std::vector<Move> memory;
    const auto values = [](auto& of, const auto& at) {
      const ch::NoGrad no_grad;
      return of(at).value();
    };
    for (int episode = 0; episode < 12; ++episode) {
      ch::nn::copy_into(net, target);
      const auto best = ch::argmax(values(net, ch::arange(cells)), 1);
      for (std::int64_t cell = 0, i = 0; i < 30 && cell != cells - 1; ++i) {
        const bool explores = episode < 2 || random() % 4 == 0;
        memory.push_back(move_from(cell, explores ? static_cast<std::int64_t>(random() % 2) : best(cell)));
        cell = memory.back().to;
      }
      const ch::data::VectorDataset moves{memory};
      ch::data::DataLoader loader{moves, net.sampler(moves), {.batch = 10}};
      for (auto& [from, action, to, reward] : loader) {
        const auto later = ch::amax(values(target, to), 1);
        optimizer.zero_grad();
        const auto worth = ch::squeeze(ch::gather(net(from), 1, ch::unsqueeze(action, 1)), 1);
        const auto cost = ch::smooth_l1_loss(worth, reward + 0.8 * (1 - reward) * later);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), reward.numel());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    const auto best = ch::argmax(values(net, ch::arange(cells)), 1);
    if (run.is_main())
      for (std::int64_t cell = 0; cell < cells - 1; ++cell) std::printf("action %td\n", best(cell));
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
