// Kernels walk over more than 2^31 elements without losing one: single threads of large grids, which compute places and
// touch no memory.
#include <algorithm>
#include <catch.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <vector>

namespace large_index_test {

using namespace chorus;
using namespace chorus::kernels;
using namespace chorus::kernels::cuda;

// What thread `thread` of block `block` does in a grid of `blocks`.
template <class Kernel>
void run_thread(unsigned blocks, unsigned block, unsigned thread, const Kernel& kernel) {
  auto& emulated = emulation::Block::get();
  emulated.blocks = dim3(blocks);
  emulated.threads = dim3(block_threads);
  emulated.block = {block, 0, 0};
  emulated.thread = {thread, 0, 0};
  kernel();
}

struct Note {
  std::vector<Index>* places;
  void operator()(Index i) const { places->push_back(i); }
};

TEST_CASE("for_each goes on beyond 2^31 elements") {
  const Index count = (Index{1} << 32) + 7, stride = Index{blocks_for(count)} * block_threads;
  for (const Index first : {Index{0}, Index{6}, Index{7}, stride - 1}) {
    std::vector<Index> places;
    run_thread(blocks_for(count), static_cast<unsigned>(first / block_threads),
               static_cast<unsigned>(first % block_threads),
               [&] { kernels::cuda::detail::each(count, Note{&places}); });
    REQUIRE(places.size() == static_cast<std::size_t>((count - first + stride - 1) / stride));
    for (std::size_t i = 0; i < places.size(); ++i) REQUIRE(places[i] == first + static_cast<Index>(i) * stride);
    CHECK(places.back() > Index{1} << 31);
  }
}

TEST_CASE("vectors of numbers beyond the 2^31st") {
  const Index count = 4 * ((Index{1} << 31) + 5) + 3, vectors = divide_up(count, 4);
  const Index stride = Index{blocks_for(vectors)} * block_threads, last = (vectors - 1) % stride;
  std::vector<std::pair<Index, int>> places;
  run_thread(blocks_for(vectors), static_cast<unsigned>(last / block_threads),
             static_cast<unsigned>(last % block_threads),
             [&] { for_vectors<4>(count, [&](Index first, int n) { places.emplace_back(first, n); }); });
  REQUIRE(places.size() == static_cast<std::size_t>((vectors - last + stride - 1) / stride));
  for (std::size_t i = 0; i < places.size(); ++i) {
    REQUIRE(places[i].first == 4 * (last + static_cast<Index>(i) * stride));
    REQUIRE(places[i].second == (i + 1 < places.size() ? 4 : 3));
  }
}

struct Ends {
  struct End {
    Index result, first, last;
  };
  std::vector<End>* ends;
  void operator()(const Line& line) const {
    if (line.exists) ends->push_back({line.result, line.at, line.at + (line.length - 1) * line.stride});
  }
};

TEST_CASE("lines of a tensor of more than 2^31 elements, and more lines than that") {
  for (const AxisShape& shape : {AxisShape{3, 1 << 20, 2049}, AxisShape{70'000, 70'000, 1},
                                 AxisShape{(Index{1} << 32) + 3, 1, 1}, AxisShape{5, 3, Index{1} << 31}}) {
    const Index count = shape.outer * shape.inner;
    CAPTURE(shape.outer, shape.axis, shape.inner);
    CHECK(count * shape.axis > Index{1} << 31);
    const LinePlan plan = plan_lines(shape.axis, shape.inner);
    const unsigned blocks = blocks_for(count, plan.lines);
    // The block to which the last line falls, in its last turn, and the threads that begin and end its lines.
    const Index tile = (count - 1) / plan.lines;
    const auto block = static_cast<unsigned>(tile % blocks);
    for (const unsigned thread : {0u, block_threads - 1u}) {
      std::vector<Ends::End> ends;
      run_thread(blocks, block, thread, [&] { kernels::cuda::detail::lines(shape, plan, Ends{&ends}); });
      const Index line = thread == 0 ? 0 : plan.lines - 1;
      std::size_t turn = 0;
      for (Index at = Index{block} * plan.lines + line; at < count; at += Index{blocks} * plan.lines, ++turn) {
        REQUIRE(turn < ends.size());
        REQUIRE(ends[turn].result == at);
        REQUIRE(ends[turn].first == at / shape.inner * shape.axis * shape.inner + at % shape.inner);
        REQUIRE(ends[turn].last == ends[turn].first + (shape.axis - 1) * shape.inner);
      }
      CHECK(turn == ends.size());
    }
  }
}

TEST_CASE("vectors of a line cover it once, and whole ones lie where one access reads them") {
  alignas(16) static const bf16 numbers[4096] = {};
  for (const Index length : {1, 7, 8, 9, 33, 1003})
    for (const bool vector : {false, true})
      for (Index row = 0; row < 3; ++row) {
        CAPTURE(length, vector, row);
        std::vector<int> seen(static_cast<std::size_t>(length));
        int whole = 0;
        for (int lane = 0; lane < 32; ++lane)
          each_place(Line{{32, 8, true}, lane, 0, true, row * length, row, length, 1}, numbers, vector,
                     [&](Index i, int n) {
                       for (int l = 0; l < n; ++l) ++seen[static_cast<std::size_t>(i + l)];
                       if (n < Vector<bf16>::width) return;
                       ++whole;
                       if (vector) CHECK(aligned(numbers + row * length + i));
                     });
        CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
        CHECK(whole >= length / 8 - 1);
      }
}

}  // namespace large_index_test
