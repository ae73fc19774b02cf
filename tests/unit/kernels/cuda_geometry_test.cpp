// How CUDA kernels share their work, and how plans are told apart: plain arithmetic, which needs no GPU.
#include <catch.hpp>
#include <chorus/kernels/cuda/geometry.hpp>
#include <chorus/kernels/cuda/plan_key.hpp>
#include <set>
#include <vector>

namespace cuda_geometry_test {

using namespace chorus;
using namespace chorus::kernels::cuda;
using kernels::Trans;

TEST_CASE("a grid covers its work and stays within what GPUs allow") {
  for (const Index items : {Index{1}, Index{255}, Index{256}, Index{257}, Index{1} << 20, Index{1} << 45}) {
    const unsigned blocks = blocks_for(items);
    CHECK(blocks >= 1);
    CHECK(blocks <= 65'535);
    if (items <= 1 << 20) CHECK(Index{blocks} * block_threads >= items);
    if (blocks > 1) CHECK((Index{blocks} - 1) * block_threads < items);
  }
  CHECK(blocks_for(0) == 1);
}

TEST_CASE("division by a number that the host knows is exact") {
  constexpr Index two_31 = Index{1} << 31;
  std::vector<Index> some{1, 2, 3, 5, 7, 49, 64, 196, 641, 3136, 65'535, 65'536, 65'537, two_31 - 1, two_31};
  for (std::uint64_t i = 1; i < 400; ++i)
    some.push_back(static_cast<Index>(i * i * 0x9E3779B97F4A7C15 >> (33 + i % 31)) + 1);
  for (const Index by : some) {
    const Divider few(by, two_31), many(by);
    for (const Index number : some)
      for (const Index i : {number - 1, number, number * by - 1, number * by, number * by + 1}) {
        CAPTURE(by, i);
        REQUIRE(many(i) == i / by);
        if (i < two_31) REQUIRE(few(i) == i / by);
      }
  }
}

TEST_CASE("a block's threads are shared among lines without a rest") {
  const auto power_of_two = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
  for (const Index length : {0, 1, 2, 5, 31, 32, 33, 100, 1000, 100'000})
    for (const Index inner : {1, 2, 3, 17, 32, 1000}) {
      const LinePlan plan = plan_lines(length, inner);
      CAPTURE(length, inner, plan.lanes, plan.lines);
      CHECK(plan.lanes * plan.lines == block_threads);
      CHECK(power_of_two(plan.lanes));
      CHECK(plan.along == (inner == 1));
      if (inner == 1 && length >= 1000) CHECK(plan.lanes >= 128);
      if (inner >= 32) CHECK(plan.lines >= 32);
    }
}

TEST_CASE("the splits of a reduction cover each element once, in pieces that keep sums exact") {
  for (const Index outputs : {1, 2, 64, 5000})
    for (const Index length : {0, 1, 255, 5000, 300'000, 100'000'000})
      for (const bool neighbours : {false, true}) {
        const ReducePlan plan = plan_reduce(outputs, length, neighbours);
        CAPTURE(outputs, length, neighbours, plan.splits, plan.split_length);
        CHECK(plan.splits >= 1);
        CHECK(plan.splits <= 512);
        CHECK(plan.splits * plan.split_length >= length);
        CHECK((plan.splits - 1) * plan.split_length < std::max(length, Index{1}));
        if (plan.splits < 512) CHECK(divide_up(plan.split_length, plan.lines.lanes) <= 1025);
      }
  CHECK(plan_reduce(1, 10'000'000, false).splits > 100);  // one sum still fills a GPU
  CHECK(plan_reduce(5000, 1000, false).splits == 1);
}

TEST_CASE("alignment of addresses") {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<const float*>(address); };
  CHECK(alignment_of(at(4096)) == 16);
  CHECK(alignment_of(at(4096 + 16)) == 16);
  CHECK(alignment_of(at(4096 + 4)) == 4);
  CHECK(alignment_of(at(4096 + 8)) == 8);
  CHECK(alignment_of(nullptr) == 16);
  CHECK(aligned(at(4096), at(4096 + 32), at(0)));
  CHECK_FALSE(aligned(at(4096), at(4096 + 8)));
}

TEST_CASE("strided maps merge axes and find every offset") {
  const std::vector<Index> shape{4, 1, 5, 6}, dense{30, 30, 6, 1}, rows{0, 0, 0, 1}, turned{1, 9, 24, 4};
  CHECK(strided_map<1>(shape, {dense}).axes == 1);
  CHECK(strided_map<2>(shape, {dense, rows}).axes == 2);
  CHECK(strided_map<1>(shape, {std::span<const Index>(turned)}).axes == 2);
  auto map = strided_map<3>(shape, {dense, rows, turned});
  CHECK(map.narrow);
  Index i = 0;
  for (Index a = 0; a < 4; ++a)
    for (Index c = 0; c < 5; ++c)
      for (Index d = 0; d < 6; ++d, ++i) {
        const auto offsets = map(i);
        REQUIRE(offsets.at[0] == i);
        REQUIRE(offsets.at[1] == d);
        REQUIRE(offsets.at[2] == a + 24 * c + 4 * d);
        map.narrow = false;
        REQUIRE(map(i).at[2] == offsets.at[2]);
        map.narrow = true;
      }
  const std::vector<Index> large{3, Index{1} << 31}, side_by_side{1, 3};
  const auto far = strided_map<1>(large, {std::span<const Index>(side_by_side)});
  CHECK_FALSE(far.narrow);
  CHECK(far((Index{1} << 31) + 5).at[0] == 1 + 15);
  const std::vector<Index> none;
  CHECK(strided_map<1>(none, {std::span<const Index>(none)})(0).at[0] == 0);
  CHECK_THROWS_AS((strided_map<1>(shape, {std::span<const Index>(none)})), ShapeError);
}

TEST_CASE("places beyond the 2^31st element") {
  const Index a = 3, b = 70'000, c = 50'000;  // 10.5 billion
  const std::vector<Index> shape{a, b, c}, turned{1, a, a * b}, rows{0, 0, 1};
  const auto map = strided_map<2>(shape, {turned, rows});
  for (const Index i : {Index{0}, (Index{1} << 31) - 1, Index{1} << 31, (Index{1} << 32) + 12'345, a * b * c - 1}) {
    CAPTURE(i);
    CHECK(map(i).at[0] == i / (b * c) + i / c % b * a + i % c * a * b);
    CHECK(map(i).at[1] == i % c);
  }
  const auto sum = broadcast_sum(shape, rows);  // over the first two axes
  CHECK(sum.output_count == c);
  CHECK(sum.element_count == a * b);
  CHECK(sum.outputs(c - 1).at[0] + sum.elements(a * b - 1).at[0] == a * b * c - 1);
  const std::vector<Index> columns{b, 1, 0};
  const auto other = broadcast_sum(shape, columns);
  CHECK(other.outputs(a * b - 1).at[0] + other.elements(c - 1).at[0] == a * b * c - 1);
  CHECK(other.outputs(a * b - 1).at[1] == a * b - 1);

  for (const Index length : {Index{1} << 31, (Index{1} << 33) + 1})
    for (const Index outputs : {Index{1}, Index{3}, (Index{1} << 32) + 1}) {
      const ReducePlan plan = plan_reduce(outputs, length, false);
      CAPTURE(outputs, length, plan.splits, plan.split_length);
      CHECK(plan.splits * plan.split_length >= length);
      CHECK((plan.splits - 1) * plan.split_length < length);
      CHECK(plan.tiles() * plan.lines.lines >= outputs);
      CHECK((plan.tiles() - 1) * plan.lines.lines < outputs);
    }
}

TEST_CASE("a broadcast's sums name each element of the dense array once") {
  const std::vector<Index> shape{3, 4, 5};
  for (const auto& strides : std::vector<std::vector<Index>>{{0, 0, 1}, {4, 1, 0}, {5, 0, 1}, {0, 1, 0}, {0, 0, 0}}) {
    CAPTURE(strides[0], strides[1], strides[2]);
    const auto sum = broadcast_sum(shape, strides);
    CHECK(sum.output_count * sum.element_count == 60);
    CHECK(sum.neighbours == (strides[2] != 0));
    std::set<Index> elements, outputs;
    for (Index o = 0; o < sum.output_count; ++o) {
      outputs.insert(sum.outputs(o).at[1]);
      for (Index e = 0; e < sum.element_count; ++e) {
        const Index at = sum.outputs(o).at[0] + sum.elements(e).at[0];
        elements.insert(at);
        // The element's own place in the sums, by its coordinates.
        REQUIRE(at / 20 * strides[0] + at / 5 % 4 * strides[1] + at % 5 * strides[2] == sum.outputs(o).at[1]);
      }
    }
    CHECK(elements.size() == 60);
    CHECK(outputs.size() == static_cast<std::size_t>(sum.output_count));
  }
}

TEST_CASE("plans are kept apart by everything that they depend on") {
  const GemmProblem gemm{DType::f32, Trans::no, Trans::yes, 1, 2, 3, 4, 5, 6, Epilogue::none, false, 16, 16, 16};
  const std::vector<void (*)(GemmProblem&)> changes{[](auto& p) { p.dtype = DType::f64; },
                                                    [](auto& p) { p.ta = Trans::yes; },
                                                    [](auto& p) { p.tb = Trans::no; },
                                                    [](auto& p) { p.m = 9; },
                                                    [](auto& p) { p.n = 9; },
                                                    [](auto& p) { p.k = 9; },
                                                    [](auto& p) { p.lda = 9; },
                                                    [](auto& p) { p.ldb = 9; },
                                                    [](auto& p) { p.ldc = 9; },
                                                    [](auto& p) { p.epilogue = Epilogue::bias; },
                                                    [](auto& p) { p.epilogue = Epilogue::sums; },
                                                    [](auto& p) { p.tf32 = true; },
                                                    [](auto& p) { p.align_a = 4; },
                                                    [](auto& p) { p.align_b = 4; },
                                                    [](auto& p) { p.align_c = 4; }};
  std::set<PlanKey> keys{gemm.key()};
  for (const auto& change : changes) {
    auto other = gemm;
    change(other);
    keys.insert(other.key());
  }
  CHECK(keys.size() == changes.size() + 1);
  CHECK(gemm.key() == GemmProblem(gemm).key());

  const kernels::Conv2dShape shape{2, 4, 8, 8, 6, 3, 3};
  keys = {ConvolutionProblem{ConvolutionPass::forward, DType::f32, false, shape}.key(),
          ConvolutionProblem{ConvolutionPass::backward_input, DType::f32, false, shape}.key(),
          ConvolutionProblem{ConvolutionPass::forward, DType::f64, false, shape}.key(),
          ConvolutionProblem{ConvolutionPass::forward, DType::f32, true, shape}.key()};
  using Member = Index kernels::Conv2dShape::*;
  using S = kernels::Conv2dShape;
  const std::vector<Member> members{&S::batch,     &S::in_channels, &S::height,     &S::width,    &S::out_channels,
                                    &S::kernel_h,  &S::kernel_w,    &S::stride_h,   &S::stride_w, &S::padding_h,
                                    &S::padding_w, &S::dilation_h,  &S::dilation_w, &S::groups};
  for (const Member member : members) {
    auto other = shape;
    other.*member += 1;
    keys.insert(ConvolutionProblem{ConvolutionPass::forward, DType::f32, false, other}.key());
  }
  CHECK(keys.size() == 4 + members.size());
}

}  // namespace cuda_geometry_test
