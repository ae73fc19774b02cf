// Ranks along several axes beside one device: the same losses, parameters and files.
#include "mesh.hpp"

namespace mesh_test {

using namespace test::names;
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
}  // namespace mesh_test
