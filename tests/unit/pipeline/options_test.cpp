// Features of models and programs under a pipeline: tied and frozen parameters, tokens, varying lengths, cuts,
// clipping; and its traffic and memory.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/pipeline/layer_times.hpp>

#include "models.hpp"

namespace pipeline_options_test {

using namespace test::names;
using test::Piped;

constexpr double near = 1e-10;

/// Trains under all schedules on `ranks` ranks, with both forms of the loop; the largest difference from one device.
template <class Model, class Step>
void check_trains_as_one(int ranks, const PipelineOptions& options, const Step& step) {
  const auto losses = [&](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    std::vector<double> out;
    for (std::uint32_t i = 0; i < 20; ++i) out.push_back(step(net, optimizer, i));
    return out;
  };
  SingleDevice<Model> single{make<Model>(), 3};
  const auto alone = losses(single);
  CHECK(std::abs(alone.front() - alone.back()) > 1e-3);
  const auto texts = Ranks(
                         ranks,
                         [&](const World& world) -> std::string {
                           auto all = comm::connect(world);
                           std::string text;
                           const auto check = [&]<class Order>(Order) {
                             Pipeline<Model, Order> net{make<Model>(), all, world, options, 3};
                             const double off = distance(losses(net), alone);
                             if (!(off < near)) text += cat(Order::name, " ", off, " ");
                           };
                           check(OneForwardOneBackward{});
                           check(ZeroBubbleH1{});
                           return text + "done";
                         },
                         20s)
                         .texts();
  for (const auto& text : texts) CHECK(text == "done");
}
const auto loss_step = [](auto& net, auto& optimizer, std::uint32_t i) {
  return test::chain_step(net, optimizer, i, 7, true);
};
const auto output_step = [](auto& net, auto& optimizer, std::uint32_t i) {
  return test::chain_step(net, optimizer, i, 7, false);
};

/// Two blocks share a weight.
struct Tied : test::Chain<4> {
  Tied() { blocks[3].fc.weight = blocks[0].fc.weight; }
};
TEST_CASE("pipeline: tied parameters of two stages take one step") {
  check_trains_as_one<Tied>(2, {.micro_batches = 3}, loss_step);
  check_trains_as_one<Tied>(3, {.micro_batches = 3}, output_step);
  Ranks ranks(3, [](const World& world) -> std::string {
    Piped<Tied> rank(world, {.micro_batches = 3, .cut = At{2, 4}});
    test::chain_losses(rank.net, true, 3);
    if (world.rank == 1) return "";
    const auto& weight = value_of(rank.net.module().blocks[world.rank == 0 ? 0 : 3].fc.weight);
    return test::text_of(weight.to_vector());
  });
  const auto texts = ranks.texts();
  CHECK(texts[0].size() > 100);
  CHECK(texts[0] == texts[2]);
}

/// Freezes the blocks from First to Last.
template <int First, int Last>
struct Frozen : test::Chain<2> {
  Frozen() {
    int number = 0;
    for (const auto& named : nn::named_parameters<Cpu>(*this)) {
      named.parameter->set_wants_grad(number < First || number >= Last);
      ++number;
    }
  }
};
TEST_CASE("pipeline: a frozen first, middle or last stage") {
  check_trains_as_one<Frozen<0, 2>>(3, {.micro_batches = 3, .cut = At{1, 3}}, loss_step);
  check_trains_as_one<Frozen<2, 6>>(3, {.micro_batches = 3, .cut = At{1, 3}}, loss_step);
  check_trains_as_one<Frozen<6, 8>>(3, {.micro_batches = 3, .cut = At{1, 3}}, output_step);
}
TEST_CASE("pipeline: no gradient is sent to a frozen first stage") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<Frozen<0, 2>> rank(world, {.micro_batches = 3, .cut = At{1}});
    const auto before = trace::bytes_sent(world.rank, trace::Traffic::activations);
    rank.net(numbers(6, 5, 1), labels(6, 3, 1)).backward();
    return cat(trace::bytes_sent(world.rank, trace::Traffic::activations) - before);
  });
  const auto texts = ranks.texts();
  CHECK(texts[0] == cat(6 * 6 * sizeof(double)));
  CHECK(texts[1] == "0");
}

/// Tokens, a convolution over them, and a loss over counted tokens.
struct Convolve : nn::Module {
  nn::Conv2d<Cpu, double> conv{1, 1, {.kernel = 3, .padding = 1}};
  CHORUS_MODULE(Convolve, conv)
  auto forward(const auto& x) const {
    const auto& s = x.shape();
    return x + reshape(tanh(conv(reshape(x, Shape<4>{s[0], 1, s[1], s[2]}))), s);
  }
};
struct TokenHead : nn::Module {
  nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(TokenHead, fc)
  auto forward(const auto& x) const { return fc(x); }
  auto forward(const auto& x, const auto& y) const {
    return cross_entropy(reshape(fc(x), Shape<2>{-1, 3}), y.view(Shape<1>{-1}), {.ignore_index = 0});
  }
};
struct Tokens : nn::Module {
  nn::Embedding<Cpu, double> embed{11, 6};
  nn::ModuleList<Convolve> blocks{{Convolve{}, Convolve{}}};
  TokenHead head;
  CHORUS_MODULE(Tokens, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};
template <bool GivesLoss>
double token_step(auto& net, auto& optimizer, std::uint32_t i) {
  optimizer.zero_grad();
  const Index length = 3 + i % 4;  // other shapes at the cuts in each batch
  const auto x = labels(7 * length, 11, i).view(Shape<2>{7, length});
  const auto y = labels(7 * length, 3, i + 50).view(Shape<2>{7, length});
  const auto loss = [&] {
    if constexpr (GivesLoss)
      return net(x, y);
    else
      return cross_entropy(reshape(net(x), Shape<2>{-1, 3}), y.view(Shape<1>{-1}), {.ignore_index = 0});
  }();
  loss.backward();
  optimizer.step();
  return loss.item();
}
TEST_CASE("pipeline: tokens that count differ from micro-batch to micro-batch, lengths from batch to batch") {
  check_trains_as_one<Tokens>(3, {.micro_batches = 3}, [](auto& net, auto& optimizer, std::uint32_t i) {
    return token_step<true>(net, optimizer, i);
  });
  check_trains_as_one<Tokens>(2, {.micro_batches = 3}, [](auto& net, auto& optimizer, std::uint32_t i) {
    return token_step<false>(net, optimizer, i);
  });
}

/// Blocks that backward recomputes, including dropout and selected columns.
struct Again : nn::Module {
  nn::Linear<Cpu, double> fc{6, 6};
  nn::Dropout drop{0.3};
  CHORUS_MODULE(Again, fc, drop)
  auto forward(const auto& x) const {
    const auto backwards = Tensor<std::int64_t, 1>::from({5, 4, 3, 2, 1, 0}, {6});
    return checkpoint([this, backwards](const auto& h) { return drop(tanh(fc(index_select(h, 1, backwards)))); }, x);
  }
};
struct Checkpointed : nn::Module {
  nn::Linear<Cpu, double> embed{5, 6};
  nn::ModuleList<Again> blocks{{Again{}, Again{}}};
  test::Head head;
  CHORUS_MODULE(Checkpointed, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};
TEST_CASE("pipeline: activation checkpoints within a stage") {
  check_trains_as_one<Checkpointed>(2, {.micro_batches = 3}, [](auto& net, auto& optimizer, std::uint32_t i) {
    optimizer.zero_grad();
    const auto x = numbers(7, 5, i);
    const auto y = labels(7, 3, i);
    net(x, y);  // its gradients are dropped
    const auto loss = net(x, y) * 0.5;
    loss.backward();
    optimizer.step();
    return loss.item();
  });
  check_trains_as_one<Checkpointed>(3, {.micro_batches = 3, .cut = At{1, 3}}, output_step);
}

TEST_CASE("pipeline: gradients are clipped by the norm of all stages") {
  const auto clipped_step = [](auto& net, auto& optimizer, std::uint32_t i) {
    optimizer.zero_grad();
    const auto loss = net(numbers(7, 5, i), labels(7, 3, i));
    loss.backward();
    double norm = 0;
    if constexpr (requires { net.clip_grad_norm(0.1); })
      norm = net.clip_grad_norm(0.1);
    else
      norm = optim::clip_grad_norm(net.parameters(), 0.1);
    optimizer.step();
    return loss.item() + norm;
  };
  check_trains_as_one<Tied>(2, {.micro_batches = 3}, clipped_step);
}

TEST_CASE("pipeline: each of two pairs of ranks has a pipeline of its own") {
  const auto alone = test::chain_losses_alone<test::Chain<2>>(5);
  Ranks ranks(4, [&](const World& world) -> std::string {
    auto all = comm::connect(world);
    const auto pair = comm::split(all, world, world.rank % 2);
    auto communicator = comm::connect(pair);
    Pipeline<test::Chain<2>> net{make<test::Chain<2>>(), communicator, pair, {.micro_batches = 3}, 3};
    return cat(distance(test::chain_losses(net, true, 5), alone) < near);
  });
  for (const auto& text : ranks.texts()) CHECK(text == "true");
}

TEST_CASE("pipeline: a step that one stage has to leave out is left out by all") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<2>> rank(world);
    auto& net = rank.net;
    bool overflows = false;
    for (const auto& named : net.parameters())
      named.parameter->on_grad([&, parameter = named.parameter] {
        if (overflows && world.rank == 1) *static_cast<double*>(parameter->grad_data()) = INFINITY;
      });
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    optim::GradScaler<Cpu> scaler{net, {.init_scale = 1024}};
    std::string text;
    for (const bool overflow : {false, true, false}) {
      overflows = overflow;
      optimizer.zero_grad();
      const auto before = test::own_values(net);
      scaler.scale(net(numbers(6, 5, 1), labels(6, 3, 1))).backward();
      const bool stepped = scaler.step(optimizer);
      text += cat(stepped, before != test::own_values(net), " ");
    }
    optim::GradScaler<Cpu> alone{net.parameters(), {.init_scale = 1024}};
    optimizer.zero_grad();
    alone.scale(net(numbers(6, 5, 1), labels(6, 3, 1))).backward();
    text += cat(alone.step(optimizer));
    overflows = true;
    optimizer.zero_grad();
    alone.scale(net(numbers(6, 5, 1), labels(6, 3, 1))).backward();
    return text + cat(alone.step(optimizer));
  });
  for (const auto& text : ranks.texts()) {
    CHECK(text == "truetrue falsefalse truetrue truefalse");
  }
}

TEST_CASE("pipeline: samplers are one device's") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<1>> rank(world);
    SingleDevice<test::Chain<1>> single{make<test::Chain<1>>(), rank.net.seed()};
    const data::SyntheticImages images{50, 1, data::Split::train, {1, 8, 8}};
    auto one = single.sampler(images), other = rank.net.sampler(images);
    one.set_epoch(2);
    other.set_epoch(2);
    return cat(one.share(1, 8).size() == 8, std::ranges::equal(one.share(1, 8), other.share(1, 8)));
  });
  for (const auto& text : ranks.texts()) CHECK(text == "truetrue");
}

TEST_CASE("pipeline: a result whose net is gone does not go backward") {
  Ranks ranks(2, [](const World& world) -> std::string {
    auto all = comm::connect(world);
    Variable<double, 0> loss;
    {
      Pipeline<test::Chain<1>> net{make<test::Chain<1>>(), all, world, {}, 3};
      loss = net(numbers(4, 5, 1), labels(4, 3, 1));
    }
    return message_of<UsageError>([&] { loss.backward(); });
  });
  for (const auto& text : ranks.texts())
    CHECK_THAT(text, Contains("the net of this output was destroyed before backward"));
}

TEST_CASE("pipeline: a schedule of one's own, and one that is broken") {
  struct Own {
    static Schedule of(int p, int m) {  // backward from the last micro-batch to the first
      auto table = GPipe::of(p, m);
      for (auto& actions : table.ranks) std::reverse(actions.begin() + m, actions.end());
      return table;
    }
  };
  struct Broken {
    static Schedule of(int p, int m) {
      auto table = GPipe::of(p, m);
      table.ranks.back().pop_back();
      return table;
    }
  };
  const auto alone = test::chain_losses_alone<test::Chain<2>>(5);
  Ranks ranks(2, [&](const World& world) -> std::string {
    auto all = comm::connect(world);
    Pipeline<test::Chain<2>, Own> net{make<test::Chain<2>>(), all, world, {.micro_batches = 3}, 3};
    std::string text = cat(distance(test::chain_losses(net, true, 5), alone) < near);
    Pipeline<test::Chain<2>, Broken> broken{make<test::Chain<2>>(), all, world, {.micro_batches = 3}, 3};
    return text + message_of<UsageError>([&] { broken(numbers(4, 5, 1), labels(4, 3, 1)); });
  });
  for (const auto& text : ranks.texts())
    CHECK(text == "trueschedule: backward of micro-batch 2 in stage 1 occurs 0 times, expected once");
}

TEST_CASE("pipeline: cuts by bytes and by time") {
  CHECK(pipeline::balanced(std::vector<double>{1, 1, 1, 1}, 2) == std::vector<std::size_t>{0, 2, 4});
  CHECK(pipeline::balanced(std::vector<double>{9, 1, 1, 1}, 2) == std::vector<std::size_t>{0, 1, 4});
  CHECK(pipeline::balanced(std::vector<double>{1, 2, 3, 4, 5, 6}, 3) == std::vector<std::size_t>{0, 3, 5, 6});
  CHECK(pipeline::balanced(std::vector<double>{0, 0, 7}, 3) == std::vector<std::size_t>{0, 1, 2, 3});
  Ranks ranks(2, [](const World& world) -> std::string {
    auto all = comm::connect(world);
    auto model = make<test::Chain<2>>();
    auto times = layer_times(model, numbers(8, 5, 1), labels(8, 3, 1));
    const bool measured = times.size() == 4 && times[1] > 0;
    times = world.rank == 0 ? std::vector<double>{1, 1, 1, 5} : std::vector<double>{5, 1, 1, 1};
    Pipeline<test::Chain<2>> net{std::move(model), all, world, {.cut = ByTime{times}}, 3};
    Pipeline<test::Chain<2>> by_bytes{make<test::Chain<2>>(), all, world, {}, 3};
    return cat(measured, " ", std::span(net.stage_begins()), std::span(by_bytes.stage_begins()));
  });
  for (const auto& text : ranks.texts()) CHECK(text == "true [0, 3, 4][0, 2, 4]");
}

TEST_CASE("pipeline: a rank sends its stage's activations and gradients once") {
  Ranks ranks(3, [](const World& world) -> std::string {
    Piped<test::Chain<2>> rank(world, {.micro_batches = 3, .cut = At{1, 3}});
    const auto before = trace::bytes_sent(world.rank, trace::Traffic::activations);
    rank.net(numbers(7, 5, 1), labels(7, 3, 1)).backward();
    return cat(trace::bytes_sent(world.rank, trace::Traffic::activations) - before);
  });
  const auto texts = ranks.texts();
  const std::size_t a = 7 * 6 * sizeof(double);
  CHECK(texts[0] == cat(a));
  CHECK(texts[1] == cat(2 * a));
  CHECK(texts[2] == cat(a));
}

template <class Order>
std::vector<std::size_t> peaks() {
  std::vector<std::size_t> out;
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<2>, Order> rank(world, {.micro_batches = 8, .cut = At{2}});
    rank.net(numbers(8, 5, 1), labels(8, 3, 1)).backward();
    const auto before = trace::memory(0).current;
    rank.net(numbers(8 * 2000, 5, 1), labels(8 * 2000, 3, 1)).backward();
    return cat(trace::memory(0).peak - before);
  });
  for (const auto& text : ranks.texts()) out.push_back(static_cast<std::size_t>(std::stol(text)));
  return out;
}
TEST_CASE("pipeline: 1F1B keeps fewer inputs than GPipe") {
  const auto all = peaks<GPipe>(), few = peaks<OneForwardOneBackward>();
  const std::size_t input = 2000 * 6 * sizeof(double);
  CHECK(all[1] > few[1] + 6 * input);  // 8 micro-batches' inputs against 1
  CHECK(all[0] > few[0] + 5 * input);  // 8 against 2
}

TEST_CASE("pipeline: who throws while the model is gathered ends all") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Piped<test::Chain<2>> rank(world);
    rank.net.gathered([&](auto&) {
      if (world.rank == 1) throw std::runtime_error("no room");
    });
    rank.net.gathered([](auto&) {});
    return "";
  });
  const auto texts = ranks.texts();
  CHECK(texts[1] == "no room");
  CHECK_THAT(texts[0], Contains("on rank 1, threw: no room"));
}
TEST_CASE("pipeline: what is gathered is one device's model") {
  using Model = test::Chain<2>;
  SingleDevice<Model> single{make<Model>(), 3};
  test::chain_losses(single, true, 3);
  const auto expected = test::values(single.module());
  Ranks ranks(3, [&](const World& world) -> std::string {
    Piped<Model> rank(world, {.micro_batches = 3});
    test::chain_losses(rank.net, true, 3);
    std::string text;
    rank.net.gathered([&](Model& model) { text = cat(distance(test::values(model), expected) < near); });
    const auto away = message_of<UsageError>([&] { test::values(rank.net.module()); });
    text += cat(away.starts_with("Pipeline: '"));
    rank.net.gathered([&](Model& model) {
      for (const auto& named : nn::named_parameters<Cpu>(model)) {
        std::fill_n(static_cast<double*>(named.parameter->value_data()), named.parameter->count(), 0.5);
        named.parameter->touch();
      }
    });
    const auto own = test::numbers_in(test::own_values(rank.net));
    return text + cat(std::all_of(own.begin(), own.end(), [](double x) { return x == 0.5; }));
  });
  for (const auto& text : ranks.texts()) CHECK(text == "truetruetrue");
}

TEST_CASE("pipeline: the mode holds for the layers of all stages, but for those that have their own") {
  using Model = test::Chain<2>;
  Ranks ranks(3, [](const World& world) -> std::string {
    Piped<Model> rank(world);
    std::string text;
    const auto modes = [&] {
      rank.net.gathered([&](Model& model) {
        for (const auto& block : {&model.blocks[0], &model.blocks[1]})
          text += cat(block->training(), block->drop.training(), ' ');
        text += cat(model.embed.training(), model.head.fc.training(), '\n');
      });
    };
    rank.net.eval();
    modes();
    rank.net.train();
    for (std::size_t i = 0; i < 2; ++i) rank.net.module().blocks[i].drop.eval();
    modes();
    return text;
  });
  for (const auto& text : ranks.texts())
    CHECK(text == "falsefalse falsefalse falsefalse\ntruefalse truefalse truetrue\n");
}

TEST_CASE("pipeline: an optimizer of another kind, and evaluation") {
  using Model = test::Chain<2>;
  const auto run = [](auto& net) {
    optim::AdamW optimizer{net.parameters(), {.lr = 0.01}};
    std::vector<double> out;
    for (std::uint32_t i = 0; i < 6; ++i) {
      net.train();
      out.push_back(test::chain_step(net, optimizer, i, 9, i % 2 == 0));
      net.eval();
      const NoGrad no_grad;
      out.push_back(net(numbers(5, 5, i), labels(5, 3, i)).item());
      for (const double number : net(numbers(5, 5, i)).value().to_vector()) out.push_back(number);
    }
    return out;
  };
  SingleDevice<Model> single{make<Model>(), 3};
  const auto alone = run(single);
  Ranks ranks(2, [&](const World& world) -> std::string {
    Piped<Model> rank(world, {.micro_batches = 4});
    return cat(distance(run(rank.net), alone) < near);
  });
  for (const auto& text : ranks.texts()) CHECK(text == "true");
}

}  // namespace pipeline_options_test
