// Pipelines whose micro-batches are canonical shares: the bits of one device, with any schedule on any number of ranks.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/same_bits/pipeline.hpp>
#include <filesystem>

#include "models.hpp"

namespace pipeline_same_bits_test {

using namespace test::names;

constexpr int shares = 8;

/// In float, where rounding shows; with dropout, running statistics, and a part that is computed again.
struct Block : nn::Module {
  nn::Linear<Cpu> fc{16, 16};
  nn::BatchNorm1d<Cpu> norm{4};
  nn::Dropout drop{0.3};
  CHORUS_MODULE(Block, fc, norm, drop)
  auto forward(const auto& x) const {
    const auto part = [this](const auto& h) {
      return drop(tanh(reshape(norm(reshape(fc(h), Shape<3>{-1, 4, 4})), Shape<2>{-1, 16})));
    };
    return x + checkpoint(part, x);
  }
};
/// For x alone returns the logits, with targets the loss.
struct Head : nn::Module {
  nn::Linear<Cpu> fc{16, 3};
  CHORUS_MODULE(Head, fc)
  auto forward(const auto& x) const { return fc(x); }
  auto forward(const auto& x, const auto& y) const { return cross_entropy(fc(x), y); }
};
struct Model : nn::Module {
  nn::Linear<Cpu> embed{5, 16};
  nn::ModuleList<Block> blocks{std::vector<Block>(6)};
  Head head;
  Model() {
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = Block{};
  }
  CHORUS_MODULE(Model, embed, blocks, head)
  CHORUS_PIPELINE(embed, blocks, head)
};
using Same = SameBits<Model, shares>;
Model made() {
  manual_seed(7);
  return {};
}

Tensor<float, 2> inputs(Index size, std::uint32_t key) {
  const auto values = numbers(size, 5, key).to_vector();
  return Tensor<float, 2>::from(std::vector<float>(values.begin(), values.end()), {size, 5});
}
std::string bits_of(nn::Module& model) {
  std::string text;
  const auto add = [&](const auto& name, const void* data, std::size_t bytes) {
    const auto* const first = static_cast<const unsigned char*>(data);
    std::uint64_t hash = 14695981039346656037u;
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ first[i]) * 1099511628211u;
    text += cat(name, " ", hash, "\n");
  };
  for (const auto& named : nn::named_parameters<Cpu>(model))
    add(named.name, named.parameter->value_data(), named.parameter->size_bytes());
  for (const auto& named : nn::named_buffers<Cpu>(model))
    add(named.name, named.buffer->memory(), named.buffer->size_bytes());
  return text;
}
template <class Net>
std::string bits_of_net(Net& net) {
  std::string text;
  if constexpr (requires { net.gathered([](Model&) {}); })
    net.gathered([&](Model& model) { text = bits_of(model); });
  else
    text = bits_of(net.module());
  return text;
}
enum class Gives { loss, output };

/// Steps [from, to): 16 samples, 11, 5 (fewer than shares), and one with gradients of two passes.
template <class Net>
std::string train(Net& net, optim::Optimizer<Cpu>& optimizer, Gives gives, std::uint32_t from = 0,
                  std::uint32_t to = 4) {
  std::string text;
  for (std::uint32_t i = from; i < to; ++i) {
    const Index size = std::array<Index, 4>{16, 11, 5, 9}[i];
    optimizer.zero_grad();
    for (std::uint32_t pass = 0; pass < (i == 3 ? 2 : 1); ++pass) {
      const auto x = inputs(size, i + pass);
      const auto y = labels(size, 3, i + pass);
      const auto loss = gives == Gives::loss ? net(x, y) : cross_entropy(net(x), y);
      (loss * (pass == 0 ? 1.0F : 0.5F)).backward();
      text += cat(loss.item(), " ");
    }
    optimizer.step();
  }
  const NoGrad no_grad;
  net.eval();
  const auto x = inputs(11, 9);
  const auto loss = gives == Gives::loss ? net(x, labels(11, 3, 9)) : cross_entropy(net(x), labels(11, 3, 9));
  text += cat(loss.item(), "\n");
  net.train();
  return text + bits_of_net(net);
}
template <class Net>
std::string train_all(Net& net, Gives gives) {
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  return train(net, optimizer, gives);
}
std::string alone(Gives gives) {
  return common_text(1, [&](const World&) {
    SingleDevice<Same> net(made(), 3);
    return train_all(net, gives);
  });
}

/// Goes backward in another order than forward.
struct Backwards {
  static constexpr const char* name = "backwards";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      for (int i = m; i-- > 0;) actions.push_back({Schedule::Kind::forward, i ^ (m % 2 == 0 ? 1 : 0), rank});
      for (int i = m; i-- > 0;) actions.push_back({Schedule::Kind::backward, i, rank});
    }
    return table;
  }
};

template <class... Orders>
void check_orders(int ranks) {
  for (const auto gives : {Gives::loss, Gives::output}) {
    const auto expected = alone(gives);
    REQUIRE_THAT(expected, Contains("head.fc.weight"));
    const auto texts = Ranks(ranks, [&](const World& world) -> std::string {
                         auto all = comm::connect(world);
                         std::string different;
                         const auto check = [&]<class Order>(Order) {
                           Pipeline<Same, Order> net(made(), all, world, {}, 3);
                           if (const auto text = train_all(net, gives); text != expected)
                             different += cat(Order::name, ":\n", text, "instead of\n", expected);
                         };
                         (check(Orders{}), ...);
                         return different + "done";
                       }, 60s).texts();
    for (const auto& text : texts) CHECK(text == "done");
  }
}

TEST_CASE("pipeline of shares: parameters, statistics and losses have the bits of one device") {
  check_orders<OneForwardOneBackward>(1);
  check_orders<GPipe, OneForwardOneBackward, Interleaved<2>, ZeroBubbleH1, Backwards>(2);
  check_orders<OneForwardOneBackward, ZeroBubbleH1>(3);
  check_orders<Interleaved<2>, ZeroBubbleH1>(4);
}

TEST_CASE("pipeline of shares: a plain pipeline has other bits") {
  const auto text = common_text(2, [](const World& world) {
    auto all = comm::connect(world);
    Pipeline<Model> net(made(), all, world, {.micro_batches = shares}, 3);
    return train_all(net, Gives::output);
  });
  REQUIRE_THAT(text, Contains("head.fc.weight"));
  CHECK(text != alone(Gives::output));
}

}  // namespace pipeline_same_bits_test
