// Ranks that share tokens, as an axis of a mesh.
#include <chorus/io/load_model.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/parallel/mesh.hpp>

#include "texts.hpp"

namespace sequence_mesh_test {

using namespace test::names;
using mesh::Pipe, mesh::Data, mesh::Sequence, mesh::Shard, mesh::Tensor;
using test::Text, test::Texts;

struct Ten {
  Index size() const { return 10; }
};

/// This rank's share of the samples. Places of a mesh's sequence axis count as data.
template <int sequence, class Net>
Texts share_of(const Net& net, std::uint32_t number, Index samples) {
  Texts batch(number, samples);
  World place;
  place.size = net.shares();
  place.rank = net.place()[1] / sequence * net.sizes()[2] + net.place()[2];
  check<Error>(net.sampler(Ten{}).share_begin(0, 10) ==
                   share_begin(10, static_cast<std::size_t>(place.size), static_cast<std::size_t>(place.rank)),
               "the sampler gives another share");
  batch.tokens = test::share(batch.tokens, place);
  batch.targets = test::share(batch.targets, place);
  return batch;
}

TEST_CASE("mesh: Sequence with Pipe, Data, Shard and Tensor is one device") {
  const auto expected = test::text_alone(6);
  const auto check = [&]<int sequence, class... Axes>(std::integral_constant<int, sequence>, int ranks, Axes...) {
    const auto path = cat("sequence_mesh_", getpid(), ".safetensors");
    const auto text = common_text(
        ranks,
        [&](const World& world) {
          auto communicator = comm::connect(world);
          Mesh<Text, Axes...> net{test::make<Text>(), communicator, world, {.micro_batches = 3, .check_every = 1}, 3};
          const auto out =
              test::text_training(net, [&](std::uint32_t number) { return share_of<sequence>(net, number, 6); });
          io::save(net, path);
          return test::text_of(out);
        },
        std::chrono::seconds(30));
    CAPTURE(text);
    auto got = test::numbers_in(text);
    Text whole;
    io::load(whole, path);
    std::remove(path.c_str());
    const auto last = test::values(whole);
    got.insert(got.end(), last.begin(), last.end());
    CHECK(test::distance(got, expected) < 1e-9);
  };
  check(std::integral_constant<int, 2>(), 4, Data<2>(), Sequence<2>());
  check(std::integral_constant<int, 3>(), 6, Sequence<3>(), Tensor<2>());
  check(std::integral_constant<int, 2>(), 4, Sequence<2>(), Shard<2>());
  check(std::integral_constant<int, 2>(), 8, Data<2>(), Sequence<2>(), Tensor<2>());
  check(std::integral_constant<int, 2>(), 4, Pipe<2>(), Sequence<2>());
  check(std::integral_constant<int, 2>(), 8, Pipe<2>(), Data<2>(), Sequence<2>());
}

TEST_CASE("mesh: a mesh with a sequence axis needs that many ranks") {
  using Axes = mesh::AxesOf<Data<mesh::rest>, Sequence<3>, Tensor<2>>;
  CHECK(Axes::sizes(12, {})[1] == 6);
  CHECK_THROWS_WITH(Axes::sizes(8, {}), Catch::Contains("Data<rest>, Sequence<3>, Tensor<2>"));
  CHECK(mesh::valid<Data<2>, Sequence<2>, Shard<2>>);
  CHECK(!mesh::valid<Sequence<2>, Data<2>>);
}

}  // namespace sequence_mesh_test
