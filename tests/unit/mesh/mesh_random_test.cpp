// Random meshes, batches and loops, compared with one device; and ranks that are killed at random moments.
#include <sys/types.h>

#include <csignal>
#include <thread>
#include <unit/random_draw.hpp>

#include "mesh.hpp"

namespace mesh_random_test {

using namespace test::names;
using test::InMesh, test::MeshModel, test::MeshRun;
using mesh::Pipe, mesh::Data, mesh::Shard, mesh::Tensor, mesh::dynamic;
using Draw = test::DrawFrom<37>;
using Model = MeshModel<8>;

struct Program {
  mesh::Sizes sizes;
  bool shards;
  int micro_batches;
  MeshRun run;

  int ranks() const { return sizes.pipe * sizes.data * sizes.shard * sizes.tensor; }
  std::string text() const {
    return cat("Pipe<", sizes.pipe, ">, Data<", sizes.data, ">, Shard<", sizes.shard, ">, Tensor<", sizes.tensor, ">, ",
               micro_batches, " micro-batches", run.model_gives_loss ? ", the model gives the loss" : "",
               run.clips ? ", clips" : "", run.adds_up ? ", adds up" : "", "\n");
  }
};
Program program(std::uint64_t seed) {
  Draw draw(seed);
  Program p{{}, draw.chance(50), 1 + static_cast<int>(draw.below(4)), {}};
  const std::vector<int> few{1, 1, 2, 2, 3};
  do {
    p.sizes = {.pipe = draw.one_of(few), .data = draw.one_of(few), .shard = p.shards ? draw.one_of(few) : 1,
               .tensor = draw.chance(50) ? 2 : 1};
  } while (p.ranks() > 8 || p.ranks() == 1);
  p.run = {.steps = 4, .model_gives_loss = draw.chance(50), .clips = draw.chance(40), .adds_up = draw.chance(30),
           .from = draw.below(50)};
  return p;
}

template <class... Axes>
std::string in_mesh(const Program& p, const std::string& path) {
  return common_text(
      p.ranks(),
      [&](const World& world) {
        InMesh<Model, Axes...> rank(world, {.sizes = p.sizes, .micro_batches = p.micro_batches, .check_every = 1});
        optim::AdamW<Cpu> optimizer{rank.net.parameters(), test::mesh_adam};
        const auto losses = test::mesh_losses(rank.net, optimizer, p.run);
        io::save(rank.net, path);
        return test::text_of(losses);
      },
      30s);
}

TEST_CASE("mesh: programs drawn at random") {
  const auto path = cat("mesh_random_", getpid(), ".safetensors");
  test::for_seeds(
      16,
      [&](std::uint64_t seed) {
        const auto p = program(seed);
        INFO("seed " << seed << ": " << p.text());
        using Staged = Shard<dynamic, KeepParameters>;
        const auto text = p.shards ? in_mesh<Pipe<dynamic>, Data<dynamic>, Staged, Tensor<dynamic>>(p, path)
                                   : in_mesh<Pipe<dynamic>, Data<dynamic>, Tensor<dynamic>>(p, path);
        auto got = test::numbers_in(text);
        Model whole;
        io::load(whole, path);
        for (const double number : test::values(whole)) got.push_back(number);
        const auto expected = test::mesh_alone<Model>(p.run);
        REQUIRE(got.size() == expected.size());
        CHECK(distance(got, expected) < 1e-9);
      },
      [](std::uint64_t seed) { return program(seed).text(); });
  std::remove(path.c_str());
}

TEST_CASE("mesh: a rank that is killed at any moment ends all, by name") {
  test::for_seeds(
      24,
      [&](std::uint64_t seed) {
        Draw draw(seed + 1000);
        const int victim = static_cast<int>(draw.below(4));
        const auto after = std::chrono::microseconds(draw.below(30'000));
        test::Ranks ranks(4, [=](const World& world) -> std::string {
          InMesh<Model, Pipe<2>, Tensor<2>> rank(world);
          std::thread killer;
          if (world.rank == victim)
            killer = std::thread([=] {
              std::this_thread::sleep_for(after);
              raise(SIGKILL);
            });
          optim::AdamW<Cpu> optimizer{rank.net.parameters(), test::mesh_adam};
          for (std::uint32_t i = 0;; ++i) test::mesh_losses(rank.net, optimizer, {.steps = 1, .from = i});
        });
        for (int rank = 0; rank < 4; ++rank) {
          if (rank == victim) continue;
          const auto outcome = ranks.outcome(rank);
          INFO("seed " << seed << ", rank " << victim << " killed, rank " << rank << ": " << outcome.text);
          CHECK(outcome.text.find("rank ") != std::string::npos);
          CHECK(outcome.seconds < 3);
        }
      },
      [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
}

}  // namespace mesh_random_test
