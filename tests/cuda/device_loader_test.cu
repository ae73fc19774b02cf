// Batches that come to a GPU by a stream of their own: the numbers of the loader, whoever reads them when.
#include <catch.hpp>
#include <chorus/data/cuda/device_loader.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <stdexcept>

#include "../unit/message_of.hpp"
#include "compare.hpp"

namespace device_loader_test {

using namespace chorus;

struct Rows {
  Index count;
  Index throws_at = -1;
  Index size() const { return count; }
  std::pair<Tensor<float, 1>, std::int64_t> get(Index i) const {
    if (i == throws_at) throw std::runtime_error("no such row");
    return {Tensor<float, 1>::full({300}, static_cast<float>(i)), i};
  }
};

auto loader_of(const Rows& rows) {
  return data::DataLoader(rows, data::Sampler(rows.size(), {.shuffle = false}), {.batch = 4, .workers = 1});
}

// The sum of all rows so far, by kernels that are given while the next batches come.
template <class Loader>
std::vector<float> summed(Loader& loader, bool hold, std::vector<std::vector<float>>* held_numbers = nullptr) {
  const auto sum = Tensor<float, 1, Cuda>::zeros({300}, Cuda{});
  std::vector<Tensor<float, 2, Cuda>> held;
  for (auto& [x, y] : loader) {
    CHECK(x.size(0) == y.size(0));
    for (Index row = 0; row < x.size(0); ++row)
      kernels::axpy(Cuda{}, 300, 1.f, x.data() + row * 300, sum.data());
    if (hold) held.push_back(x);
  }
  if (held_numbers != nullptr)
    for (const auto& x : held) held_numbers->push_back(x.to_vector());
  return sum.to_vector();
}

TEST_CASE("a device loader's batches are the loader's") {
  if (!gpu_present()) return;
  const Rows rows{22};
  auto plain = loader_of(rows);
  data::DeviceLoader loader(plain, Cuda{});
  CHECK(loader.size() == 6);
  const std::vector<float> expected(300, 22 * 21 / 2.f);
  CHECK(summed(loader, false) == expected);
  CHECK(summed(loader, false) == expected);  // another epoch
  std::vector<std::vector<float>> held;
  CHECK(summed(loader, true, &held) == expected);
  REQUIRE(held.size() == 6);
  for (std::size_t i = 0; i < held.size(); ++i)
    for (std::size_t j = 0; j < held[i].size(); ++j) REQUIRE(held[i][j] == static_cast<float>(4 * i + j / 300));
}

TEST_CASE("a device loader asks for memory in its first steps alone") {
  if (!gpu_present()) return;
  const Rows rows{400};
  auto plain = loader_of(rows);
  data::DeviceLoader loader(plain, Cuda{});
  int step = 0;
  std::vector<const float*> places;
  for (auto& [x, y] : loader) {
    if (++step > 2) CHECK(x.data() == places[places.size() - 2]);
    places.push_back(x.data());
  }
  CHECK(step == 100);
}

TEST_CASE("a device loader may be left at any batch, and passes on what its loader throws") {
  if (!gpu_present()) return;
  const Rows rows{40};
  auto plain = loader_of(rows);
  data::DeviceLoader loader(plain, Cuda{});
  for (int batches = 0; batches < 4; ++batches) {
    auto at = loader.begin();
    for (int i = 0; i < batches; ++i) ++at;
    CHECK(std::get<1>(*at).to_vector()[0] == 4 * batches);
  }
  auto at = loader.begin();
  while (at != loader.end()) ++at;
  CHECK(message_of<UsageError>([&] { *at; }) == "DeviceLoader: no batch at the end of a pass");

  const Rows bad{40, 13};
  auto failing = loader_of(bad);
  int batches = 0;
  const auto read = [&] {
    for (auto& batch : data::DeviceLoader(failing, Cuda{})) {
      static_cast<void>(batch);
      ++batches;
    }
  };
  CHECK_THROWS_WITH(read(), Catch::Contains("no such row"));
  CHECK(batches == 3);
}

#ifndef __NVCC__
TEST_CASE("a device loader copies by a stream of its own, ordered by events both ways") {
  // Where compute has not run, a batch's memory is not written again: the stream of copies waits for it.
  const Rows rows{16};
  auto plain = loader_of(rows);
  const auto stream = cuda::compute_stream(Cuda{});
  const auto seen = Tensor<float, 1, Cuda>::zeros({4}, Cuda{});
  // Nor is memory whose last use is under way when a batch gets it.
  const auto old = Tensor<float, 1, Cuda>::zeros({1}, Cuda{});
  auto scratch = Tensor<float, 2, Cuda>::full({4, 300}, 7, Cuda{});
  stream->finish(stream->given);
  kernels::axpy(Cuda{}, 1, 1.f, scratch.data(), old.data());
  const float* const place = scratch.data();
  scratch = {};
  bool found = false;
  Index i = 0;
  const std::size_t before = stream->given;
  for (auto& [x, y] : data::DeviceLoader(plain, Cuda{})) {
    found = found || x.data() == place;
    kernels::axpy(Cuda{}, 1, 1.f, x.data(), seen.data() + i++);
  }
  CHECK(found);
  // Of each batch: a wait, the kernel, a mark; no copy.
  CHECK(stream->given - before <= 4 * 3 + 4);
  CHECK(seen.to_vector() == std::vector<float>{0, 4, 8, 12});
  CHECK(old.item() == 7);
}
#endif

}  // namespace device_loader_test
