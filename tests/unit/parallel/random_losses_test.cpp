// Random losses of means, sums, class weights, ignored tokens, products and functions of them, with uneven and empty
// shares: each policy takes one device's step, or refuses the loss with a message.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/global_batch.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/single_device.hpp>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include <unit/parallel/ranks.hpp>

namespace random_losses_test {

using namespace test::names;
using Labels = Tensor<std::int64_t, 1>;
using Rows = Tensor<double, 2>;
using Loss = Variable<double, 0>;

/// The structure of a loss, which depends only on the seed and is the same on all ranks.
struct Spec {
  std::uint32_t seed = 0;
  bool of_whole_batch = false;  ///< non-linear terms use of_global_batch
  double counted = 1;           ///< labels in the whole batch that are not ignored
};

struct Batch {
  Rows x, target;
  Labels labels;
  Batch rows(Index begin, Index end) const {
    return {contiguous(x.slice(0, begin, end)), contiguous(target.slice(0, begin, end)),
            contiguous(labels.slice(0, begin, end))};
  }
};

Batch batch_of(std::uint32_t seed, Index size) {
  Batch batch{numbers(size, 3, seed), numbers(size, 4, seed + 1), Labels::empty({size})};
  std::mt19937 random(seed);
  for (Index i = 0; i < size; ++i) batch.labels.data()[i] = random() % 3 == 0 ? -100 : static_cast<int>(random() % 4);
  return batch;
}

/// `whole(x)`: x as a mean or sum over the global batch; `w`: a parameter.
template <class Y, class W, class Whole>
Loss loss_of(const Spec& spec, const Y& y, const Labels& labels, const Rows& target, const W& w, const Whole& whole) {
  std::mt19937 random(1000 + spec.seed);
  const auto number = [&](unsigned below) { return static_cast<unsigned>(random() % below); };
  const auto device = value_of(y).device();
  const auto classes = to_device(Tensor<double, 1>::from({1, 5, 0.5, 2}, {4}), device);
  const auto steep = to_device(Tensor<double, 1>::from({1, -2, 0.5, 3}, {4}), device);
  const auto mask = Tensor<double, 1>::empty({labels.numel()}, device);
  for (Index i = 0; i < mask.numel(); ++i) mask.data()[i] = labels.data()[i] >= 0 ? 0.5 : 0;
  const auto some = [&](const auto& x) {
    if constexpr (AnyVariable<decltype(x)>) return spec.of_whole_batch ? whole(x) : x;
  };
  const auto term = [&]() -> Loss {
    switch (number(22)) {
      case 0: return mean(square(y - target));
      case 1: return mse_loss(y, target);
      case 2: return mse_loss(y, target, Reduction::sum);
      case 3: case 4: return cross_entropy(y, labels);
      case 5: return cross_entropy(y, labels, classes);
      case 6: return sum(square(y));
      case 7: return cross_entropy(y, labels, {.reduction = Reduction::sum});
      case 8: return sum(cross_entropy_per_sample(y, labels) * mask) / clamp(sum(mask), 1e-3);
      case 9: return sum(mean(y, 0) * steep);
      case 10: return sum(cross_entropy_per_sample(y, labels)) / (100.0 * spec.counted);
      case 11: return cross_entropy(y, labels, {.mean_over = spec.counted});
      case 12: return sum(square(w)) * 0.1;
      case 13: return mean(square(w)) + sum(square(w - 0.5)) * 0.01;
      case 14: return sum(square(w - Rows::full(value_of(w).shape(), 0.25, device))) * 0.1;
      case 15: return mean(mean(y, 1)) - mean(sum(square(y), 0)) * 0.01;
      case 16: return sum(mean(w, 1)) * mse_loss(y, target);
      case 17: return sqrt(some(mean(square(y - target))) + 1e-3);
      case 18: return square(some(mean(y)));
      case 19: return some(mean(y)) * some(cross_entropy(y, labels));
      case 20: return mean(square(y - some(mean(y))));
      default: return sum(square(some(mean(y, 0)) - 0.5));
    }
  };
  Loss total = 0.125 * mse_loss(y, target);  // so that all parameters have a gradient
  if (number(3) != 0) total = total + term();
  else total = total * 2.0;
  for (unsigned more = number(3); more > 0; --more) {
    const double factor = 0.25 + number(4);
    total = number(2) == 0 ? total + factor * term() : total - term() / (7 * factor) + 0.5;
  }
  return number(3) == 0 ? 0.5 * total : total;
}

struct Body : nn::Module {
  nn::Linear<Cpu, double> fc{3, 5};
  CHORUS_MODULE(Body, fc)
  auto forward(const auto& x) const { return tanh(fc(x)); }
};
struct Head : nn::Module {
  nn::Linear<Cpu, double> fc{5, 4};
  CHORUS_MODULE(Head, fc)
  auto forward(const auto& x) const { return fc(x); }
  auto forward(const auto& x, const Labels& labels, const Rows& target, const Spec& spec) const {
    return loss_of(spec, fc(x), labels, target, fc.weight, [](const auto& value) { return of_global_batch(value); });
  }
};
struct Model : nn::Module {
  Body body;
  Head head;
  CHORUS_MODULE(Model, body, head)
  CHORUS_PIPELINE(body, head)
};

/// The parameters after a step, or the error that refuses the loss.
struct Outcome {
  std::vector<double> values;
  std::string refused;
};

template <class Net>
Outcome outcome_of(Net& net, const Spec& spec, const Batch& batch, bool in_model) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.5}};
  Outcome out;
  try {
    optimizer.zero_grad();
    const auto loss = [&]() -> Loss {
      if (in_model) return net.mean_loss(net(batch.x, batch.labels, batch_axis<0>(batch.target), spec));
      const auto y = net(batch.x);
      return loss_of(spec, y, batch.labels, batch.target, y, [&](const auto& x) { return of_global_batch(net, x); });
    };
    loss().backward();
    optimizer.step();
  } catch (const UsageError& error) {
    out.refused = error.what();
    return out;
  }
  if constexpr (requires { net.communicator(); }) net.eval();
  net.gathered([&](auto& model) { out.values = test::values(model); });
  return out;
}

struct Cut {
  Index size;
  std::vector<Index> begins;  // of the ranks' shares, and the end
};
Cut cut_of(std::uint32_t seed, int ranks) {
  std::mt19937 random(77 + seed);
  Cut cut{1 + static_cast<Index>(random() % 9), {0}};
  for (int i = 1; i < ranks; ++i) cut.begins.push_back(static_cast<Index>(random()) % (cut.size + 1));
  cut.begins.push_back(cut.size);
  std::sort(cut.begins.begin(), cut.begins.end());
  return cut;
}
Spec spec_of(std::uint32_t seed, const Batch& batch) {
  Spec spec{seed, seed % 2 == 0, 0};
  for (Index i = 0; i < batch.labels.numel(); ++i) spec.counted += batch.labels.data()[i] >= 0;
  spec.counted = std::max(spec.counted, 1.0);
  return spec;
}

/// How many losses matched one device, and the beginnings of the errors that refused the others.
struct Tally {
  int right = 0, refused = 0;
  std::map<std::string, int> words;
  void count(std::uint32_t seed, const char* where, const Outcome& expected, const Outcome& got) {
    INFO(where << ", seed " << seed << ": " << got.refused);
    if (!got.refused.empty()) {
      ++refused;
      ++words[got.refused.substr(0, 60)];
      return;
    }
    double apart = got.values.size() == expected.values.size() ? 0 : INFINITY;
    for (std::size_t i = 0; i < got.values.size() && apart < INFINITY; ++i)
      apart = std::max(apart, std::isfinite(got.values[i]) ? std::abs(got.values[i] - expected.values[i]) : INFINITY);
    CHECK(apart < 1e-10);
    if (apart < 1e-10) ++right;
  }
};

Outcome one_device(const Spec& spec, const Batch& batch, bool in_model) {
  SingleDevice<Model> net{make<Model>(), 3};
  return outcome_of(net, spec, batch, in_model);
}

/// `make_net(communicator, other)` on ranks that are threads.
template <class MakeNet>
Tally on_threads(const char* name, int ranks, std::uint32_t seeds, const MakeNet& make_net) {
  Tally tally;
  for (std::uint32_t seed = 0; seed < seeds; ++seed)
    for (const bool in_model : {false, true}) {
      auto communicators = comm::thread_group(ranks, 20s), others = comm::thread_group(ranks, 20s);
      const auto cut = cut_of(seed, ranks);
      const auto batch = batch_of(seed, cut.size);
      const auto spec = spec_of(seed, batch);
      std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
      {
        std::vector<std::jthread> threads;
        for (std::size_t rank = 0; rank < outcomes.size(); ++rank)
          threads.emplace_back([&, rank] {
            try {
              auto net = make_net(communicators[rank], others[rank]);
              outcomes[rank] = outcome_of(*net, spec, batch.rows(cut.begins[rank], cut.begins[rank + 1]), in_model);
            } catch (const std::exception& error) {
              outcomes[rank] = {{INFINITY}, ""};
              std::fprintf(stderr, "%s, seed %u, rank %zu: %s\n", name, seed, rank, error.what());
            }
          });
      }
      for (const auto& outcome : outcomes) CHECK(outcome.refused.empty() == outcomes[0].refused.empty());
      tally.count(seed, in_model ? "in the model" : name, one_device(spec, batch, in_model), outcomes[0]);
    }
  return tally;
}

TEST_CASE("random losses: DistributedDataParallel's steps are one device's") {
  for (const int ranks : {2, 3}) {
    const auto tally = on_threads("ddp", ranks, 200, [](auto& communicator, auto&) {
      return std::make_unique<DistributedDataParallel<Model>>(make<Model>(), communicator,
                                                              DistributedDataParallelOptions{}, 3);
    });
    CHECK(tally.right > 280);
    CHECK(tally.refused > 20);
    for (const auto& [words, count] : tally.words) UNSCOPED_INFO(count << ": " << words);
    CHECK(tally.right + tally.refused == 400);
  }
}

TEST_CASE("random losses: those of a FullyShardedDataParallel and a ParameterServer") {
  const auto fsdp = on_threads("fsdp", 2, 60, [](auto& communicator, auto& gathers) {
    return std::make_unique<FullyShardedDataParallel<Model>>(make<Model>(), communicator, gathers,
                                                             FullyShardedDataParallelOptions{}, 3);
  });
  CHECK(fsdp.right > 80);
  const auto server = on_threads("parameter server", 2, 60, [](auto& communicator, auto&) {
    return std::make_unique<ParameterServer<Model>>(make<Model>(), communicator, 3);
  });
  CHECK(server.right > 80);
}

TEST_CASE("random losses: DataParallel's, of gathered outputs and in the model") {
  Tally tally;
  for (std::uint32_t seed = 0; seed < 200; ++seed)
    for (const bool in_model : {false, true}) {
      const auto batch = batch_of(seed, cut_of(seed, 2).size);
      const auto spec = spec_of(seed, batch);
      DataParallel<Model> net{make<Model>(), {.device_ids = {0, 1, 2}}, 3};
      tally.count(seed, in_model ? "dp, in the model" : "dp", one_device(spec, batch, in_model),
                  outcome_of(net, spec, batch, in_model));
    }
  CHECK(tally.right > 340);
}

TEST_CASE("random losses: a Pipeline's, whose micro-batches have uneven shares of what counts") {
  Tally tally;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const auto batch = batch_of(seed, cut_of(seed, 2).size);
    const auto spec = spec_of(seed, batch);
    const auto texts = Ranks(2, [&](const World& world) {
                         auto communicator = comm::connect(world);
                         Pipeline<Model> net(make<Model>(), communicator, world, {.micro_batches = 3}, 3);
                         const auto outcome = outcome_of(net, spec, batch, true);
                         return outcome.refused.empty() ? test::text_of(outcome.values) : "refused: " + outcome.refused;
                       }).texts();
    // The last stage refuses a loss; the first one gets an error that names it.
    const bool refused = texts[1].starts_with("refused");
    INFO(texts[0].substr(0, 300));
    CHECK(refused == (texts[0].find("rank 1, threw: Pipeline: ") != texts[0].npos));
    tally.count(seed, "pipeline", one_device(spec, batch, true),
                refused ? Outcome{{}, texts[1]} : Outcome{test::numbers_in(texts[0]), ""});
  }
  for (const auto& [words, count] : tally.words) UNSCOPED_INFO(count << ": " << words);
  CHECK(tally.right > 30);
}

}  // namespace random_losses_test
