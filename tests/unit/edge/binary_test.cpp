#include <chorus/ops/losses.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/normalization.hpp>

#include "edge.hpp"

namespace binary_test {
using namespace edge;

template <class X>
auto ones(const X& x) {
  return std::decay_t<decltype(ch::value_of(x))>::ones(ch::value_of(x).shape(), ch::value_of(x).device());
}
// A scalar in the type of x.
template <class X>
auto scalar(const X& x, double value) {
  using T = typename ch::tensor_of<X>::value_type;
  return Tensor<T, 0>::full({}, static_cast<T>(value), ch::value_of(x).device());
}

TEST_CASE("functions of two numbers at the edge are PyTorch's") {
  Group group("binary");
  const auto is_right = [&](const char* name, const auto& f) {
    // 1 - cosine, and losses that add a number near 0 to one near 1.
    const std::string first(name, 3);
    const bool absolute = first == "cos" || first == "bce" || first == "poi";
    operator_is_right<1, 1>(group, name, f, absolute ? Rounding::absolute : Rounding::relative);
  };
#define BINARY(NAME) is_right(#NAME, [](const auto& a, const auto& b) { return ch::NAME(a, b); });
  BINARY(add)
  BINARY(sub)
  BINARY(mul)
  BINARY(div)
  BINARY(maximum)
  BINARY(minimum)
  BINARY(pow)
  BINARY(mse_loss_per_element)
  BINARY(l1_loss_per_element)
  BINARY(smooth_l1_loss_per_element)
  BINARY(huber_loss_per_element)
  BINARY(kl_div_per_element)
  BINARY(poisson_nll_loss_per_element)
  BINARY(bce_with_logits_per_element)
#undef BINARY
  is_right("smooth_l1_loss_per_element 2",
           [](const auto& a, const auto& b) { return ch::smooth_l1_loss_per_element(a, b, 2); });
  is_right("huber_loss_per_element 2",
           [](const auto& a, const auto& b) { return ch::huber_loss_per_element(a, b, 2); });
  is_right("poisson_nll_loss_per_element rate",
           [](const auto& a, const auto& b) { return ch::poisson_nll_loss_per_element(a, b, {.log_input = false}); });
  is_right("poisson_nll_loss_per_element full",
           [](const auto& a, const auto& b) { return ch::poisson_nll_loss_per_element(a, b.value(), {.full = true}); });
  is_right("where", [](const auto& a, const auto& b) {
    auto mask = ch::Tensor<bool, 1>::empty(a.shape());
    for (Index i = 0; i < mask.numel(); ++i) mask.data()[i] = i % 2 == 0;
    return ch::where(ch::to_device(mask, Device{}), a, b);
  });
  is_right("prelu", [](const auto& x, const auto& slope) {
    return ch::reshape(ch::prelu(ch::reshape(x, Shape<2>{1, x.value().numel()}), slope), Shape<1>{-1});
  });
  is_right("scale and shift",
           [](const auto& a, const auto& b) { return ch::pointwise(ch::functors::ScaleShift{}, a, b, b); });
  is_right("bce_with_logits_per_element weighted", [](const auto& x, const auto& t) {
    return ch::bce_with_logits_per_element(x, t, scalar(x, 0.5), scalar(x, 3));
  });
  is_right("soft_margin_loss_per_element",
           [](const auto& x, const auto& t) { return ch::soft_margin_loss_per_element(x, t.value()); });
  is_right("hinge_embedding_loss_per_element",
           [](const auto& x, const auto& t) { return ch::hinge_embedding_loss_per_element(x, t.value()); });
  is_right("margin_ranking_loss_per_element", [](const auto& x, const auto& t) {
    return ch::margin_ranking_loss_per_element(x, ones(x), t.value(), 0.5);
  });
  is_right("gaussian_nll_loss_per_element",
           [](const auto& x, const auto& v) { return ch::gaussian_nll_loss_per_element(x, ones(x), v); });
  is_right("gaussian_nll_loss_per_element full", [](const auto& x, const auto& v) {
    return ch::gaussian_nll_loss_per_element(x, ones(x), v, {.full = true});
  });
  is_right("cosine_embedding_loss", [](const auto& x, const auto& t) {
    const Shape<2> column{x.value().numel(), 1};
    return ch::cosine_embedding_loss_per_sample(ch::reshape(x, column), ch::reshape(ones(x), column), t.value(), 0.1);
  });
  for (const auto reduction : {ch::Reduction::mean, ch::Reduction::sum}) {
    const auto reduced = [&](const std::string& name, const auto& f) {
      is_right((name + (reduction == ch::Reduction::mean ? " mean" : " sum")).c_str(), f);
    };
    reduced("mse_loss", [=](const auto& x, const auto& t) { return ch::mse_loss(x, t, reduction); });
    reduced("l1_loss", [=](const auto& x, const auto& t) { return ch::l1_loss(x, t, reduction); });
    reduced("bce_with_logits", [=](const auto& x, const auto& t) { return ch::bce_with_logits(x, t, reduction); });
    reduced("huber_loss", [=](const auto& x, const auto& t) { return ch::huber_loss(x, t, 1, reduction); });
    reduced("smooth_l1_loss", [=](const auto& x, const auto& t) { return ch::smooth_l1_loss(x, t, 1, reduction); });
    reduced("soft_margin_loss",
            [=](const auto& x, const auto& t) { return ch::soft_margin_loss(x, t.value(), reduction); });
    reduced("poisson_nll_loss",
            [=](const auto& x, const auto& t) { return ch::poisson_nll_loss(x, t, {.reduction = reduction}); });
  }
  operator_is_right<2, 2>(group, "kl_div", [](const auto& x, const auto& t) { return ch::kl_div(x, t); });
  group_is_whole(group);
}

}  // namespace binary_test
