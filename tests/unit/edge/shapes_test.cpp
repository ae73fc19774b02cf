#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/dropout_variants.hpp>
#include <chorus/ops/einsum.hpp>
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/softmax.hpp>

#include "edge.hpp"

namespace shapes_test {
using namespace edge;

template <class Index_>
ch::Tensor<std::int64_t, 2, Device> places(Index rows, Index columns, Index_ at) {
  std::vector<std::int64_t> all;
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; ++j) all.push_back(at(i));
  return ch::Tensor<std::int64_t, 2, Device>::from(all, {rows, columns}, Device{});
}
template <class F>
ch::Tensor<bool, 2, Device> mask(const Shape<2>& shape, const F& f) {
  auto out = ch::Tensor<bool, 2>::empty(shape);
  for (Index i = 0; i < shape[0]; ++i)
    for (Index j = 0; j < shape[1]; ++j) out.data()[i * shape[1] + j] = f(i, j);
  return ch::to_device(out, Device{});
}
bool even(Index, Index column) { return column % 2 == 0; }

TEST_CASE("products at the edge are PyTorch's") {
  Group group("products");
  const auto of_two = [&](const char* name, const auto& f) {
    operator_is_right<2, 2>(group, name, f, Rounding::absolute);
  };
  of_two("matmul", [](const auto& a, const auto& b) { return ch::matmul(a, b); });
  of_two("einsum sum", [](const auto& a, const auto& b) { return ch::einsum<"ij,jk->i">(a, b); });
  operator_is_right<3, 3>(
      group, "matmul of stacks", [](const auto& a, const auto& b) { return ch::matmul(a, b); }, Rounding::absolute);
  operator_is_right<3, 3>(
      group, "einsum", [](const auto& a, const auto& b) { return ch::einsum<"bij,bjk->bik">(a, b); },
      Rounding::absolute);
  operator_is_right<3, 2>(
      group, "matmul by one", [](const auto& a, const auto& b) { return ch::matmul(a, b); }, Rounding::absolute);
  operator_is_right<2, 2, 1>(
      group, "linear", [](const auto& x, const auto& w, const auto& b) { return ch::linear(x, w, b); },
      Rounding::absolute);
  group_is_whole(group);
}

TEST_CASE("picking at the edge is PyTorch's") {
  Group group("picking");
  const auto is_right = [&](const char* name, const auto& f) { operator_is_right<2>(group, name, f); };
  const auto some = Labels::from({2, 0, 2}, {3}, Device{});
  const auto entries = ch::Tensor<std::int64_t, 2, Device>::from({3, 6, 3, 13}, {2, 2}, Device{});
  const auto each = [](Index i) { return i % 4; };
  is_right("index_select", [&](const auto& x) { return ch::index_select(x, 1, some); });
  is_right("embedding", [&](const auto& x) { return ch::embedding(x, entries); });
  is_right("embedding with padding", [&](const auto& x) { return ch::embedding(x, entries, 3); });
  is_right("gather", [&](const auto& x) { return ch::gather(x, 1, places(x.shape()[0], 2, each)); });
  operator_is_right<2, 1>(group, "scatter", [&](const auto& x, const auto& s) {
    return ch::scatter(x, 1, places(20, 1, each), ch::reshape(s, Shape<2>{20, 1}));
  });
  operator_is_right<2, 1>(group, "scatter_add", [&](const auto& x, const auto& s) {
    return ch::scatter_add(x, 1, places(20, 1, each), ch::reshape(s, Shape<2>{20, 1}));
  });
  is_right("masked_fill", [](const auto& x) {
    const auto all = ch::contiguous(x.value()).to_vector();
    const Index columns = x.shape()[1];
    const auto finite = [&](Index i, Index j) { return std::isfinite(all[static_cast<std::size_t>(i * columns + j)]); };
    return ch::masked_fill(x, mask(x.shape(), [&](Index i, Index j) { return !finite(i, j); }), 0.5);
  });
  is_right("masked_fill inf", [](const auto& x) { return ch::masked_fill(x, mask({1, 4}, even), -INFINITY); });
  is_right("masked softmax", [](const auto& x) {
    return ch::softmax(ch::masked_fill(x, mask({1, 4}, [](Index, Index) { return false; }), -INFINITY), 1);
  });
  is_right("slice", [](const auto& x) { return ch::slice(x, 1, 1, 3); });
  is_right("slice nothing", [](const auto& x) { return ch::slice(x, 1, 1, 1); });
  const auto of_two = [&](const char* name, const auto& f) { operator_is_right<2, 2>(group, name, f); };
  of_two("where", [](const auto& a, const auto& b) { return ch::where(mask({1, 4}, even), a, b); });
  of_two("concat", [](const auto& a, const auto& b) { return ch::concat(1, a, b); });
  of_two("concat of rows", [](const auto& a, const auto& b) { return ch::concat(0, a, b); });
  of_two("stack", [](const auto& a, const auto& b) { return ch::stack(1, a, b); });
  group_is_whole(group);
}

TEST_CASE("changes of shape at the edge are PyTorch's") {
  Group group("shapes");
  const auto is_right = [&](const char* name, const auto& f) { operator_is_right<2>(group, name, f); };
  is_right("permute", [](const auto& x) { return ch::permute(x, {1, 0}); });
  is_right("transpose", [](const auto& x) { return ch::transpose(x, 0, 1); });
  is_right("reshape", [](const auto& x) { return ch::reshape(x, Shape<1>{-1}); });
  is_right("expand", [](const auto& x) { return ch::expand(x, Shape<3>{2, x.shape()[0], x.shape()[1]}); });
  is_right("to double and back", [](const auto& x) {
    return ch::to<typename ch::tensor_of<std::decay_t<decltype(x)>>::value_type>(ch::to<double>(x));
  });
  is_right("alpha_dropout in evaluation", [](const auto& x) { return ch::alpha_dropout(x, 0.5, false); });
  operator_is_right<4>(group, "flatten", [](const auto& x) { return ch::flatten(x); });
  operator_is_right<4>(group, "dropout of channels in evaluation",
                       [](const auto& x) { return ch::dropout_channels(x, 0.5, false); });
  operator_is_right<2, 1>(group, "broadcast mul", [](const auto& a, const auto& b) { return a * b; });
  operator_is_right<2, 1>(group, "broadcast div", [](const auto& a, const auto& b) { return a / b; });
  operator_is_right<2, 1>(group, "broadcast maximum", [](const auto& a, const auto& b) { return ch::maximum(a, b); });
  operator_is_right<2, 1>(group, "broadcast add", [](const auto& a, const auto& b) { return a + b; });
  operator_is_right<2, 2>(group, "broadcast add of rows", [](const auto& a, const auto& b) { return a + b; });
  group_is_whole(group);
}

}  // namespace shapes_test
