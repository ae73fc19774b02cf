// A run that was stopped in the middle of an epoch and resumed ends with the bits of an undisturbed run, under every
// policy; and a run may resume under another policy.
#include <catch.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <memory>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace resume_test {

using namespace test::names;
using chorus_test::TemporaryFolder;

/// Dropout, and batch norm with buffers.
template <class D>
struct Net : nn::Module {
  nn::Linear<D, double> fc1{64, 12}, fc2{12, 10};
  nn::BatchNorm<D, double> norm{3};
  nn::Dropout dropout{0.3};
  CHORUS_MODULE(Net, fc1, norm, dropout, fc2)
  auto forward(const auto& x) const {
    const auto h = norm(reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}));
    return fc2(dropout(tanh(flatten(h))));
  }
};
using Model = Net<Cpu>;

Model seeded() {
  manual_seed(5);
  return {};
}

/// Trains from `from` (a file, or "") up to step `last`, and saves to `to`; returns the state as text. 3 epochs of 4
/// batches.
template <class Policy>
std::string run(Policy& net, bool adam, const std::string& from, std::int64_t last,
                const std::string& to) {
  const data::SyntheticImages images{26, 1, data::Split::train, {1, 8, 8}};
  data::DataLoader loader{
      images,
      net.sampler(images),
      {.batch = 7, .workers = 1, .transforms = {data::RandomCrop{1}, data::RandomHorizontalFlip{}}}};
  std::unique_ptr<optim::Optimizer<Cpu>> optimizer;
  if (adam)
    optimizer = std::make_unique<optim::Adam<Cpu>>(net.parameters(), optim::AdamOptions{.lr = 0.01});
  else
    optimizer = std::make_unique<optim::Sgd<Cpu>>(net.parameters(), optim::SgdOptions{.lr = 0.05, .momentum = 0.9});
  io::TrainingPosition position;
  if (!from.empty()) position = io::load_checkpoint(net, *optimizer, from);
  while (position.step < last) {
    loader.set_epoch(position.epoch);
    if (position.batch > 0) loader.skip(position.batch);
    for (auto& [x, y] : loader) {
      optimizer->zero_grad();
      auto pixels = Tensor<double, 2>::empty({x.size(0), 64});
      std::copy_n(x.data(), x.numel(), pixels.data());
      cross_entropy(net(pixels), y).backward();
      optim::clip_grad_norm(net.parameters(), 1);
      optimizer->step();
      ++position.batch;
      if (++position.step == last) break;
    }
    if (position.batch == loader.size()) position = {.epoch = position.epoch + 1, .batch = 0, .step = position.step};
  }
  if (!to.empty()) io::save_checkpoint(net, *optimizer, position, to);
  return io::parameters_sha256(net.module()) + cat(" passes ", net.forward_passes(), " step ", position.step);
}

/// `run` in a new net of a policy; returns the text of all ranks, and rank 0's running mean.
std::string run_under(const std::string& policy, int devices, bool adam, const std::string& from, std::int64_t last,
                      const std::string& to) {
  const auto with_buffers = [&](auto& net, const World& world) {
    auto text = run(net, adam, from, last, to);
    return text + (world.rank == 0 ? " mean " + test::text_of(net.module().norm.running_mean.value().to_vector()) : "");
  };
  if (policy == "single") {
    SingleDevice<Model> net{seeded(), 9};
    return with_buffers(net, {});
  }
  if (policy == "dp") {
    std::vector<int> ids{0, 1, 2};
    ids.resize(static_cast<std::size_t>(devices));
    DataParallel<Model> net{seeded(), {.device_ids = ids}, 9};
    return with_buffers(net, {});
  }
  const auto texts = Ranks(devices, [&](const World& world) {
                       auto communicator = comm::connect(world);
                       // Small buckets: rounding of sums over three ranks depends on their order.
                       DistributedDataParallel<Model> net{
                           seeded(), communicator, {.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 2e-3}, 9};
                       return with_buffers(net, world);
                     }).texts();
  for (const auto& text : texts)
    if (texts[0].find(text) != 0) return "ranks differ: " + texts[0] + " and " + text;
  return texts[0];
}

TEST_CASE("resume: stopped in the middle of an epoch or at its end, a run ends with the same bits") {
  struct Case {
    std::string policy;
    int devices;
    bool adam;
    std::int64_t stop;
  };
  const TemporaryFolder folder;
  for (const auto& [policy, devices, adam, stop] : {Case{"single", 1, false, 6},
                                                    {"single", 1, true, 1},
                                                    {"dp", 2, false, 3},
                                                    {"dp", 3, true, 6},
                                                    {"ddp", 1, false, 6},
                                                    {"ddp", 2, true, 6},
                                                    {"ddp", 3, false, 6},
                                                    {"ddp", 3, true, 1},
                                                    {"ddp", 3, false, 8}}) {
    INFO(policy << " on " << devices << (adam ? ", Adam" : ", SGD") << ", stopped after step " << stop);
    const auto whole = run_under(policy, devices, adam, "", 12, "");
    const auto part = run_under(policy, devices, adam, "", stop, folder / "run");
    CHECK(part != whole);
    CHECK(run_under(policy, devices, adam, folder / "run", 12, "") == whole);
    CHECK_THAT(whole, Catch::Matchers::Contains("passes 12 step 12"));
  }
}

TEST_CASE("resume: a run goes on under another policy and on another number of devices") {
  const TemporaryFolder folder;
  run_under("single", 1, false, "", 5, folder / "run");
  for (const auto& [policy, devices] : {std::pair<std::string, int>{"dp", 2}, {"ddp", 2}, {"ddp", 3}}) {
    INFO(policy << " on " << devices);
    const auto state = run_under(policy, devices, false, folder / "run", 9, folder / "next");
    CHECK_THAT(state, Catch::Matchers::Contains("passes 9 step 9"));
    CHECK_THAT(run_under("single", 1, false, folder / "next", 12, ""), Catch::Matchers::Contains("passes 12 step 12"));
  }
}

TEST_CASE("resume: parameters that were trained may be frozen when a run goes on") {
  const TemporaryFolder folder;
  run_under("ddp", 2, false, "", 5, folder / "run");  // its order of parameters is the learned one
  SingleDevice<Model> single{seeded(), 9};
  io::load(single.module(), folder / "run");
  const auto freeze = [](Model& model) {
    model.fc1.bias.set_requires_grad(false);
    model.norm.weight.set_requires_grad(false);
  };
  freeze(single.module());
  const auto x = numbers(6, 64, 1);
  const auto y = labels(6, 10, 1);
  single.eval();  // running statistics: all shares are normalised in the same way
  cross_entropy(single(x), y).backward();
  const auto text = common_text(2, [&](const World& world) {
    auto model = seeded();
    freeze(model);
    auto communicator = comm::connect(world);
    DistributedDataParallel<Model> net{std::move(model), communicator, {}, 9};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
    io::load_checkpoint(net, optimizer, folder / "run");
    net.eval();
    cross_entropy(net(test::share(x, world)), test::share(y, world)).backward();
    return test::text_of(test::gradients(net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

}  // namespace resume_test
