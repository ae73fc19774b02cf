/// Normalisation, element-wise functions, reductions, copies.
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/reduction_axes.hpp>

#include "cases.hpp"
namespace {
template <class T = float, int R>
Run ln(S<R> s) {
  const Index c = s.back();
  return op([](const auto& x, const auto& w, const auto& b) { return ch::layer_norm(x, w, b); }, var<R, T>(s, 1),
            var<1, T>({c}, 2), var<1, T>({c}, 3));
}
template <int R>
Run bn(S<R> s, bool training = true) {
  const Index c = s[1];
  auto m = Ten<1>::zeros({c}), v = Ten<1>::ones({c});
  return op(
      [m, v, training](const auto& x, const auto& w, const auto& b) { return ch::batch_norm(x, w, b, m, v, training); },
      var<R>(s, 1), var<1>({c}, 2), var<1>({c}, 3));
}
const bool registered = [] {
  Reg("layer_norm_4096x768", [] { return ln<float, 2>(S<2>{4096, 768}); });
  Reg("layer_norm_16384x64", [] { return ln<float, 2>(S<2>{16384, 64}); });
  Reg("layer_norm_double_1024x768", [] { return ln<double, 2>(S<2>{1024, 768}); });
  Reg("layer_norm_bf16_1024x768", [] { return ln<ch::bf16, 2>(S<2>{1024, 768}); });
  Reg("rms_norm_4096x768", [] {
    return op([](const auto& x, const auto& w) { return ch::rms_norm(x, w, 1e-6); }, var<2>({4096, 768}, 1),
              var<1>({768}, 2));
  });
  Reg("batch_norm2d_32x64x56x56", [] { return bn<4>(S<4>{32, 64, 56, 56}); });
  Reg("batch_norm2d_8x512x7x7", [] { return bn<4>(S<4>{8, 512, 7, 7}); });
  Reg("batch_norm1d_256x1024", [] { return bn<2>(S<2>{256, 1024}); });
  Reg("group_norm32_8x256x28x28", [] {
    return op([](const auto& x, const auto& w, const auto& b) { return ch::group_norm(x, 32, w, b); },
              var<4>({8, 256, 28, 28}, 1), var<1>({256}, 2), var<1>({256}, 3));
  });
  Reg("instance_norm_8x64x64x64", [] {
    return op([](const auto& x, const auto& w, const auto& b) { return ch::instance_norm(x, w, b); },
              var<4>({8, 64, 64, 64}, 1), var<1>({64}, 2), var<1>({64}, 3));
  });
  Reg("softmax_65536x10", [] {
    return op([](const auto& x) { return ch::softmax(x, 1); }, var<2>({65536, 10}, 1, 3));
  });
  Reg("softmax_1024x1000", [] {
    return op([](const auto& x) { return ch::softmax(x, 1); }, var<2>({1024, 1000}, 1, 3));
  });
  Reg("softmax_64x50257", [] {
    return op([](const auto& x) { return ch::softmax(x, 1); }, var<2>({64, 50257}, 1, 3));
  });
  Reg("softmax_axis1_8x21x64x64", [] {
    return op([](const auto& x) { return ch::softmax(x, 1); }, var<4>({8, 21, 64, 64}, 1, 3));
  });
  Reg("softmax_axis0_1000x1024", [] {
    return op([](const auto& x) { return ch::softmax(x, 0); }, var<2>({1000, 1024}, 1, 3));
  });
  Reg("log_softmax_1024x1000", [] {
    return op([](const auto& x) { return ch::log_softmax(x, 1); }, var<2>({1024, 1000}, 1, 3));
  });
  Reg("gelu_4M", [] { return op([](const auto& x) { return ch::gelu(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("gelu_tanh_4M", [] { return op([](const auto& x) { return ch::gelu_tanh(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("silu_4M", [] { return op([](const auto& x) { return ch::silu(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("tanh_4M", [] { return op([](const auto& x) { return ch::tanh(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("exp_4M", [] { return op([](const auto& x) { return ch::exp(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("log_4M", [] { return op([](const auto& x) { return ch::log(x); }, var<2>({1024, 4096}, 1, 0.45, 0.5)); });
  Reg("pow2.3_1M", [] {
    return op([](const auto& x) { return ch::pow(x, 2.3); }, var<2>({1024, 1024}, 1, 0.45, 0.5));
  });
  Reg("sin_4M", [] { return op([](const auto& x) { return ch::sin(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("relu_4M", [] { return op([](const auto& x) { return ch::relu(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("sigmoid_4M", [] { return op([](const auto& x) { return ch::sigmoid(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("leaky_relu_4M", [] {
    return op([](const auto& x) { return ch::leaky_relu(x, 0.2); }, var<2>({1024, 4096}, 1, 3));
  });
  Reg("elu_4M", [] { return op([](const auto& x) { return ch::elu(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("softplus_4M", [] { return op([](const auto& x) { return ch::softplus(x); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("clamp_4M", [] { return op([](const auto& x) { return ch::clamp(x, -1, 1); }, var<2>({1024, 4096}, 1, 3)); });
  Reg("chain_tanh_exp_silu_gelu_256k", [] {
    return op([](const auto& x) { return ch::gelu(ch::silu(ch::exp(ch::tanh(x)))); }, var<2>({256, 1024}, 1, 3));
  });
  Reg("gelu_double_1M", [] {
    return op([](const auto& x) { return ch::gelu(x); }, var<2, double>({1024, 1024}, 1, 3));
  });
  Reg("gelu_bf16_1M", [] {
    return op([](const auto& x) { return ch::gelu(x); }, var<2, ch::bf16>({1024, 1024}, 1, 3));
  });
  Reg("relu_64x64", [] { return op([](const auto& x) { return ch::relu(x); }, var<2>({64, 64}, 1, 3)); });
  Reg("add_bf16_4M", [] {
    return op([](const auto& a, const auto& b) { return a + b; }, var<2, ch::bf16>({1024, 4096}, 1),
              var<2, ch::bf16>({1024, 4096}, 2));
  });
  Reg("add_4M", [] {
    return op([](const auto& a, const auto& b) { return a + b; }, var<2>({1024, 4096}, 1), var<2>({1024, 4096}, 2));
  });
  Reg("mul_4M", [] {
    return op([](const auto& a, const auto& b) { return a * b; }, var<2>({1024, 4096}, 1), var<2>({1024, 4096}, 2));
  });
  Reg("div_4M", [] {
    return op([](const auto& a, const auto& b) { return a / b; }, var<2>({1024, 4096}, 1),
              var<2>({1024, 4096}, 2, 0.5, 2));
  });
  Reg("add_NCHW_C11", [] {
    return op([](const auto& a, const auto& b) { return a + b; }, var<4>({32, 64, 56, 56}, 1), var<3>({64, 1, 1}, 2));
  });
  Reg("mul_NCHW_NC11", [] {
    return op([](const auto& a, const auto& b) { return a * b; }, var<4>({32, 64, 56, 56}, 1),
              var<4>({32, 64, 1, 1}, 2));
  });
  Reg("add_4096x768_768", [] {
    return op([](const auto& a, const auto& b) { return a + b; }, var<2>({4096, 768}, 1), var<1>({768}, 2));
  });
  Reg("mul_4096x768_4096x1", [] {
    return op([](const auto& a, const auto& b) { return a * b; }, var<2>({4096, 768}, 1), var<2>({4096, 1}, 2));
  });
  Reg("outer_add_1024x1_1x1024", [] {
    return op([](const auto& a, const auto& b) { return a + b; }, var<2>({1024, 1}, 1), var<2>({1, 1024}, 2));
  });
  Reg("where_4M", [] {
    auto m = Ten<2, bool>::empty({1024, 4096});
    for (Index i = 0; i < m.numel(); ++i) m.data()[i] = hash32(static_cast<std::uint32_t>(i), 9) & 1;
    return op([m](const auto& a, const auto& b) { return ch::where(m, a, b); }, var<2>({1024, 4096}, 1),
              var<2>({1024, 4096}, 2));
  });
  Reg("masked_fill_4M", [] {
    auto m = Ten<2, bool>::empty({1024, 4096});
    for (Index i = 0; i < m.numel(); ++i) m.data()[i] = hash32(static_cast<std::uint32_t>(i), 9) & 1;
    return op([m](const auto& a) { return ch::masked_fill(a, m, -1.0); }, var<2>({1024, 4096}, 1));
  });
  Reg("cast_f32_bf16_fwd_4M", [] {
    return op([](const auto& x) { return ch::to<ch::bf16>(x); }, rnd<2>({1024, 4096}, 1));
  });
  Reg("cast_bf16_f32_fwd_4M", [] {
    return op([](const auto& x) { return ch::to<float>(x); }, rnd<2, ch::bf16>({1024, 4096}, 1));
  });
  Reg("sum_all_16M", [] { return op([](const auto& x) { return ch::sum(x); }, var<3>({256, 256, 256}, 1)); });
  Reg("sum_axis0_256^3", [] { return op([](const auto& x) { return ch::sum(x, 0); }, var<3>({256, 256, 256}, 1)); });
  Reg("sum_axis1_256^3", [] { return op([](const auto& x) { return ch::sum(x, 1); }, var<3>({256, 256, 256}, 1)); });
  Reg("sum_axis2_256^3", [] { return op([](const auto& x) { return ch::sum(x, 2); }, var<3>({256, 256, 256}, 1)); });
  Reg("mean_axis0_4096x1024", [] { return op([](const auto& x) { return ch::mean(x, 0); }, var<2>({4096, 1024}, 1)); });
  Reg("mean_HW_32x64x56x56", [] {
    return op([](const auto& x) { return ch::mean(x, std::array<Index, 2>{2, 3}); }, var<4>({32, 64, 56, 56}, 1));
  });
  Reg("sum_NHW_32x64x56x56", [] {
    return op([](const auto& x) { return ch::sum(x, std::array<Index, 3>{0, 2, 3}); }, var<4>({32, 64, 56, 56}, 1));
  });
  Reg("var_axis1_4096x1024", [] { return op([](const auto& x) { return ch::var(x, 1); }, var<2>({4096, 1024}, 1)); });
  Reg("amax_axis1_4096x1024", [] { return op([](const auto& x) { return ch::amax(x, 1); }, var<2>({4096, 1024}, 1)); });
  Reg("amax_axis0_4096x1024", [] { return op([](const auto& x) { return ch::amax(x, 0); }, var<2>({4096, 1024}, 1)); });
  Reg("argmax_axis1_4096x1024", [] {
    return op([](const auto& x) { return ch::argmax(x, 1); }, rnd<2>({4096, 1024}, 1));
  });
  Reg("argmax_axis0_4096x1024", [] {
    return op([](const auto& x) { return ch::argmax(x, 0); }, rnd<2>({4096, 1024}, 1));
  });
  Reg("argmax_axis1_4096x10", [] { return op([](const auto& x) { return ch::argmax(x, 1); }, rnd<2>({4096, 10}, 1)); });
  Reg("logsumexp_axis1_4096x1024", [] {
    return op([](const auto& x) { return ch::logsumexp(x, 1); }, var<2>({4096, 1024}, 1, 3));
  });
  Reg("cumsum_axis1_4096x1024", [] {
    return op([](const auto& x) { return ch::cumsum(x, 1); }, var<2>({4096, 1024}, 1));
  });
  Reg("cumsum_axis0_4096x1024", [] {
    return op([](const auto& x) { return ch::cumsum(x, 0); }, var<2>({4096, 1024}, 1));
  });
  Reg("cumprod_axis1_1024x256", [] {
    return op([](const auto& x) { return ch::cumprod(x, 1); }, var<2>({1024, 256}, 1, 0.1, 1));
  });
  Reg("permute_8x128x12x64_0213", [] {
    return op([](const auto& x) { return ch::permute(x, S<4>{0, 2, 1, 3}); }, var<4>({8, 128, 12, 64}, 1));
  });
  Reg("permute_nchw_nhwc_32x64x56x56", [] {
    return op([](const auto& x) { return ch::permute(x, S<4>{0, 2, 3, 1}); }, var<4>({32, 64, 56, 56}, 1));
  });
  Reg("transpose_2048x2048", [] {
    return op([](const auto& x) { return ch::transpose(x, 0, 1); }, var<2>({2048, 2048}, 1));
  });
  Reg("permute_5d_reverse", [] {
    return op([](const auto& x) { return ch::permute(x, S<5>{4, 3, 2, 1, 0}); }, var<5>({16, 24, 12, 20, 18}, 1));
  });
  Reg("concat_ax1_8x64x56x56_x2", [] {
    return op([](const auto& a, const auto& b) { return ch::concat(1, a, b); }, var<4>({8, 64, 56, 56}, 1),
              var<4>({8, 64, 56, 56}, 2));
  });
  Reg("concat_last_4096x256_x2", [] {
    return op([](const auto& a, const auto& b) { return ch::concat(1, a, b); }, var<2>({4096, 256}, 1),
              var<2>({4096, 256}, 2));
  });
  Reg("concat_last_65536x4_x2", [] {
    return op([](const auto& a, const auto& b) { return ch::concat(1, a, b); }, var<2>({65536, 4}, 1),
              var<2>({65536, 4}, 2));
  });
  Reg("slice_ax1_8x256x56x56_half", [] {
    return op([](const auto& x) { return ch::slice(x, 1, 64, 192); }, var<4>({8, 256, 56, 56}, 1));
  });
  Reg("slice_last_4096x1024_half", [] {
    return op([](const auto& x) { return ch::slice(x, 1, 256, 768); }, var<2>({4096, 1024}, 1));
  });
  Reg("slice_last_1M_x3_one", [] {
    return op([](const auto& x) { return ch::slice(x, 1, 1, 2); }, var<2>({1000000, 3}, 1));
  });
  Reg("gather_4096x1000_k16", [] {
    const auto i = ints<2>({4096, 16}, 5, 1000);
    return op([i](const auto& x) { return ch::gather(x, 1, i); }, var<2>({4096, 1000}, 1));
  });
  Reg("index_select_ax0_50000x256_4096", [] {
    const auto i = ints<1>({4096}, 5, 50000);
    return op([i](const auto& x) { return ch::index_select(x, 0, i); }, var<2>({50000, 256}, 1));
  });
  Reg("index_select_ax1_4096x1024_512", [] {
    const auto i = ints<1>({512}, 5, 1024);
    return op([i](const auto& x) { return ch::index_select(x, 1, i); }, var<2>({4096, 1024}, 1));
  });
  Reg("dropout_4M", [] { return op([](const auto& x) { return ch::dropout(x, 0.5); }, var<2>({1024, 4096}, 1)); });
  Reg("dropout_p0.1_4M", [] { return op([](const auto& x) { return ch::dropout(x, 0.1); }, var<2>({1024, 4096}, 1)); });
  return true;
}();
}  // namespace
