/// A policy of one's own, gossip (Lian et al. 2017): no all-reduce; after each step two ranks average their parameters.

#include <chorus/chorus.hpp>
#include <chorus/parallel/own_policy.hpp>
#include <cstdio>
namespace ch = chorus;

template <class Model>
struct Gossip : ch::OwnPolicy<Model> {
  Gossip(Model model, ch::Run& run) : ch::OwnPolicy<Model>("Gossip", std::move(model), run.communicator(), run.seed()) {
    this->take_state(0);
    this->let_ranks_differ();  // between averages they have different parameters
  }

  void forward_begins() override {  // ranks 0 and 1, 2 and 3, ... meet after odd steps, 1 and 2, ... after even ones
    const int rank = this->communicator().rank(), peer = (rank + ++steps_) % 2 == 0 ? rank + 1 : rank - 1;
    if (peer < 0 || peer >= this->devices()) return;
    this->with_values(0, this->parameter_count(), [&]<class T>(std::span<T> mine) {  // all, of one dtype
      std::vector<T> theirs(mine.size());
      auto sent = this->communicator().send_async(mine, peer);
      this->communicator().recv(std::span(theirs), peer);
      sent.wait();
      for (std::size_t k = 0; k < mine.size(); ++k) mine[k] = (mine[k] + theirs[k]) / 2;
    });
  }
  void synchronize() override {  // in eval(): all ranks take the average of all
    this->with_values(0, this->parameter_count(), [&](auto mine) {
      this->communicator().all_reduce(mine, ch::comm::ReduceOp::sum, {.scale = 1.0 / this->devices()});
    });
    ch::OwnPolicy<Model>::synchronize();
  }
  int steps_ = 0;
};
template <class Device>
struct Line : ch::nn::Module {
  ch::nn::Linear<Device> fc{3, 1};
  CHORUS_MODULE(Line, fc)
  auto forward(const auto& x) const { return fc(x); }
};

int main(int argc, char** argv) {
  using Net = Gossip<Line<ch::Cpu>>;
  return ch::launch<Net>(argc, argv, [](ch::Run& run) {
    Net net{{}, run};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (int step = 0; step < 200; ++step) {  // y = x0 - 2 x1: each rank has samples of its own
      auto x = ch::Tensor<float, 2>::empty({4, 3}), y = ch::Tensor<float, 2>::empty({4, 1});
      for (int i = 0; i < 12; ++i) x(i / 3, i % 3) = std::sin(static_cast<float>(step * 31 + run.rank() * 17 + i * i));
      for (int i = 0; i < 4; ++i) y(i, 0) = x(i, 0) - 2 * x(i, 1);
      optimizer.zero_grad();
      ch::mse_loss(net(x), y).backward();
      optimizer.step();
    }
    net.eval();
    const auto w = ch::value_of(net.module().fc.weight).to_vector();
    const char* const models = net.same_on_all_ranks(ch::cat(w[0], w[1])) ? "one" : "several";
    if (run.is_main()) std::printf("%s %.4f %.4f %.4f\n", models, w[0], w[1], w[2]);
  });
}
