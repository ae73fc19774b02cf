// Ranks along several axes, compared with one device: the same losses, parameters and files.
#include "mesh.hpp"

namespace mesh_test {

using namespace test::names;
using Catch::Matchers::StartsWith;
using test::in_mesh, test::mesh_alone, test::MeshModel, test::MeshRun;
using mesh::Pipe, mesh::Data, mesh::Shard, mesh::Tensor;

constexpr double near = 1e-9;
using Model = MeshModel<8>;

template <class... Axes>
void check(int ranks, const MeshRun& run = {}) {
  const auto expected = mesh_alone<Model>(run), got = in_mesh<Model, Axes...>(ranks, run);
  REQUIRE(expected.size() == got.size());
  CHECK(distance(got, expected) < near);
}

TEST_CASE("mesh: one axis") {
  check<Data<2>>(2);
  check<Shard<2>>(2);
  check<Tensor<2>>(2);
  check<Pipe<2>>(2);
  check<Data<mesh::rest>>(1);
}
TEST_CASE("mesh: Data and Tensor") { check<Data<2>, Tensor<2>>(4, {.model_gives_loss = false, .clips = true}); }
TEST_CASE("mesh: Shard and Tensor") { check<Shard<2>, Tensor<2>>(4, {.clips = true}); }
TEST_CASE("mesh: Pipe and Data") {
  check<Pipe<2>, Data<2>>(4, {.clips = true});
  check<Pipe<2>, Data<2>>(4, {.model_gives_loss = false});
}
TEST_CASE("mesh: Pipe and Tensor") { check<Pipe<2, GPipe>, Tensor<2>>(4, {.clips = true}); }
TEST_CASE("mesh: Data and Shard are groups with the same shards") { check<Data<2>, Shard<2>>(4, {.clips = true}); }
TEST_CASE("mesh: a pipeline's stages in shards") { check<Pipe<2>, Shard<2, KeepParameters>>(4, {.clips = true}); }
TEST_CASE("mesh: gradients of several batches add up") {
  check<Data<2>, Tensor<2>>(4, {.adds_up = true});
  check<Pipe<2>, Data<2>>(4, {.adds_up = true});
  check<Data<2>, Shard<2>>(4, {.adds_up = true});
}
TEST_CASE("mesh: eight ranks") {
  check<Pipe<2>, Data<2>, Tensor<2>>(8, {.steps = 6, .model_gives_loss = false});
  check<Data<2>, Shard<2>, Tensor<2>>(8, {.steps = 6, .clips = true});
  check<Pipe<2>, Data<mesh::rest>>(8, {.steps = 6});
}
TEST_CASE("mesh: parts of layers that differ in size") {
  using Uneven = MeshModel<9>;
  const auto expected = mesh_alone<Uneven>({});
  CHECK(distance(in_mesh<Uneven, Data<2>, Tensor<2>>(4, {}), expected) < near);
}

/// The common error of all ranks.
template <class Net, class Model>
std::string refusal(int ranks, const MeshOptions& options = {}) {
  return common_text(ranks, [&](const World& world) {
    auto all = comm::connect(world);
    return message_of<UsageError>([&] { Net net{test::make<Model>(), all, world, options, 3}; });
  });
}
struct Tied : MeshModel<8> {
  Tied() { blocks[2].up.weight = blocks[0].up.weight; }
};
TEST_CASE("mesh: what would not be one device's result is refused") {
  CHECK(refusal<Mesh<Model, Data<2>, Tensor<2>>, Model>(3) ==
        "Mesh: expected 4 ranks for its axes Data<2>, Tensor<2>, got 3");
  CHECK(refusal<Mesh<Model, Data<mesh::rest>, Tensor<2>>, Model>(3) ==
        "Mesh: expected 2 ranks, or a multiple, for its axes Data<rest>, Tensor<2>, got 3");
  using Dynamic = Mesh<Model, Pipe<mesh::dynamic>, Data<2>, Tensor<mesh::dynamic>>;
  CHECK(refusal<Dynamic, Model>(4, {.sizes = {.tensor = 2}}) == "nothing");
  CHECK(refusal<Dynamic, Model>(4, {.sizes = {.pipe = mesh::rest}}) == "nothing");
  CHECK(refusal<Dynamic, Model>(4) == "Mesh: expected 2 ranks for its axes Pipe<1>, Data<2>, Tensor<1>, got 4");
  CHECK_THAT((refusal<Dynamic, Model>(4, {.sizes = {.data = 2}})),
             Contains("MeshOptions::sizes has 2 ranks for an axis that the type lacks or does not declare as"));
  CHECK_THAT((refusal<Dynamic, Model>(4, {.sizes = {.pipe = -2}})),
             Contains("expected 1 or more, or mesh::rest, got -2"));
  CHECK_THAT((refusal<Dynamic, Model>(4, {.sizes = {.pipe = mesh::rest, .tensor = mesh::rest}})),
             Contains("expected one mesh::rest at most, got 2"));
  CHECK_THAT((refusal<Mesh<MeshModel<9>, Data<3>, Tensor<2>>, MeshModel<9>>(6)),
             Contains("Mesh: 3 shares of a batch and Tensor<2>: expected layers that Tensor divides evenly"));
  CHECK_THAT((refusal<Mesh<Tied, Pipe<2>, Data<3>>, Tied>(6)),
             Contains("Mesh: 3 shares of a batch and a pipeline: expected each parameter in one stage"));
  static_assert(mesh::valid<Pipe<2>, Data<2>, Shard<2>, Tensor<2>> && mesh::valid<Data<2>, Tensor<2>>);
  static_assert(!mesh::valid<Tensor<2>, Pipe<2>> && !mesh::valid<Data<2>, Data<2>> && !mesh::valid<>);
}

/// Runs up to step 8; saves after step 4, or resumes from there.
template <class Net>
std::string run(Net& net, const std::string& path, bool resumes) {
  optim::AdamW<Cpu> optimizer{net.parameters(), test::mesh_adam};
  if (resumes) CHECK(io::load_checkpoint(net, optimizer, path).step == 4);
  std::vector<double> losses;
  if (!resumes) {
    losses = test::mesh_losses(net, optimizer, {.steps = 4});
    io::save_checkpoint(net, optimizer, {.step = 4}, path);
  }
  for (const double loss : test::mesh_losses(net, optimizer, {.steps = 4, .from = 4})) losses.push_back(loss);
  return test::text_of(losses);
}
TEST_CASE("mesh: a checkpoint of one mesh goes on in another, and on one device") {
  const auto path = cat("mesh_", getpid(), ".checkpoint");
  const auto of_mesh = [&]<class... Axes>(int ranks, bool resumes, Axes...) {
    return test::numbers_in(common_text(ranks, [&](const World& world) {
      test::InMesh<Model, Axes...> rank(world);
      return run(rank.net, path, resumes);
    }));
  };
  const auto of_one = [&](bool resumes) {
    SingleDevice<Model> net{make<Model>(), 3};
    return test::numbers_in(run(net, path, resumes));
  };
  const auto all = of_one(false);
  REQUIRE(all.size() == 8);
  const std::vector<double> rest(all.begin() + 4, all.end());
  CHECK(distance(of_mesh(4, true, Pipe<2>(), Tensor<2>()), rest) < near);
  CHECK(distance(of_mesh(4, false, Shard<2>(), Tensor<2>()), all) < near);
  CHECK(distance(of_one(true), rest) < near);
  CHECK(distance(of_mesh(2, true, Shard<2>()), rest) < near);
  CHECK(distance(of_mesh(4, false, Pipe<2>(), Data<2>()), all) < near);
  CHECK(distance(of_mesh(4, true, Data<2>(), Tensor<2>()), rest) < near);
  CHECK(distance(of_one(true), rest) < near);
  std::remove(path.c_str());
}

TEST_CASE("mesh: a rank sends what the axes' formulas say") {
  using Net = test::InMesh<Model, Data<2>, Tensor<2>>;
  Ranks ranks(4, [](const World& world) -> std::string {
    Net rank(world, {.check_every = 0});
    std::size_t own = 0;
    for (const auto& named : rank.net.parameters()) own += named.parameter->size_bytes();
    const auto place = test::place_on_batch(rank.net);
    const auto step = [&](std::uint32_t i) {
      rank.net(test::share(numbers(8, 5, i), place), test::share(labels(8, 3, i), place)).backward();
    };
    for (std::uint32_t i = 0; i < 3; ++i) step(i);
    const auto sent = [&](trace::Traffic kind) { return trace::bytes_sent(world.rank, kind); };
    const auto gradients = sent(trace::Traffic::gradients), outputs = sent(trace::Traffic::outputs);
    step(3);
    // 2 (d - 1) / d of the rank's part of the model. For each of 3 blocks, an all-reduce of the output and one of the
    // gradient, 2 (t - 1) / t of 4 samples each.
    return cat(sent(trace::Traffic::gradients) - gradients == own, " ",
               sent(trace::Traffic::outputs) - outputs == 3 * 2 * 4 * 6 * sizeof(double), " ", own);
  });
  for (const auto& text : ranks.texts()) CHECK_THAT(text, StartsWith("true true"));
}

TEST_CASE("mesh: who throws ends all") {
  using Net = test::InMesh<Model, Pipe<2>, Data<2>>;
  Ranks ranks(4, [](const World& world) -> std::string {
    Net rank(world);
    const auto place = test::place_on_batch(rank.net);
    for (std::uint32_t i = 0; i < 3; ++i) {
      if (world.rank == 3 && i == 1) throw std::runtime_error("the data are odd");
      rank.net(test::share(numbers(8, 5, i), place), test::share(labels(8, 3, i), place)).backward();
    }
    return "went on";
  });
  for (int rank = 0; rank < 4; ++rank) CHECK(ranks.outcome(rank).text != "went on");
}

}  // namespace mesh_test
