// Experts on several ranks, compared with one device: losses, drops, norms, parameters and files.
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/mixture_of_experts.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/expert.hpp>
#include <filesystem>

#include "mesh.hpp"

namespace expert_test {

using namespace test::names;
using mesh::Data, mesh::Expert;
using test::common_text, test::numbers_in, test::text_of;

/// Two layers of experts, the second without a limit and with one choice.
template <int experts, int top_k, int percent>
struct Model : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::MixtureOfExperts<Cpu, double> first{
      6, {.experts = experts, .top_k = top_k, .hidden = 7, .capacity = percent / 100.0, .balance_loss = 0.5, .z_loss = 0.1}},
      second{6, {.experts = experts, .top_k = 1, .hidden = 4, .renormalize = false}};
  nn::Linear<Cpu, double> head{6, 3};
  mutable Index dropped = 0;  // over all passes
  CHORUS_MODULE(Model, embed, first, second, head)
  auto forward(const auto& x) const {
    const auto h = embed(x);
    const auto a = first(h);
    const auto b = second(h + a.y);
    dropped += a.dropped;
    return std::tuple{head(h + b.y), a.loss + b.loss};
  }
};

struct Run {
  bool adds_up = false;
  double clip = 0.5;
  std::uint32_t from = 0, steps = 6;
};
/// Losses, norms and drops. `place`: this rank's share of a batch.
template <class Net>
std::vector<double> train(Net& net, optim::Optimizer<Cpu>& optimizer, const World& place, const Run& run) {
  std::vector<double> out;
  const auto backward = [&](std::uint32_t number) {
    const Index size = test::sizes[number % test::sizes.size()];
    const auto y = test::share(test::labels(size, 3, number), place);
    const auto [scores, own] = net(test::share(test::numbers(size, 5, number), place));
    const auto loss = cross_entropy(scores, y) + mean(own);
    loss.backward();
    out.push_back(net.mean(loss.item(), y.numel()));
  };
  for (auto i = run.from; i < run.from + run.steps; ++i) {
    optimizer.zero_grad();
    if (run.adds_up) {
      [[maybe_unused]] const auto quiet = net.no_sync();
      backward(i + 100);
    }
    backward(i);
    out.push_back(net.clip_grad_norm(run.clip));
    optimizer.step();
  }
  net.eval();
  const NoGrad none;
  const auto y = test::share(test::labels(7, 3, 1), place);
  const auto [scores, own] = net(test::share(test::numbers(7, 5, 1), place));
  out.push_back(net.mean(cross_entropy(scores, y).item(), y.numel()));
  net.train();
  return out;
}

template <class M>
std::vector<double> alone(const Run& run) {
  SingleDevice<M> net{test::make<M>(), 3};
  optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
  auto all = train(net, optimizer, {}, run);
  all.push_back(static_cast<double>(net.module().dropped));
  const auto last = test::values(net.module());
  all.insert(all.end(), last.begin(), last.end());
  return all;
}
/// The same on ranks; parameters go through a file.
template <class M, class Make>
std::vector<double> on_ranks(int ranks, const Run& run, const Make& with_net) {
  const auto path = (std::filesystem::temp_directory_path() / cat("expert_", getpid(), ".safetensors")).string();
  const auto text = common_text(
      ranks,
      [&](const World& world) {
        auto all = comm::connect(world);
        return with_net(all, world, [&](auto& net) {
          optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
          auto out = train(net, optimizer, world, run);
          out.push_back(static_cast<double>(net.module().dropped));
          io::save(net, path);
          return text_of(out);
        });
      },
      std::chrono::seconds(60));
  auto all = numbers_in(text);
  REQUIRE(all.size() > 3);
  M whole;
  io::load(whole, path);
  std::remove(path.c_str());
  const auto last = test::values(whole);
  all.insert(all.end(), last.begin(), last.end());
  return all;
}
template <class M, class... Axes>
std::vector<double> in_mesh(int ranks, const Run& run = {}) {
  return on_ranks<M>(ranks, run, [](auto& all, const World& world, const auto& use) {
    Mesh<M, Axes...> net{test::make<M>(), all, world, {}, 3};
    return use(net);
  });
}

constexpr double near = 1e-9;

TEST_CASE("expert: ranks with other experts give one device's numbers") {
  using Limited = Model<4, 2, 70>;
  const auto expected = alone<Limited>({});
  CHECK(expected[13] > 10);  // drops
  CHECK(distance(in_mesh<Limited, Expert<2>>(2), expected) < near);
  CHECK(distance(in_mesh<Limited, Expert<mesh::rest>>(3), expected) < near);  // 4 experts on 3 ranks
  CHECK(distance(in_mesh<Limited, Data<2>, Expert<2>>(4), expected) < near);
  CHECK(distance(in_mesh<Limited, Data<2>, Expert<1>>(2), expected) < near);
}
TEST_CASE("expert: eight ranks, most of them with one expert, some batches smaller") {
  using Free = Model<9, 3, 0>;
  const auto expected = alone<Free>({.steps = 4});
  CHECK(distance(in_mesh<Free, Expert<8>>(8, {.steps = 4}), expected) < near);
  CHECK(distance(in_mesh<Free, Data<mesh::rest>, Expert<4>>(8, {.steps = 4}), expected) < near);
}
TEST_CASE("expert: gradients of several batches add up") {
  using Limited = Model<4, 1, 100>;
  const Run run{.adds_up = true};
  CHECK(distance(in_mesh<Limited, Data<2>, Expert<2>>(4, run), alone<Limited>(run)) < near);
}
TEST_CASE("expert: a layer of experts without the axis, under DDP, FSDP and DataParallel") {
  using Limited = Model<4, 2, 70>;
  const auto expected = alone<Limited>({});
  CHECK(distance(on_ranks<Limited>(3, {},
                                   [](auto& all, const World&, const auto& use) {
                                     DistributedDataParallel<Limited> net{test::make<Limited>(), all, {}, 3};
                                     return use(net);
                                   }),
                 expected) < near);
  CHECK(distance(on_ranks<Limited>(2, {},
                                   [](auto& all, const World&, const auto& use) {
                                     FullyShardedDataParallel<Limited> net{test::make<Limited>(), all, all, {}, 3};
                                     return use(net);
                                   }),
                 expected) < near);
  DataParallel<Limited> net{test::make<Limited>(), {.device_ids = {0, 1}}, 3};
  optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
  auto got = train(net, optimizer, {}, {});
  const auto last = test::values(net.module());
  auto wanted = expected;
  wanted.erase(wanted.begin() + 13);  // replicas count drops
  got.insert(got.end(), last.begin(), last.end());
  CHECK(distance(got, wanted) < near);
}
/// Backward computes the experts' activations again, and sends tokens again.
struct Recomputed : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6}, head{6, 3};
  nn::MixtureOfExperts<Cpu, double> mixture{6, {.experts = 4, .capacity = 0.7}};
  mutable Index dropped = 0;
  CHORUS_MODULE(Recomputed, embed, mixture, head)
  auto forward(const auto& x) const {
    const auto h = embed(x);
    const auto out = checkpoint([this](const auto& tokens) { return concat(1, mixture(tokens).y, tokens); }, h);
    return std::tuple{head(slice(out, 1, 0, 6)), 0.0 * sum(out, 1)};
  }
};
TEST_CASE("expert: activation checkpoints") {
  const auto expected = alone<Recomputed>({});
  CHECK(distance(in_mesh<Recomputed, Data<2>, Expert<2>>(4), expected) < near);
  DataParallel<Recomputed> net{test::make<Recomputed>(), {.device_ids = {0, 1}}, 3};
  optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
  const auto got = train(net, optimizer, {}, {});
  CHECK(distance(got, {expected.begin(), expected.begin() + 13}) < near);
}
TEST_CASE("expert: a checkpoint goes to another number of ranks") {
  using Limited = Model<4, 2, 70>;
  const auto path = (std::filesystem::temp_directory_path() / cat("expert_checkpoint_", getpid())).string();
  const auto part = [&]<class Net>(Net& net, const World& place, std::uint32_t from, std::uint32_t to) {
    optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
    if (from > 0) io::load_checkpoint(net, optimizer, path);
    const auto out = train(net, optimizer, place, {.from = from, .steps = to - from});
    if (to < 6) io::save_checkpoint(net, optimizer, {}, path);
    return text_of(out);
  };
  const auto on = [&]<class Net>(int ranks, std::uint32_t from, std::uint32_t to) {
    return numbers_in(common_text(ranks, [&](const World& world) {
      auto all = comm::connect(world);
      Net net{test::make<Limited>(), all, world, {}, 3};
      return part(net, world, from, to);
    }));
  };
  auto got = on.operator()<Mesh<Limited, Expert<2>>>(2, 0, 2);
  for (const double each : on.operator()<Mesh<Limited, Data<2>, Expert<2>>>(4, 2, 4)) got.push_back(each);
  SingleDevice<Limited> net{test::make<Limited>(), 3};
  for (const double each : numbers_in(part(net, {}, 4, 6))) got.push_back(each);
  auto expected = alone<Limited>({});
  expected.resize(13);
  got.erase(got.begin() + 4), got.erase(got.begin() + 8);  // evaluations on the way
  CHECK(distance(got, expected) < near);
  std::remove(path.c_str());
}

/// The common error of all ranks.
template <class M>
std::string refusal(int ranks, const std::function<void(ExpertParallel<M>&)>& use = [](auto&) {}) {
  return common_text(ranks, [&](const World& world) {
    auto all = comm::connect(world);
    std::string used;
    const auto made = message_of<UsageError>([&] {
      ExpertParallel<M> net{test::make<M>(), all, world, {}, 3};
      used = message_of<UsageError>([&] { use(net); });
      all.barrier();
    });
    return used.empty() ? made : used;
  });
}
struct Dense : nn::Module {
  nn::Linear<Cpu, double> fc{5, 3};
  CHORUS_MODULE(Dense, fc)
  auto forward(const auto& x) const { return fc(x); }
};
struct Middle : nn::Module {
  nn::MixtureOfExperts<Cpu, double> mixture{5, {.experts = 2}};
  CHORUS_MODULE(Middle, mixture)
  auto forward(const auto& x) const { return mixture(x).y; }
};
struct Chain : nn::Module {
  nn::Linear<Cpu, double> first{5, 5};
  Middle middle;
  nn::Linear<Cpu, double> last{5, 3};
  CHORUS_MODULE(Chain, first, middle, last)
  CHORUS_PIPELINE(first, middle, last)
};
TEST_CASE("expert: what would not be one device's result is refused") {
  using Few = Model<2, 1, 0>;
  CHECK(refusal<Dense>(2) == "Expert: expected a model with experts, such as nn::MixtureOfExperts");
  CHECK(refusal<Few>(3) ==
        "Expert: expected at least one expert for each of 3 ranks, got 2 in 'first.up.weight'");
  CHECK_THAT((refusal<Few>(2, [](auto& net) { net.module()(test::numbers(4, 5, 1)); })),
             Contains("MixtureOfExperts: its experts are split over ranks: call the net, not its module()"));
  CHECK_THAT((refusal<Few>(2, [](auto& net) { net.join([&] { net(test::numbers(2, 5, 1)); }); })),
             Contains("join: a rank without batches calls no collectives of a model"));
  std::string both;  // the second stage tells the first one
  for (const auto& text : test::Ranks(2, [](const World& world) {
         auto all = comm::connect(world);
         Mesh<Chain, mesh::Pipe<2>> net(test::make<Chain>(), all, world, {}, 3);
         return message_of<Error>([&] { mean(net(test::numbers(8, 5, 1))).backward(); });
       }).texts())
    both += text;
  CHECK_THAT(both,
             Contains("MixtureOfExperts: expected the whole batch at once; Pipeline and SameBits compute parts"));
  using Limited = Model<2, 1, 100>;
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           auto all = comm::connect(world);
                           DistributedDataParallel<Limited> net(test::make<Limited>(), all, {.dim = 1}, 3);
                           return message_of<UsageError>(
                               [&] { net(reshape(test::numbers(6, 5, 1), Shape<3>{2, 3, 5})); });
                         }),
             Contains("MixtureOfExperts: expected samples along axis 0, which gives the order of tokens"));
  CHECK(message_of<ShapeError>([] { nn::MixtureOfExperts<Cpu>(4, {.experts = 2, .top_k = 3}); }) ==
        "MixtureOfExperts: expected positive sizes, and top_k of at most experts, got 4 features, hidden 0, top_k 3 and "
        "experts 2");
  CHECK_THAT(message_of<ShapeError>([] { nn::MixtureOfExperts<Cpu>(4)(Tensor<float, 2>::zeros({2, 3})); }),
             Contains("MixtureOfExperts: expected 4 features, got shape [2, 3]"));
}

}  // namespace expert_test
