// Comparisons, truth values, arithmetic in place and what is made of other kernels, as on the CPU.
#include <chorus/ops/counting.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/in_place.hpp>
#include <chorus/ops/matrix_parts.hpp>
#include <chorus/ops/truth.hpp>

#include "compare.hpp"

namespace functions_gpu_test {

using namespace chorus;

template <class T, int Rank>
std::vector<float> read(const Tensor<T, Rank, Cuda>& x) {
  return contiguous(to<float>(x)).to_vector();
}

TEST_CASE("comparisons, logic, choices and truth values on a GPU") {
  if (!gpu_present()) return;
  const Cuda device{0};
  const auto x = Tensor<float, 2, Cuda>::from({1, 2, NAN, 4}, {2, 2}, device);
  const auto row = Tensor<float, 1, Cuda>::from({1, 4}, {2}, device);
  CHECK(read(x == row) == std::vector<float>{1, 0, 0, 1});
  CHECK(read((x > 1) & ~isnan(x)) == std::vector<float>{0, 1, 0, 1});
  CHECK(read(any(x == 4, 0)) == std::vector<float>{0, 1});
  CHECK(all(isfinite(row)).item());
  CHECK(read(masked_select(x, x >= 2)) == std::vector<float>{2, 4});
  CHECK(read(nonzero(x == 2)) == std::vector<float>{0, 1});
  CHECK(count_nonzero(x == 2).item() == 1);
  CHECK(read(full_like(row, 3)) == std::vector<float>(static_cast<std::size_t>(row.numel()), 3));
  const auto whole = arange(0, 3, 1, device);
  CHECK(where(whole > 1, whole, -1).to_vector() == std::vector<Index>{-1, -1, 2});
  CHECK(unique(whole).counts.to_vector() == std::vector<Index>{1, 1, 1});
}

TEST_CASE("arithmetic in place and parts of matrices on a GPU") {
  if (!gpu_present()) return;
  const Cuda device{0};
  const auto x = Tensor<float, 2, Cuda>::from({1, 2, 3, 4}, {2, 2}, device);
  x += Tensor<float, 1, Cuda>::from({10, 20}, {2}, device);
  x.transpose(0, 1).select(0, 0) *= 2;
  CHECK(x.to_vector() == std::vector<float>{22, 22, 26, 24});
  const auto whole = arange(1, 3, 1, device);
  whole *= whole;
  CHECK(whole.to_vector() == std::vector<Index>{1, 4});
  CHECK(read(tril(x)) == std::vector<float>{22, 0, 26, 24});
  CHECK(read(flip(x, 1)) == std::vector<float>{22, 22, 24, 26});
  const Variable<float, 1, Cuda> leaf(Tensor<float, 1, Cuda>::from({1, 2}, {2}, device), true);
  const auto y = leaf * leaf;
  leaf.value() += 1;
  CHECK_THROWS_AS(y.backward(Tensor<float, 1, Cuda>::ones({2}, device)), UsageError);
}

}  // namespace functions_gpu_test
