// State of DistributedDataParallel that a resumed run needs besides numbers: which parameters ranks have stepped by
// themselves.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <typeinfo>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_buckets_test {

using namespace test::names;
using chorus_test::TemporaryFolder;

/// A pass may skip its middle layer.
struct Gated : nn::Module {
  nn::Linear<Cpu, double> in{5, 14}, middle{14, 14}, out{14, 3};
  CHORUS_MODULE(Gated, in, middle, out)
  auto forward(const auto& x, bool open) const {
    const auto h = tanh(in(x));
    return out(open ? tanh(middle(h)) + h : h * 1.0);
  }
};
const DistributedDataParallelOptions unused{.first_bucket_cap_mb = 1e-3,
                                            .bucket_cap_mb = 2e-3,
                                            .find_unused_parameters = true};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += name + " ";
  return text;
}

/// Steps `from` to `last`. The middle layer is used in steps that are no multiple of 3, and its weight is frozen in the
/// steps in `frozen`. Returns each rank's result.
template <class Hook>
std::vector<std::string> train(const Hook& hook, const std::string& from, std::int64_t last, const std::string& to,
                               const std::vector<std::int64_t>& frozen = {}) {
  return Ranks(3,
               [&](const World& world) -> std::string {
                 Distributed<Gated, Hook> rank(world, unused, make<Gated>(), hook);
                 auto& net = rank.net;
                 optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
                 io::TrainingPosition at;
                 if (!from.empty()) at = io::load_checkpoint(net, optimizer, from);
                 for (; at.step < last; ++at.step) {
                   const auto key = static_cast<std::uint32_t>(at.step);
                   net.module().middle.weight.set_requires_grad(std::find(frozen.begin(), frozen.end(), at.step) ==
                                                                frozen.end());
                   optimizer.zero_grad();
                   cross_entropy(net(test::share(numbers(7, 5, key), world), at.step % 3 != 0),
                                 test::share(labels(7, 3, key), world))
                       .backward();
                   optimizer.step();
                 }
                 if (!to.empty()) io::save_checkpoint(net, optimizer, at, to);
                 std::string text = test::text_of(test::values(net.module()));
                 if constexpr (requires { detail::access_to(net).parameters_apart(); }) text += "apart: " + listed(detail::access_to(net).parameters_apart());
                 if constexpr (requires { hook.start_powersgd_iter; }) text += cat("steps: ", net.hook().steps);
                 return text;
               })
      .texts();
}

template <class Hook>
void check_resumed(const Hook& hook, const std::vector<std::int64_t>& frozen = {}) {
  const TemporaryFolder folder;
  const auto whole = train(hook, "", 7, "", frozen);
  for (const std::int64_t at : {1, 2, 3, 4, 5, 6}) {
    INFO(typeid(Hook).name() << ", stopped after step " << at);
    train(hook, "", at, folder / "run", frozen);
    CHECK((train(hook, folder / "run", 7, "", frozen) == whole));  // a failure prints only a bool
  }
}

TEST_CASE("checkpoints: a run that leaves parameters out in some passes goes on with the same bits") {
  check_resumed(AllReduce{});
  check_resumed(Bf16Compress{});
  check_resumed(PowerSgd{.start_powersgd_iter = 3});
}

TEST_CASE("checkpoints: ranks that read different files say so, all of them, and nothing has changed") {
  const TemporaryFolder folder;
  train(AllReduce{}, "", 2, folder / "run");
  train(AllReduce{}, "", 4, folder / "later");
  train(AllReduce{}, "", 2, folder / "other", {0, 1});
  for (const std::string wrong : {"later", "other"}) {
    const auto text = common_text(3, [&](const World& world) {
      Distributed<Gated> rank(world, unused);
      optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1, .momentum = 0.9}};
      const auto before = test::values(rank.net.module());
      const auto path = folder / (world.rank == 1 ? wrong : "run");
      const auto why = message_of<FileError>([&] { io::load_checkpoint(rank.net, optimizer, path); });
      return test::values(rank.net.module()) == before ? why.substr(why.find(": ")) : "changed";
    });
    CHECK(text == cat(": rank 1 has a different file, of step ", wrong == "later" ? 4 : 2,
                      ", than rank 0, of step 2: all ranks must read the same file"));
  }
}

TEST_CASE("checkpoints: of post-local sgd, a frozen parameter keeps its bits, and a stepped one is averaged") {
  const PostLocalSgd hook{.start_local_sgd_iter = 0, .period = 4};
  check_resumed(hook, {0, 1, 2, 3, 4, 5, 6});
  check_resumed(hook, {2, 3, 4, 5});
  const auto texts = train(hook, "", 3, "", {1, 2, 3});
  CHECK_THAT(texts[0], Contains("apart: ") && Contains("middle.weight"));
  CHECK_THAT(train(hook, "", 3, "", {0, 1, 2})[0], !Contains("middle.weight"));
}

}  // namespace checkpoint_buckets_test
