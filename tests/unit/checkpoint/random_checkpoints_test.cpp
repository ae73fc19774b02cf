/// Checkpoints with bytes changed at random: either a run resumes from their contents, or there is a FileError with the
/// path and nothing has changed. CHORUS_RANDOM_SEEDS=FIRST-LAST tries other seeds.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/schedules.hpp>

#include <unit/io/files.hpp>
#include <unit/random_bytes.hpp>
#include <unit/parallel/ranks.hpp>

namespace random_checkpoints_test {

using namespace test::names;
using namespace chorus_test;
using Draw = test::DrawFrom<0x636b7074>;
using Model = test::Normed<Cpu>;

/// A run of one rank, with everything that a checkpoint can hold.
struct Training {
  test::Distributed<Model> rank{World{}};
  optim::Adam<Cpu> optimizer{rank.net.parameters(), {.lr = 0.1}};
  optim::GradScaler<Cpu> scaler{rank.net};
  optim::ReduceOnPlateau plateau{optimizer};

  void step() {
    optimizer.zero_grad();
    scaler.scale(cross_entropy(rank.net(test::numbers(8, 5, 0)), test::labels(8, 3, 0))).backward();
    scaler.step(optimizer);
    plateau.step(1);
  }
  void save(const std::string& path) { io::save_checkpoint(rank.net, optimizer, {1, 2, 3}, path, scaler, plateau); }
  io::TrainingPosition load(const std::string& path) {
    return io::load_checkpoint(rank.net, optimizer, path, scaler, plateau);
  }
  /// Everything that a checkpoint holds.
  std::string fingerprint() {
    std::string out;
    const auto add = [&](const void* data, std::size_t bytes) { out.append(static_cast<const char*>(data), bytes); };
    for (const auto& place : io::detail::model_places<Cpu>(rank.net.module()))
      add(place.data, static_cast<std::size_t>(numel(place.shape)) * size_of(place.dtype));
    for (const auto& tensor : optimizer.state())
      add(tensor.data, static_cast<std::size_t>(numel(tensor.shape)) * size_of(tensor.dtype));
    const auto numbers = scaler.kept();
    const auto more = plateau.kept();
    add(numbers.data(), sizeof numbers);
    add(more.data(), sizeof more);
    for (const auto& name : rank.net.parameter_order()) out += name;
    return out + cat(rank.net.forward_passes());
  }
};

TEST_CASE("random changes to a checkpoint: a run goes on, or nothing has changed") {
  const TemporaryFolder folder;
  Training training;
  for (int i = 0; i < 3; ++i) training.step();
  training.save(folder / "good");
  const auto good = get(folder / "good");
  const auto header =
      8 + std::size_t{std::bit_cast<std::uint64_t>(*reinterpret_cast<const std::array<char, 8>*>(good.data()))};
  const auto before = training.fingerprint();
  int taken = 0, refused = 0;
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    auto head = good.substr(8, header - 8), data = good.substr(header);
    if (draw.chance(70)) head = test::changed(std::move(head), draw);
    if (draw.chance(50)) data = test::changed(std::move(data), draw);
    data.resize(good.size() - header);  // another length is refused at once
    put(folder / "FILE", safetensors_file(head) + data);
    const auto refuse = [&](const Error& error) {
      ++refused;
      if (std::string_view(error.what()).find("FILE") == std::string::npos)
        FAIL_CHECK("seed " << seed << ": " << error.what());
      if (training.fingerprint() != before) FAIL_CHECK("seed " << seed << " changed something: " << error.what());
    };
    bool loaded = false;
    try {
      const auto position = training.load(folder / "FILE");
      loaded = true;
      CHECK((position.epoch >= 0 && position.batch >= 0 && position.step >= 0));
    } catch (const FileError& error) {
      refuse(error);
    } catch (const UsageError& error) {  // another seed
      refuse(error);
    }
    if (!loaded) return;
    ++taken;
    training.step();
    training.load(folder / "good");
    if (training.fingerprint() != before) FAIL_CHECK("seed " << seed << " leaves something behind");
  };
  test::for_seeds(2000, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  if (std::getenv("CHORUS_RANDOM_SEEDS")) return;
  CHECK(taken > 100);
  CHECK(refused > 100);
}

}  // namespace random_checkpoints_test
