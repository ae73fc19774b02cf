/// Proximal policy optimisation (Schulman et al. 2017) in a corridor: each step costs 0.1, one to the right of cell 4
/// gives 1 and ends an episode. All ranks play the same moves, and each learns from its share of them.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/distributions.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cmath>
#include <cstdio>
#include <random>
#include <tuple>
#include <vector>

namespace ch = chorus;

namespace {

struct Played {
  std::int64_t cell, action;
  float log_prob, advantage, target;
};

/// cells: [samples] -> logits of left and right: [samples, 2], and what the cell is worth: [samples]
template <class Device>
struct ActorCritic : ch::nn::Module {
  ch::nn::Embedding<Device> embedding{5, 16};
  ch::nn::Linear<Device> actor{16, 2}, critic{16, 1};
  CHORUS_MODULE(ActorCritic, embedding, actor, critic)
  auto forward(const auto& at) const {
    const auto h = ch::tanh(embedding(at));
    return std::tuple{actor(h), ch::flatten<0>(critic(h))};
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = ActorCritic<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    Net net{Model{}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    std::mt19937 random{5};
    for (int round = 0; round < 15; ++round) {
      const auto [log_probs, worth] = [&] {
        const ch::NoGrad none;
        const auto [logits, now] = net(ch::arange(5));
        return std::pair{ch::log_softmax(logits, 1).value(), now.value()};
      }();
      std::vector<Played> played;
      for (std::int64_t cell = 0, to = 0; played.size() < 48; cell = to % 5) {
        const double left = std::exp(static_cast<double>(log_probs(cell, 0)));
        const std::int64_t action = static_cast<double>(random()) / 0x1p32 < left ? 0 : 1;
        to = action == 1 ? cell + 1 : std::max<std::int64_t>(cell - 1, 0);
        const float target = to == 5 ? 1.0F : 0.9F * worth(to) - 0.1F;
        played.push_back({cell, action, log_probs(cell, action), target - worth(cell), target});
      }
      if (run.is_main()) std::printf("turns_back %.7f\n", std::exp(static_cast<double>(log_probs(0, 0))));
      const ch::data::VectorDataset moves{played};
      ch::data::DataLoader loader{moves, net.sampler(moves), {.batch = 16}};
      for (int epoch = 0; epoch < 3; ++epoch) {
        loader.set_epoch(3 * round + epoch);
        for (auto& [cell, action, log_prob, advantage, target] : loader) {
          optimizer.zero_grad();
          const auto [logits, value] = net(cell);
          const ch::distributions::Categorical policy{ch::distributions::Logits{logits}};
          const auto ratio = ch::exp(policy.log_prob(action) - log_prob);
          const auto gain = ch::minimum(ratio * advantage, ch::clamp(ratio, 0.8, 1.2) * advantage);
          const auto cost = ch::mse_loss(value, target) - ch::mean(gain) - 0.01 * ch::mean(policy.entropy());
          cost.backward();
          optimizer.step();
          const double loss = net.mean(static_cast<double>(cost.item()), cell.size(0));
          if (run.is_main()) std::printf("loss %.7f\n", loss);
        }
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
