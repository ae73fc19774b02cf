#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/sort.hpp>

#include "edge.hpp"

namespace rows_test {
using namespace edge;

template <class X>
using Row = Tensor<typename ch::tensor_of<std::decay_t<X>>::value_type, 1>;

TEST_CASE("functions along an axis at the edge are PyTorch's") {
  Group group("rows");
  const auto lines = [&](const std::string& name, const auto& f) {
    const auto rounding = name.find("softmax") != std::string::npos ? Rounding::absolute : Rounding::relative;
    operator_is_right<2>(
        group, name, [&](const auto& x) { return f(x, 1); }, rounding);
    operator_is_right<2>(
        group, name + " of columns", [&](const auto& x) { return f(x, 0); }, rounding);
  };
  const auto is_right = [&](const std::string& name, const auto& f) { operator_is_right<2>(group, name, f); };
#define LINES(NAME) lines(#NAME, [](const auto& x, Index axis) { return ch::NAME(x, axis); });
  LINES(softmax)
  LINES(log_softmax)
  LINES(logsumexp)
  LINES(sum)
  LINES(mean)
  LINES(amax)
  LINES(amin)
  LINES(argmax)
  LINES(argmin)
  LINES(cumsum)
  LINES(var)
  LINES(argsort)
  LINES(glu)
#undef LINES
  lines("var 0", [](const auto& x, Index axis) { return ch::var(x, axis, 0); });
  lines("sort", [](const auto& x, Index axis) { return ch::sort(x, axis).values; });
  lines("sort down", [](const auto& x, Index axis) { return ch::sort(x, axis, true).values; });
  lines("argsort down", [](const auto& x, Index axis) { return ch::argsort(x, axis, true); });
  is_right("topk", [](const auto& x) { return ch::topk(x, 2, 1).values; });
  is_right("topk values", [](const auto& x) { return ch::topk(x.value(), 2, 1).values; });
  is_right("cumprod", [](const auto& x) { return ch::cumprod(x, 1); });
  is_right("cumprod values", [](const auto& x) { return ch::cumprod(x.value(), 1); });
  is_right("topk smallest", [](const auto& x) { return ch::topk(x, 2, 1, false).values; });
#define WHOLE(NAME) is_right(#NAME " of all", [](const auto& x) { return ch::NAME(x); });
  WHOLE(sum)
  WHOLE(mean)
  WHOLE(amax)
  WHOLE(amin)
  WHOLE(logsumexp)
  WHOLE(var)
#undef WHOLE
#define AXES(NAME)                                                  \
  operator_is_right<4>(group, #NAME " of axes", [](const auto& x) { \
    return ch::NAME(x, std::array<Index, 3>{1, 2, 3});              \
  });
  AXES(sum)
  AXES(mean)
  AXES(amax)
  AXES(amin)
  AXES(logsumexp)
  AXES(var)
#undef AXES
  group_is_whole(group);
}

TEST_CASE("normalisations and distances of rows at the edge are PyTorch's") {
  Group group("distances");
  const auto of_two = [&](const std::string& name, const auto& f) {
    operator_is_right<2, 2>(group, name, f, Rounding::absolute);
  };
  operator_is_right<2, 1, 1>(
      group, "layer_norm", [](const auto& x, const auto& w, const auto& b) { return ch::layer_norm(x, w, b); },
      Rounding::absolute);
  operator_is_right<2>(
      group, "layer_norm plain",
      [](const auto& x) { return ch::layer_norm(x, Row<decltype(x)>{}, Row<decltype(x)>{}); }, Rounding::absolute);
  operator_is_right<2, 1>(group, "rms_norm", [](const auto& x, const auto& w) { return ch::rms_norm(x, w); });
  of_two("cosine_similarity", [](const auto& a, const auto& b) { return ch::cosine_similarity(a, b); });
  of_two("cosine_embedding_loss_per_sample", [](const auto& a, const auto& b) {
    using T = typename ch::tensor_of<std::decay_t<decltype(a)>>::value_type;
    std::vector<T> signs;
    for (Index i = 0; i < a.shape()[0]; ++i) signs.push_back(i % 2 == 0 ? T{1} : T{-1});
    return ch::cosine_embedding_loss_per_sample(a, b, Tensor<T, 1>::from(signs, {a.shape()[0]}, Device{}), 0.1);
  });
  of_two("triplet_margin_loss_per_sample",
         [](const auto& a, const auto& b) { return ch::triplet_margin_loss_per_sample(a, b, a + 0.5); });
  of_two("triplet_margin_loss swap", [](const auto& a, const auto& b) {
    return ch::triplet_margin_loss_per_sample(a, b, a + 0.5, {.swap = true});
  });
  group_is_whole(group);
}

}  // namespace rows_test
