// Programs for one device that walk a model's parameters, if each rank has a part of these: the same results, or a
// refusal that names the parameter.
#include <chorus/nn/summary.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

#include "mesh.hpp"

namespace parts_test {

using namespace test::names;
using namespace chorus;
using mesh::Data, mesh::Pipe, mesh::Shard;
using Catch::Matchers::Contains;
using test::distance, test::labels, test::make, test::numbers, test::text_of, test::values;

struct Block : nn::Module {
  nn::LayerNorm<Cpu, double> norm{6};
  nn::ColumnParallelLinear<Cpu, double> up{6, 9};
  nn::RowParallelLinear<Cpu, double> down{9, 6};
  Buffer<double, 1, Cpu> scale{Tensor<double, 1>::full({6}, 0.5)};
  CHORUS_MODULE(Block, norm, up, down, scale)
  auto forward(const auto& x) const { return x + down(tanh(up(norm(x)))) * scale.value(); }
};
struct Model : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::ModuleList<Block> blocks;
  nn::Linear<Cpu, double> head{6, 3};
  Model() {
    for (int i = 0; i < 2; ++i) blocks.push_back(Block{});
  }
  CHORUS_MODULE(Model, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};

/// Its output includes a penalty of a weight that ranks divide.
struct Penalised : Model {
  auto operator()(const auto& x) const { return Model::forward(x) + mean(square(blocks[0].up.weight)); }
};

using Fsdp = FullyShardedDataParallel<Model, ByBytes<200>>;
using Sharded = Mesh<Model, Pipe<2>, Shard<2, KeepParameters>>;
using Shared = Mesh<Model, Pipe<2>, Data<2>, mesh::Tensor<2>>;
using PartsOfParts = Mesh<Model, Shard<2>, mesh::Tensor<2>>;
using Copied = Mesh<Model, Data<2>, Shard<2>>;

template <class Net>
struct Rank {
  comm::AnyCommunicator communicator, gathers;
  std::unique_ptr<Net> net;

  explicit Rank(const World& world) : communicator(comm::connect(world)) {
    if constexpr (std::is_same_v<Net, Fsdp>) {
      gathers = comm::connect(comm::split(communicator, world, 0));
      net = std::make_unique<Net>(make<Model>(), communicator, gathers, FullyShardedDataParallelOptions{}, 3u);
    } else if constexpr (std::is_same_v<Net, TensorParallel<Model>>) {
      net = std::make_unique<Net>(make<Model>(), communicator, TensorParallelOptions{}, 3u);
    } else if constexpr (std::is_same_v<Net, Pipeline<Model>>) {
      net = std::make_unique<Net>(make<Model>(), communicator, world,
                                  PipelineOptions{.micro_batches = 3, .cut = At{2}}, 3u);
    } else {
      net = std::make_unique<Net>(make<Model>(), communicator, world,
                                  MeshOptions{.micro_batches = 2, .cut = At{1}}, 3u);
    }
  }
};

/// This rank's share of a batch.
template <class Net>
World share_of(const Net& net, const World& world) {
  return std::is_same_v<Net, Fsdp> ? world : test::place_on_batch(net);
}

/// Shapes, losses, norms, steps; then the average in the form of a file, and the parameters.
template <class Net>
std::vector<double> trained(Net& net, const World& share, bool spoils, const std::string& path) {
  std::vector<double> out;
  auto body = net.parameters(), head = body;
  std::sort(body.begin(), body.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  for (const auto& named : body)
    for (const Index extent : named.parameter->extents()) out.push_back(static_cast<double>(extent));
  std::erase_if(body, [](const auto& named) { return named.name.starts_with("head."); });
  std::erase_if(head, [](const auto& named) { return !named.name.starts_with("head."); });
  optim::AdamW<Cpu> steps_body{body, {.lr = 0.05, .weight_decay = 0.5}};
  optim::Sgd<Cpu> steps_head{head, {.lr = 0.1, .momentum = 0.9}};
  steps_body.set_group(optim::NameBegins{"embed."}, {.lr_scale = 0.1});
  steps_body.set_group([](const auto& named) { return named.parameter->extents().size() < 2; }, {.weight_decay = 0});
  optim::GradScaler<Cpu> scaler{net.parameters(), {.init_scale = 8}};
  optim::ParameterAverage<Cpu> average{net, optim::exponential(0.7)};
  for (std::uint32_t i = 0; i < 4; ++i) {
    steps_body.zero_grad();
    steps_head.zero_grad();
    const auto y = test::share(labels(8, 3, i), share);
    const auto loss = cross_entropy(net(test::share(numbers(8, 5, i), share)), y);
    out.push_back(net.mean(loss.item(), y.numel()));
    scaler.scale(loss).backward();
    if (i == 1 && spoils)  // on some ranks only
      for (const auto& named : head)
        if (named.parameter->count() > 0) *static_cast<double*>(named.parameter->grad_data()) = HUGE_VAL;
    scaler.unscale();
    out.push_back(optim::clip_grad_norm(body, 0.1));
    out.push_back(scaler.step(steps_body, steps_head));
    average.update();
  }
  {
    const optim::AveragedScope use{average, net};
    io::save(net, path);
  }
  Model file;
  io::load(file, path);
  for (const double number : values(file)) out.push_back(number);
  net.gathered([&](Model& model) {
    for (const double number : values(model)) out.push_back(number);
  });
  return out;
}

template <class Net>
void check_trains_as_one(int ranks) {
  const auto path = cat("parts_", getpid(), ".safetensors"), alone = "alone_" + path;
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = trained(single, {}, true, alone);
  CHECK(std::count(expected.begin(), expected.end(), 0.0) == 1);  // the skipped step
  const auto text = common_text(ranks, [&](const World& world) {
    Rank<Net> rank(world);
    const bool spoils = std::is_same_v<Net, Sharded> || world.rank == world.size - 1;  // on a rank that has some of it
    return text_of(trained(*rank.net, share_of(*rank.net, world), spoils, path));
  });
  CHECK(distance(test::numbers_in(text), expected) < 1e-9);
  std::remove(path.c_str());
  std::remove(alone.c_str());
}

TEST_CASE("parts: groups, optimizers, norms, scalers and averages of some parameters are one device's") {
  check_trains_as_one<Fsdp>(2);
  check_trains_as_one<TensorParallel<Model>>(3);
  check_trains_as_one<Pipeline<Model>>(2);
  check_trains_as_one<Sharded>(4);
  check_trains_as_one<Shared>(8);
}

/// Losses and parameters with the steps of optimizers that depend on whole parameters.
template <class Net>
std::vector<double> trained_by_wholes(Net& net, const World& share) {
  const auto of = [&](const char* begin) {
    auto parameters = net.parameters();
    std::erase_if(parameters, [&](const auto& named) { return !named.name.starts_with(begin); });
    return parameters;
  };
  optim::Muon<Cpu> blocks{of("blocks."), {.lr = 0.05, .adam = {.lr = 0.02}}};
  optim::Lars<Cpu> embed{of("embed."), {.lr = 0.5, .weight_decay = 0.1, .trust = 0.1}};
  optim::Lamb<Cpu> head{of("head."), {.lr = 0.05, .weight_decay = 0.1}};
  optim::GradScaler<Cpu> scaler{net.parameters(), {.init_scale = 8}};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 4; ++i) {
    blocks.zero_grad();
    embed.zero_grad();
    head.zero_grad();
    const auto y = test::share(labels(8, 3, i), share);
    const auto loss = cross_entropy(net(test::share(numbers(8, 5, i), share)), y);
    out.push_back(net.mean(loss.item(), y.numel()));
    scaler.scale(loss).backward();
    scaler.unscale();
    out.push_back(optim::clip_grad_norm(net.parameters(), 0.5));
    scaler.step(blocks, embed, head);
  }
  net.gathered([&](Model& model) {
    for (const double number : values(model)) out.push_back(number);
  });
  return out;
}

template <class Net>
void check_wholes_as_one(int ranks) {
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = trained_by_wholes(single, {});
  const auto text = common_text(ranks, [&](const World& world) {
    Rank<Net> rank(world);
    return text_of(trained_by_wholes(*rank.net, share_of(*rank.net, world)));
  });
  CHECK(distance(test::numbers_in(text), expected) < 1e-9);
}

TEST_CASE("parts: LARS, LAMB and Muon take one device's steps") {
  check_wholes_as_one<Fsdp>(2);
  check_wholes_as_one<TensorParallel<Model>>(3);
  check_wholes_as_one<Pipeline<Model>>(2);
  check_wholes_as_one<Sharded>(4);
  check_wholes_as_one<Shared>(8);
  check_wholes_as_one<PartsOfParts>(4);
  check_wholes_as_one<Copied>(4);
}

/// Steps by the norm of each whole gradient.
struct NormStep final : optim::Optimizer<Cpu> {
  static constexpr bool needs_whole_parameters = true;
  explicit NormStep(std::vector<nn::NamedParameter<Cpu>> parameters) : Optimizer(std::move(parameters), 0.1) {}
  void step() override {
    for_each_range({.each_alone = true}, [&]<class T>(T, const Range& range) {
      auto* const value = static_cast<T*>(range.value);
      const auto* const grad = static_cast<const T*>(range.grad);
      const T norm = std::sqrt(std::inner_product(grad, grad + range.count, grad, T{}));
      for (Index i = 0; i < range.count; ++i) value[i] -= static_cast<T>(lr()) * grad[i] / norm;
    });
  }
  std::span<const std::string_view> slots() const override { return {}; }
};

/// The result of `use(net)` after a backward pass, the same on all ranks, or containing `all_say` on each.
template <class Net, class Use>
std::string says(int ranks, const Use& use, const std::string& all_say = "") {
  const auto texts = Ranks(ranks, [&](const World& world) {
    Rank<Net> rank(world);
    const auto share = share_of(*rank.net, world);
    cross_entropy((*rank.net)(test::share(numbers(8, 5, 1), share)), test::share(labels(8, 3, 1), share)).backward();
    try {
      return std::string(use(*rank.net));
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
  }).texts();
  for (const auto& text : texts)
    if (all_say.empty() ? text != texts[0] : text.find(all_say) == text.npos) return "not all: " + text;
  return texts[0];
}

TEST_CASE("parts: who needs a whole parameter gets it, or is told") {
  const auto by_norms = [](auto& net) {
    NormStep{net.parameters()}.step();
    std::string text;
    net.gathered([&](Model& model) { text = text_of(values(model)); });
    return text;
  };
  const std::string pieces = "' is split over ranks, and this rank has a part: it needs the norm";
  CHECK_THAT(says<Fsdp>(2, by_norms), Contains(pieces));
  CHECK_THAT(says<TensorParallel<Model>>(2, by_norms), Contains(pieces));
  CHECK_THAT(says<Sharded>(4, by_norms, pieces), Contains(pieces));
  SingleDevice<Model> single{make<Model>(), 3};
  cross_entropy(single(numbers(8, 5, 1)), labels(8, 3, 1)).backward();
  const auto gradients = single.clip_grad_norm(1e9);
  const auto alone = by_norms(single);
  CHECK(distance(test::numbers_in(says<Pipeline<Model>>(2, by_norms)), test::numbers_in(alone)) < 1e-9);

  const auto norm = [](auto& net) { return cat(optim::clip_grad_norm(nn::named_parameters<Cpu>(net.module()), 1e9)); };
  CHECK_THAT(says<Fsdp>(2, norm),
             Contains("gradient of '") &&
                 Contains("it is sharded over the ranks: under FullyShardedDataParallel net.parameters()"));
  CHECK(std::stod(says<TensorParallel<Model>>(2, norm)) == Approx(gradients));
  CHECK(std::stod(says<Pipeline<Model>>(2, norm)) == Approx(gradients));

  using Tensors = TensorParallel<Model>;
  const auto part = Contains("'blocks.0.up.weight': it is split over the ranks, and only");
  CHECK_THAT(says<Tensors>(2, [](auto& net) { return cat(net.module().blocks[0].up.weight.value().size(0)); }), part);
  CHECK_THAT(says<Tensors>(2, [](auto& net) { return cat(value_of(net.module().blocks[0].up.weight).size(0)); }), part);
  CHECK_THAT(says<Tensors>(2, [](auto& net) { return cat(net.module().blocks[0].up.weight.grad().size(0)); }), part);
  CHECK_THAT(says<Tensors>(2, [](auto& net) { return cat(sum(square(net.module().blocks[0].up.weight)).item()); }), part);
  CHECK_THAT(common_text(2, [](const World& world) {
               auto communicator = comm::connect(world);
               TensorParallel<Penalised> net{make<Penalised>(), communicator};
               return message_of<UsageError>([&] { net(numbers(8, 5, 1)); });
             }), part);
  CHECK_THAT(says<Fsdp>(2, [](auto& net) { return cat(net.module().head.weight.grad().size(0)); }),
             Contains("gradient of 'head.weight': it is sharded"));

  const auto copied = [](auto& net) { return cat(nn::copy_of(net.module()).head.weight.shape()); };
  CHECK_THAT(says<Fsdp>(2, copied), Contains("': it is sharded"));
  CHECK_THAT(says<Tensors>(2, [](auto& net) {
               SingleDevice<Model> target{make<Model>(), 3};
               nn::soft_update(target, net, 0.5);
               return std::string();
             }, "this rank has [9, 6] of the target and ["), Contains("soft_update: of 'blocks.0.up.weight' this rank"));

  const auto counted = [](auto& net) {
    const auto table = nn::summary(net.module());
    return table.substr(table.rfind('\n', table.size() - 2) + 1);
  };
  const auto count = counted(single);
  CHECK(says<Fsdp>(2, counted) == count);
  CHECK(says<Tensors>(2, counted) == count);
  CHECK(says<Pipeline<Model>>(2, counted) == count);
}

/// Trains only the head, with its bias in a separate group.
template <class Net>
class HeadSteps {
 public:
  explicit HeadSteps(Net& net) : net_(net) {
    auto head = net.parameters();
    std::erase_if(head, [](const auto& named) { return !named.name.starts_with("head."); });
    optimizer_ = std::make_unique<optim::AdamW<Cpu>>(head, optim::AdamOptions{.lr = 0.05, .weight_decay = 0.5});
    optimizer_->set_group([](const auto& named) { return named.parameter->extents().size() < 2; }, {.lr_scale = 0.1});
  }
  optim::AdamW<Cpu>& optimizer() { return *optimizer_; }
  void three(const World& share, std::uint32_t from) {
    for (auto i = from; i < from + 3; ++i) {
      optimizer_->zero_grad();
      cross_entropy(net_(test::share(numbers(8, 5, i), share)), test::share(labels(8, 3, i), share)).backward();
      optimizer_->step();
    }
  }

 private:
  Net& net_;
  std::unique_ptr<optim::AdamW<Cpu>> optimizer_;
};

TEST_CASE("parts: a checkpoint with an optimizer of one stage's parameters goes on under another policy") {
  const auto path = cat("parts_", getpid(), ".checkpoint");
  CHECK(common_text(2, [&](const World& world) {
          Rank<Pipeline<Model>> rank(world);
          HeadSteps head(*rank.net);
          head.three({}, 0);
          io::save_checkpoint(*rank.net, head.optimizer(), {.step = 3}, path);
          return std::string("saved");
        }) == "saved");
  const auto text = common_text(3, [&](const World& world) {
    Rank<Fsdp> rank(world);
    HeadSteps head(*rank.net);
    io::load_checkpoint(*rank.net, head.optimizer(), path);
    head.three(world, 3);
    std::string all;
    rank.net->gathered([&](Model& model) { all = text_of(values(model)); });
    return all;
  });
  std::remove(path.c_str());
  SingleDevice<Model> single{make<Model>(), 3};
  HeadSteps head(single);
  head.three({}, 0);
  head.three({}, 3);
  CHECK(distance(test::numbers_in(text), values(single.module())) < 1e-9);
}

TEST_CASE("parts: a target network follows, and copies of other stages' numbers are refused, in a pipeline") {
  SingleDevice<Model> single{make<Model>(), 3};
  auto expected = values(single.module());
  for (double& number : expected) number *= 0.75;
  const auto text = common_text(2, [](const World& world) {
    Rank<Pipeline<Model>> rank(world);
    const auto again = comm::split(rank.communicator, world, 0);
    Rank<Pipeline<Model>> target(again);
    for (const auto& named : target.net->parameters()) {
      auto* const data = static_cast<double*>(named.parameter->value_data());
      for (Index i = 0; i < named.parameter->count(); ++i) data[i] *= 0.5;
    }
    nn::soft_update(*target.net, *rank.net, 0.5);
    std::string all;
    target.net->gathered([&](Model& model) { all = text_of(values(model)); });
    const auto refused = message_of<UsageError>([&] { nn::copy_of(rank.net->module()); });
    return all + (refused.find("which does not store it") != refused.npos ? "" : "copied: " + refused);
  });
  CHECK(distance(test::numbers_in(text), expected) < 1e-12);
  CHECK(text.find("copied") == text.npos);
}

}  // namespace parts_test
