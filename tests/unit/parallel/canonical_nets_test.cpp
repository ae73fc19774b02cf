// Canonical shares with nets that compute in bf16, inputs with gradients, and several nets; buffers, in training and in
// evaluation.
#include <catch.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "canonical_programs.hpp"

namespace canonical_nets_test {

using namespace test::names;
using test::canonical::digits, test::canonical::images, test::canonical::numbers_of, test::canonical::Part,
    test::canonical::in_shares, test::canonical::Who;

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

/// The result of `body(net, part)` on each rank, under a policy with `shares` shares.
template <class Model, class Body>
std::vector<std::string> texts(Norm kind, Who who, int devices, int shares, const Body& body) {
  return Ranks(who == Who::ddp ? devices : 1, [&](const World& world) -> std::string {
           alarm(60);
           auto model = made<Model>(kind);
           if (who == Who::single) {
             SingleDevice<SameBits<Model>> net(SameBits{std::move(model), shares}, 3);
             return body(net, Part{shares});
           }
           if (who == Who::dp) {
             std::vector<int> ids;
             for (int i = 0; i < devices; ++i) ids.push_back(i);
             DataParallel<SameBits<Model>> net(SameBits{std::move(model), shares}, {.device_ids = ids}, 3);
             return body(net, Part{shares});
           }
           auto communicator = comm::connect(world);
           DistributedDataParallel<SameBits<Model>> net(SameBits{std::move(model), shares}, communicator, {}, 3);
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

TEST_CASE("canonical nets: an input gets the gradient of its samples, the same bits on any number of devices") {
  // One text for all ranks, although each has only the gradients of its own samples.
  const auto pass = [](Index size) {
    return [size](auto& net, const Part& part) {
      std::string text;
      const Variable<float, 4> x(part(images(size, 5)), true);
      for (int again = 0; again < 2; ++again)  // gradients accumulate
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

/// Takes a scalar in addition to the samples.
template <class D>
struct Scaled : nn::Module {
  nn::Linear<D> fc{36, 3};
  CHORUS_MODULE(Scaled, fc)
  explicit Scaled(const Net<D>&) {}
  auto forward(const auto& x, const auto& scale) const { return fc(flatten(x)) * scale; }
};

TEST_CASE("canonical nets: an input without samples has its gradient where one process has all shares, else none") {
  const auto pass = [](auto& net, const Part& part) -> std::string {
    const Variable<float, 0> scale(Tensor<float, 0>::full({}, 1.5F), true);
    const auto x = part(images(9, 5));
    {
      const NoGrad no_grad;
      net(x, scale);
    }
    const auto classes = part(labels(9, 3, 5));
    try {
      cross_entropy(net(x, scale), classes).backward();
    } catch (const UsageError& error) {
      return error.what();
    }
    return digits(scale.grad().item());
  };
  using Model = Scaled<Cpu>;
  const auto expected = texts<Model>(Norm::none, Who::single, 1, 4, pass)[0];
  REQUIRE(test::numbers_in(expected).size() == 1);
  CHECK(texts<Model>(Norm::none, Who::dp, 3, 4, pass)[0] == expected);
  CHECK(texts<Model>(Norm::none, Who::ddp, 1, 4, pass)[0] == expected);
  for (const auto& text : texts<Model>(Norm::none, Who::ddp, 2, 4, pass))
    CHECK(text ==
          "canonical shares: an input without samples, of shape [], requires a gradient, which each process has in "
          "part: make it a parameter of the model");
}

TEST_CASE("canonical nets: what shares write into buffers is kept apart, but not where no layer trains") {
  nn::BatchNorm2d<Cpu> norm(4);
  const auto named = nn::named_buffers<Cpu>(norm);
  same_bits::ShareBuffers<Cpu> buffers(named);
  auto* const count = static_cast<std::int64_t*>(norm.num_batches_tracked.value().data());
  const auto after = [&](bool writes) {
    *count = 5;
    buffers.begin_pass(2, writes);
    for (std::size_t share = 0; share < 2; ++share) {
      buffers.enter(share);
      *count += 10 + static_cast<std::int64_t>(share);
      buffers.leave(share);
    }
    buffers.end_pass();
    return *count;
  };
  CHECK(after(true) == 15);
  CHECK(after(false) == 26);
  CHECK(after(true) == 15);
}

TEST_CASE("canonical nets: shares write buffers in training only, and their versions grow then") {
  for (const auto& [kind, shares] :
       {std::pair(Norm::own, 0), std::pair(Norm::own, 4), std::pair(Norm::synced, 0), std::pair(Norm::synced, 4)}) {
    in_shares(made<Net<Cpu>>(kind), shares, [&, kind = kind]<class M>(M model) {
      SingleDevice<M> net(std::move(model), 3);
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
      // In a net that is in evaluation, one layer is in training.
      net.eval();
      if (kind == Norm::own) net.module().norm->train();
      if (kind == Norm::synced) net.module().synced->train();
      CHECK(all_grow([&] { net(images(8, 6)); }));
    });
  }
}

}  // namespace canonical_nets_test
