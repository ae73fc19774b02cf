// Tensors of more than 2^31 numbers, all of which are compared. They repeat one block of rows, so that results have to
// repeat the first block's, which the CPU computes, too.
#include <chorus/kernels/contiguous.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>
#include <cstring>
#include <span>

#include "compare.hpp"

namespace large_test {

using namespace chorus;

constexpr Index columns = 1024, period = 64;

template <class D>
using Rows = Tensor<bf16, 2, D>;

/// Rows that repeat those of `block`.
Rows<Cuda> repeated(const Rows<Cuda>& block, Index rows) {
  auto out = Rows<Cuda>::empty({rows, columns});
  for (Index row = 0; row < rows; row += period)
    copy_bytes(Cuda{}, out.data() + row * columns, Cuda{}, block.data(),
               static_cast<std::size_t>(std::min(period, rows - row) * columns) * sizeof(bf16));
  return out;
}

/// How many of the numbers, `size` for each row, are not those of `period` rows before. `first` becomes the first
/// rows'.
template <class T>
Index strangers(const T* numbers, Index rows, Index size, std::vector<T>& first) {
  const Index at_once = period * std::max(Index{1}, (Index{1} << 26) / (period * size));
  std::vector<T> chunk;
  Index wrong = 0;
  for (Index row = 0; row < rows; row += at_once) {
    const Index now = std::min(at_once, rows - row);
    chunk.resize(static_cast<std::size_t>(now * size));
    copy_bytes(Cpu{}, chunk.data(), Cuda{}, numbers + row * size, chunk.size() * sizeof(T));
    if (row == 0) first.assign(chunk.begin(), chunk.begin() + std::min(now, period) * size);
    for (std::size_t i = 0; i < chunk.size(); i += first.size()) {
      const std::size_t n = std::min(first.size(), chunk.size() - i);
      if (std::memcmp(&chunk[i], first.data(), n * sizeof(T)) == 0) continue;
      for (std::size_t j = 0; j < n; ++j) wrong += std::memcmp(&chunk[i + j], &first[j], sizeof(T)) != 0;
    }
  }
  return wrong;
}

/// Compares `f(rows)`, on the GPU and on the CPU; the result has the same number of rows.
template <class F>
void check_rows(const char* what, const Rows<Cuda>& x, const Rows<Cpu>& block, const F& f) {
  INFO(what);
  const auto expected = f(block);
  const auto got = f(x);
  using T = typename std::remove_cvref_t<decltype(got)>::value_type;
  std::vector<T> first;
  CHECK(strangers(got.data(), x.size(0), got.numel() / x.size(0), first) == 0);
  CHECK(error(first, expected.to_vector()) <= near<bf16>);
}

void check(Index rows) {
  INFO(rows << " rows of " << columns);
  const auto block = Rows<Cpu>::from(numbers<bf16>(period * columns, 1), {period, columns});
  const auto x = repeated(Rows<Cuda>::from(block.to_vector(), {period, columns}, Cuda{}), rows);
  check_rows("itself", x, block, [](const auto& in) { return in; });
  check_rows("gelu", x, block, [](const auto& in) { return gelu(in); });
  check_rows("softmax", x, block, [](const auto& in) { return softmax(in, 1); });
  check_rows("sum", x, block, [](const auto& in) { return sum(in, 1); });
  check_rows("softmax's gradient", x, block, []<class D>(const Rows<D>& in) {
    const Variable<bf16, 2, D> leaf(in, true);
    softmax(leaf, 1).backward(in);
    return leaf.grad();
  });
  check_rows("a copy of columns in reverse order of axes", x, block, [](const auto& in) {
    const auto columns_first = contiguous(in.transpose(0, 1));
    return contiguous(columns_first.transpose(0, 1));
  });

  // Rows of a table, one of them behind its 2^31st number.
  const std::vector<std::int64_t> places = {0, rows - 1, rows / 2, period};
  const auto index = Tensor<std::int64_t, 1, Cuda>::from(places, {4}, Cuda{});
  const auto taken = embedding(x, index).to_vector();
  for (std::size_t i = 0; i < places.size(); ++i)
    CHECK(std::memcmp(&taken[i * columns], block.data() + places[i] % period * columns, columns * sizeof(bf16)) == 0);
}

TEST_CASE("tensors of more than 2^31 numbers on a GPU") {
  if (!gpu_present()) return;
  check(2 * period + 5);  // that this test is right, everywhere
  std::size_t free = 0, total = 0;
  CHORUS_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (free < std::size_t{40} << 30) {
    WARN("left out: this takes 40 GiB of a GPU's memory, and " << (free >> 30) << " are free");
    return;
  }
  check((Index{1} << 31) / columns + 5);
}

}  // namespace large_test
