/// The functions between ranks are each other's gradients.

#include <catch.hpp>
#include <chorus/ops/sequence_part.hpp>
#include <chorus/parallel/tensor/group.hpp>
#include <memory>
#include <numeric>

#include "ranks.hpp"

namespace {

namespace ch = chorus;
using namespace test::names;
using Group = ch::detail::CommunicatorGroup<ch::comm::AnyCommunicator>;

double product(const ch::Tensor<double, 3>& a, const ch::Tensor<double, 3>& b) {
  REQUIRE(a.shape() == b.shape());
  const auto as = ch::contiguous(a).to_vector(), bs = ch::contiguous(b).to_vector();
  return std::inner_product(as.begin(), as.end(), bs.begin(), 0.0);
}

// <f(x), dy> = <x, df(dy)>; values that are equal on all ranks count once.
enum class Ranks : std::uint8_t { differ, alike };
template <class F>
void check_adjoint(const char* name, const ch::Shape<3>& shape, Ranks of_x, Ranks of_y, const F& f) {
  for (const int ranks : {1, 2, 3, 5}) {
    INFO(name << " on " << ranks);
    const auto sums = test::numbers_in(common_text(ranks, [&](const World& world) {
      auto communicator = ch::comm::connect(world);
      const auto group = std::make_shared<Group>(communicator, false);
      const auto random = [&](ch::Shape<3> extents, Ranks which, std::uint32_t key) {
        const auto own = static_cast<std::uint32_t>(which == Ranks::alike ? 0 : world.rank + 1);
        return numbers(1, ch::numel(extents), 10 * key + own).view(extents);
      };
      const ch::TensorGroupRef shared = group;
      auto mine = shape;
      if (std::string_view(name).starts_with("gather")) mine[1] = group->part(shape[1], 1).count;
      const ch::Variable<double, 3> x(random(mine, of_x, 1), true);
      const auto y = f(x, shared);
      const auto dy = random(y.shape(), of_y, 2);
      y.backward(dy);
      double both[] = {product(y.value(), dy) / (of_y == Ranks::alike ? ranks : 1),
                       product(x.value(), x.grad()) / (of_x == Ranks::alike ? ranks : 1)};
      communicator.all_reduce(std::span(both));
      return test::text_of({both[0], both[1]});
    }));
    REQUIRE(sums.size() == 2);
    CHECK(sums[0] == Approx(sums[1]).epsilon(1e-12));
    CHECK(sums[0] != 0);
  }
}

TEST_CASE("CopyToModelParallelRegion and the other mappings are each other's gradients", "[tensor_parallel]") {
  const ch::Shape<3> shape{2, 7, 3};
  using enum Ranks;
  check_adjoint("enter", shape, alike, differ,
                [](const auto& x, const auto& group) { return ch::enter_tensor_region(x, group); });
  check_adjoint("leave", shape, differ, alike,
                [](const auto& x, const auto& group) { return ch::leave_tensor_region(x, group); });
  check_adjoint("scatter", shape, alike, differ,
                [](const auto& x, const auto& group) { return ch::scatter_axis(x, 1, 1, group); });
  check_adjoint("gather", shape, differ, alike,
                [](const auto& x, const auto& group) { return ch::gather_axis(x, 1, 7, 1, false, group); });
  check_adjoint("gather, summing", shape, differ, differ,
                [](const auto& x, const auto& group) { return ch::gather_axis(x, 1, 7, 1, true, group); });
  check_adjoint("reduce_scatter", shape, differ, differ,
                [](const auto& x, const auto& group) { return ch::reduce_scatter_axis(x, 1, 1, group); });
}

TEST_CASE("Without a group the functions between ranks are the identity", "[tensor_parallel]") {
  const ch::Variable<double, 2> x(numbers(2, 3, 1), true);
  CHECK(ch::enter_tensor_region(x).node() == x.node());
  CHECK(ch::leave_tensor_region(x).node() == x.node());
  CHECK(ch::scatter_axis(x, 1).node() == x.node());
  CHECK(ch::gather_axis(x, 1, 3).node() == x.node());
  CHECK(ch::reduce_scatter_axis(x, 1).node() == x.node());
  CHECK(ch::gather_sequence(ch::split_sequence(x)).node() == x.node());
}

TEST_CASE("A part of another size than this rank's is refused", "[tensor_parallel]") {
  CHECK_THAT(common_text(2, [](const World& world) {
               auto communicator = ch::comm::connect(world);
               const ch::TensorGroupRef group = std::make_shared<Group>(communicator, false);
               return message_of<ShapeError>([&] { ch::gather_axis(numbers(2, 4, 1), 1, 4, 1, false, group); });
             }), Contains("gather_axis: expected 2 of 4 entries along axis 1, got shape [2, 4]"));
}

}  // namespace
