#pragma once
/// Models and training steps for the tests of meshes.

#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/mesh.hpp>
#include <string>
#include <unit/parallel/ranks.hpp>
#include <utility>
#include <vector>

namespace test {

/// Two layers that ranks may divide, residual, with dropout in and after them.
template <int Width>
struct SharedBlock : ch::nn::Module {
  ch::nn::LayerNorm<ch::Cpu, double> norm{6};
  ch::nn::ColumnParallelLinear<ch::Cpu, double> up{6, Width};
  ch::nn::RowParallelLinear<ch::Cpu, double> down{Width, 6};
  ch::nn::Dropout inner{0.3}, outer{0.2};
  CHORUS_MODULE(SharedBlock, norm, up, down, inner, outer)
  auto forward(const auto& x) const { return x + outer(down(inner(ch::gelu(up(norm(x)))))); }
};
/// For x alone returns the logits, with targets the loss.
struct MeshHead : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{6, 3};
  CHORUS_MODULE(MeshHead, fc)
  auto forward(const auto& x) const { return fc(x); }
  auto forward(const auto& x, const auto& y) const { return ch::cross_entropy(fc(x), y); }
};
template <int Width>
struct MeshModel : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> embed{5, 6};
  ch::nn::ModuleList<SharedBlock<Width>> blocks{std::vector<SharedBlock<Width>>(3)};
  MeshHead head;
  MeshModel() {
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = SharedBlock<Width>{};
  }
  CHORUS_MODULE(MeshModel, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};

/// A rank's net with its communicator.
template <class Model, class... Axes>
struct InMesh {
  ch::comm::AnyCommunicator communicator;
  ch::Mesh<Model, Axes...> net;

  explicit InMesh(const ch::comm::World& world, const ch::MeshOptions& options = {.micro_batches = 3, .check_every = 1},
                  Model model = make<Model>())
      : communicator(ch::comm::connect(world)), net(std::move(model), communicator, world, options, 3) {}
};

/// This rank's rows of a batch.
template <class Net>
ch::comm::World place_on_batch(const Net& net) {
  ch::comm::World place;
  if constexpr (requires { net.place(); }) {
    place.size = net.sizes()[1] * net.sizes()[2];
    place.rank = net.place()[1] * net.sizes()[2] + net.place()[2];
  }
  return place;
}

struct MeshRun {
  int steps = 10;
  bool model_gives_loss = true, clips = false, adds_up = false;
  std::uint32_t from = 0;
};

/// The losses of a run; each of the whole batch.
template <class Net, class Optimizer>
std::vector<double> mesh_losses(Net& net, Optimizer& optimizer, const MeshRun& run) {
  const auto place = place_on_batch(net);
  std::vector<double> losses;
  const auto backward = [&](std::uint32_t number) {
    const Index size = sizes[number % sizes.size()];
    const auto x = share(numbers(size, 5, number), place);
    const auto y = share(labels(size, 3, number), place);
    const auto loss = run.model_gives_loss ? net(x, y) : ch::cross_entropy(net(x), y);
    loss.backward();
    losses.push_back(net.mean(loss.item(), y.numel()));
  };
  for (auto i = run.from; i < run.from + static_cast<std::uint32_t>(run.steps); ++i) {
    optimizer.zero_grad();
    if (run.adds_up) {
      if constexpr (requires { net.no_sync(); }) {
        [[maybe_unused]] const auto quiet = net.no_sync();
        backward(i + 100);
      } else {
        backward(i + 100);
      }
    }
    backward(i);
    if (run.clips) losses.push_back(net.clip_grad_norm(0.5));
    optimizer.step();
  }
  return losses;
}
inline const ch::optim::AdamOptions mesh_adam{.lr = 0.02, .weight_decay = 0.01};

/// One device's losses and final parameters.
template <class Model>
std::vector<double> mesh_alone(const MeshRun& run) {
  ch::SingleDevice<Model> net{make<Model>(), 3};
  ch::optim::AdamW<ch::Cpu> optimizer{net.parameters(), mesh_adam};
  auto all = mesh_losses(net, optimizer, run);
  const auto last = values(net.module());
  all.insert(all.end(), last.begin(), last.end());
  return all;
}
/// The same for a mesh; its parameters go through a file.
template <class Model, class... Axes>
std::vector<double> in_mesh(int ranks, const MeshRun& run) {
  const auto path = ch::cat("mesh_", getpid(), ".safetensors");
  const auto text = common_text(
      ranks,
      [=](const ch::comm::World& world) {
        InMesh<Model, Axes...> rank(world);
        ch::optim::AdamW<ch::Cpu> optimizer{rank.net.parameters(), mesh_adam};
        const auto losses = mesh_losses(rank.net, optimizer, run);
        ch::io::save(rank.net, path);
        return text_of(losses) + "|" + ch::io::parameters_sha256(rank.net);
      },
      std::chrono::seconds(30));
  INFO(text);
  REQUIRE(std::count(text.begin(), text.end(), '|') == 1);
  auto all = numbers_in(text.substr(0, text.find('|')));
  Model whole;
  ch::io::load(whole, path);
  CHECK(ch::io::parameters_sha256(whole) == text.substr(text.find('|') + 1));
  std::remove(path.c_str());
  const auto last = values(whole);
  all.insert(all.end(), last.begin(), last.end());
  return all;
}

}  // namespace test
