// Checkpoints of runs with canonical shares: they resume on any number of devices with the same bits, and not with
// another number of shares.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/same_bits.hpp>

#include <unit/io/files.hpp>
#include <unit/message_of.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_canonical_shares_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Model = test::Smooth<Cpu>;

constexpr Index batch = 13;

/// This net's samples of a batch, as its sampler selects them.
template <class Net, class T, int Rank>
Tensor<T, Rank> own_rows(const Net& net, const Tensor<T, Rank>& whole) {
  struct Rows {
    Index size() const { return batch; }
  };
  const auto sampler = net.sampler(Rows{}, {.shuffle = false});
  const Index begin = sampler.share_begin(0, batch);
  return whole.slice(0, begin, begin + static_cast<Index>(sampler.share(0, batch).size()));
}

template <class Net>
void train(Net& net, optim::Optimizer<Cpu>& optimizer, std::int64_t begin, std::int64_t end) {
  for (auto number = static_cast<std::uint32_t>(begin); number < end; ++number) {
    optimizer.zero_grad();
    cross_entropy(net(own_rows(net, numbers(batch, 5, number))), own_rows(net, labels(batch, 3, number))).backward();
    optimizer.step();
  }
}

/// Steps [begin, end), starting from the file `from` if there is one.
template <class Net>
std::string run(Net& net, const std::string& from, std::int64_t end, const std::string& to = "") {
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  io::TrainingPosition position;
  if (!from.empty()) position = io::load_checkpoint(net, optimizer, from);
  train(net, optimizer, position.step, end);
  if (!to.empty()) io::save_checkpoint(net, optimizer, {.step = end}, to);
  return test::text_of(test::values(net.module()));
}
/// `body(net)` for a net with so many shares, or without shares.
template <class Body>
std::string with_net(int shares, const Body& body) {
  if (shares == 0) {
    SingleDevice<Model> net(make<Model>(), 3);
    return body(net);
  }
  SingleDevice<SameBits<Model>> net(SameBits{make<Model>(), shares}, 3);
  return body(net);
}
std::string single(int shares, const std::string& from, std::int64_t end, const std::string& to = "") {
  return with_net(shares, [&](auto& net) { return run(net, from, end, to); });
}
std::string ranks(int count, int shares, const std::string& from, std::int64_t end) {
  return common_text(count, [&](const World& world) {
    Distributed<SameBits<Model>> rank(world, {}, SameBits{make<Model>(), shares});
    return run(rank.net, from, end);
  });
}

TEST_CASE("checkpoints: with canonical shares a run goes on under any policy, with the same bits") {
  const TemporaryFolder folder;
  const auto undisturbed = single(4, "", 5);
  single(4, "", 2, folder / "run");
  CHECK(io::SafetensorsReader(folder / "run").metadata().at("training/canonical_shares") == "4");
  CHECK(single(4, folder / "run", 5) == undisturbed);
  CHECK(ranks(2, 4, folder / "run", 5) == undisturbed);
  CHECK(ranks(3, 4, folder / "run", 5) == undisturbed);
  CHECK(single(0, "", 5) != undisturbed);
}

TEST_CASE("checkpoints: a run with other canonical shares is refused, by all ranks, and nothing changes") {
  const TemporaryFolder folder;
  single(4, "", 2, folder / "of_4");
  single(0, "", 2, folder / "of_none");
  CHECK_FALSE(io::SafetensorsReader(folder / "of_none").metadata().contains("training/canonical_shares"));
  const auto refusal = [&](auto& net, const char* name) {
    optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    const auto before = test::values(net.module());
    const auto message = message_of<UsageError>([&] { io::load_checkpoint(net, optimizer, folder / name); });
    CHECK(test::values(net.module()) == before);
    return message;
  };
  const auto of_single = [&](int shares, const char* name) {
    return with_net(shares, [&](auto& net) { return refusal(net, name); });
  };
  CHECK_THAT(of_single(8, "of_4"), Contains("resuming from ") && Contains("the run's canonical_shares, 4, got 8:") &&
                                       Contains("io::load loads the model alone"));
  CHECK_THAT(of_single(0, "of_4"), Contains("canonical_shares, 4, got 0 (none):"));
  CHECK_THAT(of_single(4, "of_none"), Contains("canonical_shares, 0 (none), got 4:"));
  CHECK_THAT(common_text(2,
                         [&](const World& world) {
                           Distributed<SameBits<Model>> rank(world, {}, SameBits{make<Model>(), 8});
                           return refusal(rank.net, "of_4") + refusal(rank.net, "of_none");
                         }),
             Contains("canonical_shares, 4, got 8:") && Contains("canonical_shares, 0 (none), got 8:"));

  // Weights alone can be loaded by any net.
  SingleDevice<SameBits<Model>> net(SameBits{make<Model>(), 8}, 3);
  io::load(net.module(), folder / "of_4");
  CHECK(test::text_of(test::values(net.module())) == single(4, "", 2));
}

TEST_CASE("checkpoints: a number of canonical shares that no run can have had is a fault of the file") {
  const TemporaryFolder folder;
  SingleDevice<SameBits<Model, 4>> net(make<Model>(), 3);
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  io::save_checkpoint(net, optimizer, {}, folder / "run");
  const io::SafetensorsReader file(folder / "run");
  std::vector<std::vector<std::byte>> data;
  std::vector<io::TensorView> tensors;
  for (const auto& entry : file.entries()) {
    file.read(entry, data.emplace_back(entry.bytes));
    tensors.push_back({entry.name, entry.dtype, entry.shape, data.back()});
  }
  for (const auto* const wrong : {"65", "-1", "four", "4 ", ""}) {
    auto metadata = file.metadata();
    metadata["training/canonical_shares"] = wrong;
    io::write_safetensors(folder / "wrong", tensors, metadata);
    CHECK_THAT(message_of<FileError>([&] { io::load_checkpoint(net, optimizer, folder / "wrong"); }),
               Contains("training/canonical_shares") && Contains("expected a number from 0 to 64"));
  }
}

}  // namespace checkpoint_canonical_shares_test
