// Pipelines whose micro-batches are canonical shares: the bits of one device, with any schedule on any number of ranks.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/same_bits/mesh.hpp>
#include <chorus/same_bits/pipeline.hpp>
#include <unit/io/files.hpp>

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
  std::optional<double> over = {};
  auto forward(const auto& x, const auto& y) const { return cross_entropy(fc(x), y, {.mean_over = over}); }
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
template <class M = Model>
M made() {
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

/// The run of shares of one of several groups of ranks.
struct Part {
  std::size_t groups = 1, group = 0;
  bool evaluates = true;
  template <class T, int Rank>
  Tensor<T, Rank> operator()(const Tensor<T, Rank>& batch) const {
    const auto run = same_bits::shares_of_device(shares, groups, group);
    return batch.slice(0, share_begin(batch.size(0), shares, run.begin), share_begin(batch.size(0), shares, run.end));
  }
};

/// Steps [from, to): 16 samples, 11, 5 (fewer than shares), and one with gradients of two passes.
template <class Net>
std::string train(Net& net, optim::Optimizer<Cpu>& optimizer, Gives gives, std::uint32_t from = 0,
                  std::uint32_t to = 4, const Part& part = {}) {
  std::string text;
  const auto loss_of = [&](Index size, std::uint32_t key) {
    const auto x = part(inputs(size, key));
    const auto y = part(labels(size, 3, key));
    return gives == Gives::loss ? net(x, y) : cross_entropy(net(x), y);
  };
  for (std::uint32_t i = from; i < to; ++i) {
    const Index size = std::array<Index, 4>{16, 11, 5, 9}[i];
    optimizer.zero_grad();
    for (std::uint32_t pass = 0; pass < (i == 3 ? 2 : 1); ++pass) {
      const auto loss = loss_of(size, i + pass);
      (loss * (pass == 0 ? 1.0F : 0.5F)).backward();
      text += cat(loss.item(), " ");
    }
    optimizer.step();
  }
  const NoGrad no_grad;
  net.eval();
  if (part.evaluates) text += cat(loss_of(11, 9).item(), "\n");
  net.train();
  return text + bits_of_net(net);
}
template <class Net>
std::string train_all(Net& net, Gives gives, const Part& part = {}) {
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  return train(net, optimizer, gives, 0, 4, part);
}
/// On one device.
template <class M = Model>
std::string alone(Gives gives, bool evaluates = true) {
  return common_text(1, [&](const World&) {
    SingleDevice<SameBits<M, shares>> net(made<M>(), 3);
    return train_all(net, gives, {.evaluates = evaluates});
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

template <class M, class... Orders>
void check_orders(int ranks) {
  for (const auto gives : {Gives::loss, Gives::output}) {
    const auto expected = alone<M>(gives);
    REQUIRE_THAT(expected, Contains("head.fc.weight"));
    const auto texts = Ranks(ranks, [&](const World& world) -> std::string {
                         auto all = comm::connect(world);
                         std::string different;
                         const auto check = [&]<class Order>(Order) {
                           Pipeline<SameBits<M, shares>, Order> net(made<M>(), all, world, {}, 3);
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
  check_orders<Model, OneForwardOneBackward>(1);
  check_orders<Model, GPipe, OneForwardOneBackward, Interleaved<2>, ZeroBubbleH1, Backwards>(2);
  check_orders<Model, OneForwardOneBackward, ZeroBubbleH1>(3);
  check_orders<Model, Interleaved<2>, ZeroBubbleH1>(4);
  struct Counted : Model {
    Counted() { head.over = 21; }
  };
  check_orders<Counted, OneForwardOneBackward>(2);
}

/// Two blocks have one weight.
struct Tied : Model {
  Tied() { blocks[5].fc.weight = blocks[0].fc.weight; }
};
TEST_CASE("pipeline of shares: stages that share parameters add up their uses as one device does") {
  check_orders<Tied, Interleaved<2>, ZeroBubbleH1>(2);
  check_orders<Tied, OneForwardOneBackward>(3);
}

TEST_CASE("pipeline of shares: groups of ranks that divide the batch have runs of shares, also of tied weights") {
  using InMesh = Mesh<SameBits<Tied, shares>, mesh::Pipe<2>, mesh::Data<mesh::dynamic>>;
  for (const auto gives : {Gives::loss, Gives::output})
    for (const int groups : {2, 3}) {
      const auto expected = alone<Tied>(gives, /*evaluates=*/false);
      REQUIRE_THAT(expected, Contains("head.fc.weight"));
      const auto texts = Ranks(2 * groups, [&](const World& world) -> std::string {
                           auto all = comm::connect(world);
                           InMesh net(made<Tied>(), all, world, {.sizes = {.data = groups}}, 3);
                           const auto group = static_cast<std::size_t>(net.place()[1]);
                           return train_all(net, gives, {static_cast<std::size_t>(groups), group, false});
                         }, 60s).texts();
      for (const auto& text : texts) CHECK(text == expected);
    }
}

TEST_CASE("pipeline of shares: a checkpoint goes from one device to ranks and back") {
  const chorus_test::TemporaryFolder folder;
  const auto half = folder.path() + "/half.safetensors";
  const auto go_on = [&](auto& net, std::uint32_t from, std::uint32_t to) {
    optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    if (from > 0) io::load_checkpoint(net, optimizer, half);
    const auto text = train(net, optimizer, Gives::loss, from, to);
    if (to < 4) io::save_checkpoint(net, optimizer, {.step = to}, half);
    return text;
  };
  const auto single = [&](std::uint32_t from, std::uint32_t to) {
    return common_text(1, [&](const World&) {
      SingleDevice<Same> net(made(), 3);
      return go_on(net, from, to);
    });
  };
  const auto piped = [&](std::uint32_t from, std::uint32_t to) {
    return common_text(3, [&](const World& world) {
      auto all = comm::connect(world);
      Pipeline<Same, ZeroBubbleH1> net(made(), all, world, {}, 3);
      return go_on(net, from, to);
    });
  };
  const auto first = single(0, 2), expected = single(2, 4);
  REQUIRE_THAT(expected, Contains("head.fc.weight"));
  CHECK(piped(2, 4) == expected);
  CHECK(piped(0, 2) == first);
  CHECK(piped(2, 4) == expected);
  CHECK(single(2, 4) == expected);
}

TEST_CASE("pipeline of shares: what would have other bits is refused") {
  const auto told = [](const auto& body) {
    return common_text(2, [&](const World& world) {
      return message_of<UsageError>([&] {
        auto all = comm::connect(world);
        body(all, world);
      });
    });
  };
  const auto with_net = [&](const auto& body) {
    return told([&](auto& all, const World& world) {
      Pipeline<Same> net(made(), all, world, {}, 3);
      body(net);
    });
  };
  CHECK_THAT(told([](auto& all, const World& world) {
               Tied model;
               model.blocks[4].fc.bias = model.blocks[2].fc.bias;
               Pipeline<SameBits<Tied, shares>, Interleaved<2>> net(std::move(model), all, world, {}, 3);
             }),
             Contains("another parameter in the stages"));
  CHECK_THAT(told([](auto& all, const World& world) {
               Pipeline<SameBits<Tied, shares>, Backwards> net(Tied{}, all, world, {}, 3);
               net(inputs(16, 1), labels(16, 3, 1));
             }),
             Contains("expected a schedule in which micro-batches go backward in the order"));
  CHECK_THAT(told([](auto& all, const World& world) {
               Pipeline<SameBits<Model>> net(SameBits{made(), 0}, all, world, {}, 3);
             }),
             Contains("expected 1 to 64 shares, got 0"));
  CHECK_THAT(with_net([](auto& net) { (net(inputs(16, 1), labels(16, 3, 1)) * 0.3F).backward(); }),
             Contains("expected backward of the loss times a power of two, got 0.3"));
  const auto texts = Ranks(2, [](const World& world) -> std::string {
                       auto all = comm::connect(world);
                       return message_of<UsageError>([&] {
                         Pipeline<SameBits<Model>> net(SameBits{made(), 4 + world.rank}, all, world, {}, 3);
                       });
                     }).texts();
  for (std::size_t rank = 0; rank < 2; ++rank)
    CHECK_THAT(texts[rank], Contains(cat("this rank has ", 4 + rank, " shares, another rank another number")));
  // The last stage's rank tells why; the other hears of it.
  const auto uneven = Ranks(2, [](const World& world) -> std::string {
                        auto all = comm::connect(world);
                        Pipeline<Same> net(made(), all, world, {}, 3);
                        auto classes = labels(16, 3, 1);
                        classes.data()[0] = -100;
                        return message_of<Error>([&] { net(inputs(16, 1), classes); });
                      }).texts();
  for (const auto& text : uneven) CHECK_THAT(text, Contains("is a mean over 15 in the whole batch"));
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
