// Second derivatives of the operators are PyTorch's: see tests/golden/second_orders.py.
#include <chorus/nn/recurrent.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/attention_packed.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/convolution1d.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/ctc_loss.hpp>
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/distances.hpp>
#include <chorus/ops/einsum.hpp>
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/fft.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/images.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/linalg.hpp>
#include <chorus/ops/lists.hpp>
#include <chorus/ops/matrix_parts.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/order_statistics.hpp>
#include <chorus/ops/padding_modes.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>
#include <chorus/ops/special_functions.hpp>
#include <chorus/ops/transposed_convolution.hpp>
#include <chorus/ops/truth.hpp>
#include <cmath>
#include <golden/second_orders.hpp>
#include <string_view>

#include "check_operator.hpp"

namespace second_orders_test {

using Row = ch::GraphVariable<double, 1>;
using Labels = ch::Tensor<std::int64_t, 1>;

Row second(const Row& x, const Row& y) {
  auto v = Tensor<1>::empty(y.shape()), w = Tensor<1>::empty(x.shape());
  for (Index i = 0; i < v.numel(); ++i) v(i) = 0.5 + static_cast<double>(i * 7 % 11) / 10;
  for (Index i = 0; i < w.numel(); ++i) w(i) = 1 - static_cast<double>(i * 5 % 13) / 8;
  const auto first = ch::grad(ch::sum(y * y * v), x, {.create_graph = true});
  return ch::grad(ch::sum(first * w), x);
}

/// The inputs of one operator, one after the other, and what its second derivatives have to be.
class Case {
 public:
  explicit Case(std::string_view name) : golden_(golden_second_orders::cases.at(name)) {}

  template <class... Size>
  auto operator()(Size... sizes) {
    const Index from = at_;
    at_ += (sizes * ...);
    return ch::reshape(ch::slice(x_, 0, from, at_), std::array<Index, sizeof...(Size)>{sizes...});
  }
  void is(const Row& y) const { CHECK(distance(values(second(x_, y).value()), golden_.second) < 1e-9); }
  template <int Rank>
  void is(const ch::GraphVariable<double, Rank>& y) const {
    is(ch::reshape(y, Shape<1>{-1}));
  }

 private:
  const golden_second_orders::Numbers& golden_;
  const Row x_{Tensor<1>::from(golden_.x, {static_cast<Index>(golden_.x.size())}), true};
  Index at_ = 0;
};

// An operator of inputs of the shapes given in brackets. (As functions they would take twice the time to compile.)
#define CASE(NAME, INPUT, ...)                 \
  {                                            \
    INFO(NAME);                                \
    Case in(NAME);                             \
    const auto x = in INPUT;                   \
    in.is(__VA_ARGS__);                        \
  }
#define CASE2(NAME, FIRST, SECOND, ...)        \
  {                                            \
    INFO(NAME);                                \
    Case in(NAME);                             \
    const auto a = in FIRST;                   \
    const auto b = in SECOND;                  \
    in.is(__VA_ARGS__);                        \
  }
#define CASE3(NAME, FIRST, SECOND, THIRD, ...) \
  {                                            \
    INFO(NAME);                                \
    Case in(NAME);                             \
    const auto a = in FIRST;                   \
    const auto b = in SECOND;                  \
    const auto c = in THIRD;                   \
    in.is(__VA_ARGS__);                        \
  }

const auto signs = Tensor<1>::from({1, -1, 1, 1, -1, -1, 1}, {7});
const auto some = ch::Tensor<bool, 1>::from({true, false, false, true}, {4});
const auto places = ch::Tensor<std::int64_t, 2>::from({2, 0, 0, 1}, {2, 2});
const auto twice = ch::Tensor<std::int64_t, 2>::from({2, 2, 0, 1}, {2, 2});

TEST_CASE("second derivatives of element-wise operators are PyTorch's") {
  CASE("abs", (7), ch::abs(x));
  CASE("neg", (7), -x);
  CASE("clamp", (7), ch::clamp(x, -0.7, 1.1));
  CASE("hardtanh", (7), ch::hardtanh(x));
  CASE("relu6", (7), ch::relu6(x * 4));
  CASE("hardsigmoid", (7), ch::hardsigmoid(x * 2));
  CASE("hardswish", (7), ch::hardswish(x * 2));
  CASE("leaky_relu", (7), ch::leaky_relu(x, 0.2));
  CASE("elu", (7), ch::elu(x, 1.5));
  CASE("celu", (7), ch::celu(x, 1.5));
  CASE("selu", (7), ch::selu(x));
  CASE("hardshrink", (7), ch::hardshrink(x));
  CASE("softshrink", (7), ch::softshrink(x));
  CASE("softsign", (7), ch::softsign(x));
  CASE("tanhshrink", (7), ch::tanhshrink(x));
  CASE("threshold", (7), ch::threshold(x, 0.3, -1));
  CASE("lgamma", (7), ch::lgamma(x));
  CASE("digamma", (7), ch::digamma(x));
  CASE("nan_to_num", (7), ch::nan_to_num(x));
  CASE("to", (7), ch::to<double>(x));
  CASE("gelu", (7), ch::gelu(x));
  CASE("gelu_tanh", (7), ch::gelu_tanh(x));
  CASE("softplus", (7), ch::softplus(x, 2));
  CASE("pow_scalar", (7), ch::pow(x, 1.7));
  CASE2("prelu", (2, 3, 2), (3), ch::prelu(a, b));
  CASE("glu", (2, 4), ch::glu(x, 1));
  CASE2("add", (2, 4), (4), a + b);
  CASE2("sub", (2, 4), (4), a - b);
  CASE2("mul", (2, 4), (4), a * b);
  CASE2("div", (2, 4), (4), a / b);
  CASE2("pow", (2, 4), (4), ch::pow(a, b));
  CASE2("atan2", (2, 4), (4), ch::atan2(a, b));
  CASE2("logaddexp", (2, 4), (4), ch::logaddexp(a, b));
  CASE2("maximum", (2, 4), (4), ch::maximum(a, b));
  CASE2("minimum", (2, 4), (4), ch::minimum(a, b));
  CASE2("where", (2, 4), (4), ch::where(some, a, b));
  CASE("masked_fill", (2, 4), ch::masked_fill(x, some, 3));
}

TEST_CASE("second derivatives of losses are PyTorch's") {
  CASE2("mse_loss_mean", (7), (7), ch::mse_loss(a, b));
  CASE2("mse_loss_sum", (7), (7), ch::mse_loss(a, b, ch::Reduction::sum));
  CASE2("mse_loss_none", (7), (7), ch::mse_loss_per_element(a, b));
  CASE2("l1_loss", (7), (7), ch::l1_loss(a, b));
  CASE2("huber_loss", (7), (7), ch::huber_loss(a, b, 0.8));
  CASE2("smooth_l1_loss", (7), (7), ch::smooth_l1_loss(a, b, 0.8));
  CASE2("kl_div", (2, 4), (2, 4), ch::kl_div(a, b));
  CASE2("bce_with_logits", (7), (7), ch::bce_with_logits(a, b));
  const auto weights = Tensor<1>::from({0.5, 1, 2, 0.25, 1, 3, 0.1}, {7});
  CASE2("bce_with_logits_weights", (7), (7), ch::bce_with_logits(a, b, weights, weights + 1.0));
  CASE("hinge_embedding_loss", (7), ch::hinge_embedding_loss(x, signs));
  CASE2("margin_ranking_loss", (7), (7), ch::margin_ranking_loss(a, b, signs, 0.4));
  CASE("soft_margin_loss", (7), ch::soft_margin_loss(x, signs));
  CASE3("gaussian_nll_loss", (7), (7), (7), ch::gaussian_nll_loss(a, b, c));
  CASE2("poisson_nll_loss", (7), (7), ch::poisson_nll_loss(a, b));
  CASE3("triplet_margin_loss", (2, 4), (2, 4), (2, 4), ch::triplet_margin_loss(a, b, c, {.margin = 2}));
  CASE2("cosine_embedding_loss", (2, 4), (2, 4), ch::cosine_embedding_loss(a, b, signs.slice(0, 0, 2), 0.1));
  CASE2("cosine_similarity", (2, 4), (2, 4), ch::cosine_similarity(a, b));
  const auto labels = Labels::from({2, 1, 0}, {3});
  CASE("cross_entropy", (3, 4), ch::cross_entropy(x, Labels::from({2, -100, 0}, {3}), {.label_smoothing = 0.2}));
  CASE("cross_entropy_weight", (3, 4), ch::cross_entropy(x, labels, Tensor<1>::from({0.5, 1, 2, 0.25}, {4})));
  const auto image = ch::Tensor<std::int64_t, 3>::from({2, 1, 0, 2}, {1, 2, 2});
  CASE("cross_entropy_images", (1, 3, 2, 2), ch::cross_entropy(x, image));
  CASE2("cross_entropy_probabilities", (2, 4), (2, 4), ch::cross_entropy(a, b));
  CASE("nll_loss", (3, 4), ch::nll_loss(x, labels));
}

TEST_CASE("second derivatives of reductions and of what sorts are PyTorch's") {
  CASE("sum", (2, 3, 2), ch::sum(x, 1));
  CASE("mean", (2, 3, 2), ch::mean(x));
  CASE("var", (2, 3, 2), ch::var(x, 1));
  CASE("var_axes", (2, 3, 2), ch::var(x, std::array<Index, 2>{0, 2}));
  CASE("std", (2, 3, 2), ch::std(x, 1));
  CASE("norm_1", (2, 3, 2), ch::norm(x, 1, 1));
  CASE("norm_2", (2, 3, 2), ch::norm(x, 2, 1));
  CASE("norm_3", (2, 3, 2), ch::norm(x, 3, 1));
  CASE("norm_inf", (2, 3, 2), ch::norm(x, INFINITY, 1));
  CASE("amax", (2, 3, 2), ch::amax(x, 1));
  CASE("amin", (2, 3, 2), ch::amin(x, 1));
  CASE("prod", (2, 3, 2), ch::prod(x, 1));
  CASE("cumsum", (2, 3, 2), ch::cumsum(x, 1));
  CASE("cumprod", (2, 3, 2), ch::cumprod(x, 1));
  CASE("logsumexp", (2, 3, 2), ch::logsumexp(x, 1));
  CASE("softmax", (2, 3, 2), ch::softmax(x, 1));
  CASE("log_softmax", (2, 3, 2), ch::log_softmax(x, 1));
  CASE("median", (2, 3, 2), ch::median(x, 1).values);
  CASE("quantile", (2, 3, 2), ch::quantile(x, 0.3, 1));
  CASE("sort", (2, 3, 2), ch::sort(x, 1).values);
  CASE("topk", (2, 3, 2), ch::topk(x, 2, 1).values);
}

TEST_CASE("second derivatives of shapes and of picking are PyTorch's") {
  CASE("permute", (2, 3, 2), ch::permute(x, Shape<3>{2, 0, 1}));
  CASE("expand", (3, 1), ch::expand(x, Shape<2>{3, 4}));
  CASE("slice", (2, 3, 2), ch::slice(x, 1, 1, 3));
  CASE2("concat", (2, 4), (2, 2), ch::concat(1, a, b));
  CASE2("concat_list", (2, 4), (2, 2), ch::concat(1, std::vector{a, b, a}));
  CASE2("stack_list", (7), (7), ch::stack(1, std::vector{a, b}));
  CASE("split", (2, 3, 2), ch::split(x, 2, 1)[1]);
  CASE("unbind", (2, 3, 2), ch::unbind(x, 1)[2]);
  CASE2("meshgrid", (2), (3), std::get<1>(ch::meshgrid(a, b)));
  CASE("flip", (2, 3, 2), ch::flip(x, 1));
  CASE("roll", (2, 3, 2), ch::roll(x, 1, 1));
  CASE("repeat", (2, 2), ch::repeat(x, std::array<Index, 2>{2, 3}));
  CASE("tril", (3, 3), ch::tril(x));
  CASE("diag", (3, 3), ch::diag(x));
  CASE("pad2d", (2, 2, 3), ch::pad2d(x, {.left = 1, .bottom = 2}, 0.5));
  CASE("pad2d_reflect", (1, 1, 2, 3), ch::pad2d(x, {.left = 1, .bottom = 1}, ch::PaddingMode::reflect));
  CASE("index_select", (2, 3, 2), ch::index_select(x, 1, Labels::from({2, 0, 2}, {3})));
  CASE("gather", (2, 3), ch::gather(x, 1, places));
  CASE("embedding", (3, 2), ch::embedding(x, Labels::from({2, 0, 2}, {3})));
  CASE2("scatter", (2, 3), (2, 2), ch::scatter(a, 1, places, b));
  CASE2("scatter_add", (2, 3), (2, 2), ch::scatter_add(a, 1, twice, b));
  CASE2("index_add", (2, 3), (2, 2), ch::index_add(a, 1, Labels::from({2, 2}, {2}), b));
  using How = ch::ScatterReduction;
  for (const auto& [name, how] : {std::pair{"scatter_reduce_sum", How::sum}, {"scatter_reduce_mean", How::mean},
                                  {"scatter_reduce_prod", How::prod}, {"scatter_reduce_amax", How::amax},
                                  {"scatter_reduce_amin", How::amin}})
    CASE2(name, (2, 3), (2, 2), ch::scatter_reduce(a, 1, twice, b, how));
  CASE("masked_select", (2, 4), ch::masked_select(x, some));
}

TEST_CASE("second derivatives of products are PyTorch's") {
  CASE2("matmul", (2, 3), (3, 2), ch::matmul(a, b));
  CASE2("bmm", (2, 3, 2), (2, 2, 2), ch::matmul(a, b));
  CASE3("linear", (3, 2), (2, 2), (2), ch::linear(a, b, c));
  CASE2("einsum", (2, 3, 2), (2, 2), ch::einsum<"bij,kj->bik">(a, b));
  CASE2("outer", (2), (3), ch::outer(a, b));
  CASE2("dot", (7), (7), ch::dot(a, b));
  CASE2("cross", (2, 3), (2, 3), ch::cross(a, b));
  CASE2("cdist_1", (2, 3), (3, 3), ch::cdist(a, b, 1));
  CASE2("cdist_2", (2, 3), (3, 3), ch::cdist(a, b, 2));
  CASE2("cdist_3", (2, 3), (3, 3), ch::cdist(a, b, 3));
  CASE3("conv1d", (1, 2, 4), (2, 2, 3), (2), ch::conv1d(a, b, c, {.padding = 1}));
  CASE3("conv2d", (1, 1, 4, 4), (2, 1, 3, 3), (2), ch::conv2d(a, b, c, {.stride = 2, .padding = 1}));
  CASE3("conv3d", (1, 1, 2, 3, 2), (1, 1, 2, 2, 1), (1), ch::conv3d(a, b, c));
  CASE2("conv_transpose1d", (1, 2, 3), (2, 1, 2), ch::conv_transpose1d(a, b, {.stride = 2}));
  CASE2("conv_transpose2d", (1, 1, 2, 3), (1, 2, 2, 2), ch::conv_transpose2d(a, b, {.stride = 2}));
  CASE3("attention", (1, 3, 2), (1, 3, 2), (1, 3, 2), ch::scaled_dot_product_attention(a, b, c, true));
}

TEST_CASE("second derivatives of operators of images, and of normalisation, are PyTorch's") {
  CASE("max_pool1d", (1, 2, 4), ch::max_pool1d(x, 2));
  CASE("max_pool2d", (1, 2, 4, 4), ch::max_pool2d(x, 3, {.stride = 1, .padding = 1}));
  CASE("avg_pool2d", (1, 2, 4, 4), ch::avg_pool2d(x, 3, {.stride = 2, .padding = 1}));
  CASE("adaptive_avg_pool2d", (1, 2, 4, 4), ch::adaptive_avg_pool2d(x, {3, 2}));
  CASE("adaptive_max_pool2d", (1, 2, 4, 4), ch::adaptive_max_pool2d(x, {3, 2}));
  CASE("global_avg_pool", (1, 2, 4, 4), ch::global_avg_pool(x));
  CASE("upsample_nearest2d", (1, 1, 2, 3), ch::upsample_nearest2d(x, 2));
  CASE("upsample_bilinear2d", (1, 1, 2, 3), ch::upsample_bilinear2d(x, {3, 5}));
  CASE("pixel_shuffle", (1, 4, 2, 1), ch::pixel_shuffle(x, 2));
  CASE("unfold", (1, 1, 3, 3), ch::unfold(x, 2));
  CASE2("grid_sample", (1, 2, 3, 3), (1, 2, 1, 2), ch::grid_sample(a, b));
  CASE3("layer_norm", (2, 4), (4), (4), ch::layer_norm(a, b, c));
  CASE3("group_norm", (2, 4, 2), (4), (4), ch::group_norm(a, 2, b, c));
  CASE3("instance_norm", (2, 2, 3), (2), (2), ch::instance_norm(a, b, c));
  CASE2("rms_norm", (2, 4), (4), ch::rms_norm(a, b));
  auto mean = Tensor<1>::zeros({3}), var = Tensor<1>::ones({3});
  CASE3("batch_norm", (4, 3), (3), (3), ch::batch_norm(a, b, c, mean, var, true));
}

TEST_CASE("second derivatives of recurrent layers, linear algebra and Fourier transforms are PyTorch's") {
  {
    INFO("lstm");
    Case in("lstm");
    const auto x = in(1, 2, 2);
    const auto wi = in(8, 2), wh = in(8, 2);
    const auto bi = in(8), bh = in(8);
    in.is(ch::lstm(x, wi, wh, bi, bh).output);
  }
  {
    INFO("gru");
    Case in("gru");
    const auto x = in(1, 2, 2);
    const auto wi = in(6, 2), wh = in(6, 2);
    const auto bi = in(6), bh = in(6);
    in.is(ch::gru(x, wi, wh, bi, bh).output);
  }
  namespace la = ch::linalg;
  const auto symmetric = [](const auto& x, double diagonal) {
    return (x + ch::transpose(x, 1, 2)) * 0.5 + ch::eye<double>(3) * diagonal;
  };
  CASE2("solve", (1, 3, 3), (1, 3, 2), la::solve(a, b));
  CASE("inverse", (1, 3, 3), la::inverse(x));
  CASE("det", (1, 3, 3), la::det(x));
  CASE("cholesky", (1, 3, 3), la::cholesky(symmetric(x, 6)));
  CASE("qr_q", (1, 4, 3), la::qr(x).q);
  CASE("qr_r", (1, 4, 3), la::qr(x).r);
  CASE("svd_u", (1, 4, 3), la::svd(x).u);
  CASE("svd_s", (1, 4, 3), la::svd(x).s);
  CASE("svd_vh", (1, 2, 3), la::svd(x).vh);
  CASE("eigh_values", (1, 3, 3), la::eigh(symmetric(x, 0)).eigenvalues);
  CASE("eigh_vectors", (1, 3, 3), la::eigh(symmetric(x, 0)).eigenvectors);
  CASE("rfft", (2, 5), ch::fft::rfft(x));
  CASE("irfft", (3, 2), ch::fft::irfft(x));
}

TEST_CASE("what has no second derivative is refused by name") {
  const ch::GraphVariable x(numbers<3>({3, 1, 2}, 1), true);
  const auto second_of = [&](const auto& loss) { return ch::grad(loss, x, {.create_graph = true}); };
  const auto one = Labels::from({1}, {1}), three = Labels::from({3}, {1});
  CHECK(message_of<ch::UsageError>([&] {
          second_of(ch::ctc_loss(ch::log_softmax(x, 2), ch::Tensor<std::int64_t, 2>::from({1}, {1, 1}), three, one));
        }) == "grad: create_graph: 'ctc_loss' has no derivative of this order");
  const ch::GraphVariable factors(Tensor<2>::from({2, 0, 3}, {1, 3}), true);
  CHECK(message_of<ch::UsageError>([&] {
          const auto y = ch::scatter_reduce(factors, 1, ch::Tensor<std::int64_t, 2>::from({0}, {1, 1}),
                                            Tensor<2>::from({4}, {1, 1}), ch::ScatterReduction::prod);
          ch::grad(ch::sum(y), factors, {.create_graph = true});
        }) == "grad: create_graph: 'scatter_reduce': expected factors other than 0, got a 0");
}

}  // namespace second_orders_test

#undef CASE
#undef CASE2
#undef CASE3
