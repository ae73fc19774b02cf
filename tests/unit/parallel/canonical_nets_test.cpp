// Canonical shares: nets that compute in bf16, inputs that want a gradient, other nets beside them; buffers, in training
// and not.
#include <catch.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "canonical_programs.hpp"

namespace canonical_nets_test {

using namespace test::names;
using test::canonical::digits, test::canonical::images, test::canonical::numbers_of, test::canonical::Part,
    test::canonical::Who;

enum class Norm { none, own, synced };

template <class D>
struct Net : nn::Module {
  nn::Conv2d<D> conv{1, 4, {.kernel = 3}};
  std::optional<nn::BatchNorm2d<D>> norm;
  std::optional<nn::SyncBatchNorm<D>> synced;
  nn::Dropout drop{0.3};
  nn::Linear<D> fc{64, 3};
  CHORUS_MODULE(Net, conv, norm, synced, drop, fc)

  explicit Net(Norm kind = Norm::own) {
    if (kind == Norm::own) norm.emplace(4);
    if (kind == Norm::synced) synced.emplace(4);
  }
  /// images: [batch, 1, 6, 6] -> scores: [batch, 3]
  auto forward(const auto& x) const {
    auto h = conv(x);
    if (norm) h = (*norm)(h);
    if (synced) h = (*synced)(h);
    return fc(drop(flatten(relu(h))));
  }
};
using Mixed = nn::MixedPrecision<Net<Cpu>, bf16>;

template <class Model>
Model made(Norm kind) {
  manual_seed(7);
  return Model(Net<Cpu>(kind));
}

/// `body(net, part)` under a policy with `shares` shares, on one rank after the other.
template <class Model, class Body>
std::vector<std::string> texts(Norm kind, Who who, int devices, int shares, const Body& body) {
  return Ranks(who == Who::ddp ? devices : 1, [&](const World& world) -> std::string {
           alarm(60);
           auto model = made<Model>(kind);
           if (who == Who::single) {
             SingleDevice<Model> net(std::move(model), 3, {.canonical_shares = shares});
             return body(net, Part{shares});
           }
           if (who == Who::dp) {
             std::vector<int> ids;
             for (int i = 0; i < devices; ++i) ids.push_back(i);
             DataParallel<Model> net(std::move(model), {.device_ids = ids, .canonical_shares = shares}, 3);
             return body(net, Part{shares});
           }
           auto communicator = comm::connect(world);
           DistributedDataParallelOptions options;
           options.canonical_shares = shares;
           DistributedDataParallel<Model> net(std::move(model), communicator, options, 3);
           return body(net, Part{shares, devices, world.rank});
         }).texts();
}
std::string gradients(nn::Module& model) {
  std::string out;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    const auto* const data = static_cast<const float*>(named.parameter->grad_data());
    for (Index i = 0; i < named.parameter->count(); ++i)
      out += named.parameter->grad_arrived() ? digits(static_cast<double>(data[i])) : "none ";
  }
  return out;
}
struct Way {
  Who who;
  int devices;
};
const std::vector<Way> ways{{Who::dp, 1}, {Who::dp, 2}, {Who::dp, 3}, {Who::ddp, 1}, {Who::ddp, 2}, {Who::ddp, 3}};

TEST_CASE("canonical nets: what computes in bf16 is the same bits on any number of devices") {
  const auto train = [](auto& net, const Part& part) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    std::string losses;
    for (const Index size : {9, 8, 3}) {
      const auto key = static_cast<std::uint32_t>(size);
      optimizer.zero_grad();
      const auto loss = cross_entropy(net(part(images(size, key))), part(labels(size, 3, key)));
      losses += digits(loss.item());
      loss.backward();
      optimizer.step();
    }
    return losses + "|" + numbers_of(net.module());
  };
  for (const auto kind : {Norm::none, Norm::own, Norm::synced}) {
    INFO(static_cast<int>(kind));
    const auto expected = texts<Mixed>(kind, Who::single, 1, 4, train)[0];
    REQUIRE(expected.find('|') != expected.npos);
    CHECK(texts<Net<Cpu>>(kind, Who::single, 1, 4, train)[0] != expected);
    for (const auto& [who, devices] : ways)
      for (const auto& text : texts<Mixed>(kind, who, devices, 4, train)) {
        INFO(static_cast<int>(who) << " on " << devices);
        CHECK(test::canonical::difference(text, expected) == "");
      }
  }
}

TEST_CASE("canonical nets: an input that wants a gradient gets that of its samples, the same bits on any number of devices") {
  // One text of all ranks: each has the gradients of its own samples.
  const auto pass = [](Index size) {
    return [size](auto& net, const Part& part) {
      std::string text;
      const Variable<float, 4> x(part(images(size, 5)), true);
      for (int again = 0; again < 2; ++again)  // gradients add up
        cross_entropy(net(tanh(x)), part(labels(size, 3, 5))).backward();
      for (const float number : x.grad().to_vector()) text += digits(static_cast<double>(number));
      return text;
    };
  };
  for (const auto kind : {Norm::own, Norm::synced})
    for (const Index size : {9, 8}) {
      const auto expected = texts<Net<Cpu>>(kind, Who::single, 1, 4, pass(size))[0];
      REQUIRE(test::numbers_in(expected).size() == static_cast<std::size_t>(36 * size));
      for (const auto& [who, devices] : ways) {
        INFO(static_cast<int>(kind) << " of " << size << ": " << static_cast<int>(who) << " on " << devices);
        std::string all;
        for (const auto& text : texts<Net<Cpu>>(kind, who, devices, 4, pass(size))) all += text;
        CHECK(all == expected);
      }
    }
}

TEST_CASE("canonical nets: a net of one rank's own may be in the loss, beside the mean over the batch") {
  const auto pass = [](bool beside) {
    return [beside](auto& net, const Part& part) {
      DataParallel<Net<Cpu>> own(made<Net<Cpu>>(Norm::none), {.device_ids = {0, 1}}, 3);
      auto loss = cross_entropy(net(part(images(8, 5))), part(labels(8, 3, 5)));
      if (beside) loss = loss + sum(square(own(images(4, 6)))) * 0.1F;
      loss.backward();
      check((gradients(own.module()).find("none") == std::string::npos) == beside, "the other net's gradients");
      return gradients(net.module());
    };
  };
  const auto expected = texts<Net<Cpu>>(Norm::own, Who::single, 1, 4, pass(false))[0];
  REQUIRE(test::numbers_in(expected).size() > 100);
  for (const auto& text : texts<Net<Cpu>>(Norm::own, Who::ddp, 2, 4, pass(true))) CHECK(text == expected);
}

TEST_CASE("canonical nets: shares write buffers in training only, and their versions grow then") {
  for (const auto kind : {Norm::own, Norm::synced}) {
    SingleDevice<Net<Cpu>> net(made<Net<Cpu>>(kind), 3, {.canonical_shares = 4});
    const auto versions = [&] {
      std::vector<std::uint64_t> out;
      for (const auto& named : nn::named_buffers<Cpu>(net.module())) out.push_back(named.buffer->version());
      return out;
    };
    const auto all_grow = [&](const auto& task) {
      const auto before = versions();
      task();
      const auto after = versions();
      return std::equal(before.begin(), before.end(), after.begin(), std::less<>());
    };
    REQUIRE(versions().size() == 3);
    CHECK(all_grow([&] { net(images(8, 5)); }));
    net.eval();
    const auto trained = versions();
    net(images(8, 5));
    CHECK(versions() == trained);
    net.train();
    CHECK(all_grow([&] { net(images(8, 6)); }));
    // One layer of a net in evaluation trains.
    net.eval();
    if (kind == Norm::own) net.module().norm->train();
    if (kind == Norm::synced) net.module().synced->train();
    CHECK(all_grow([&] { net(images(8, 6)); }));
  }
}

}  // namespace canonical_nets_test
