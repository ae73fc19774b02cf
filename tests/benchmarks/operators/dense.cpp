/// Products, attention, recurrent layers, losses.
#include <chorus/nn/recurrent.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/einsum.hpp>

#include "cases.hpp"
namespace {
template <class T = float>
Run lin(Index m, Index k, Index n) {
  return op([](const auto& x, const auto& w, const auto& b) { return ch::linear(x, w, b); }, var<2, T>({m, k}, 1),
            var<2, T>({n, k}, 2, 0.1), var<1, T>({n}, 3));
}
auto mm = [](const auto& a, const auto& b) { return ch::matmul(a, b); };
Ten<2, bool> band_mask(Index n) {
  auto m = Ten<2, bool>::empty({n, n});
  for (Index i = 0; i < n; ++i)
    for (Index j = 0; j < n; ++j) m.data()[i * n + j] = (i > j ? i - j : j - i) <= 256;
  return m;
}
template <class Layer, int gates>
Run rnn(Index time, Index batch, Index in, Index hidden) {
  struct State {
    Layer layer;
    Var<3> x;
    State(Index i, Index h, Index t, Index b) : layer(i, h), x(var<3>({t, b, i}, 1)) {}
  };
  auto st = std::make_shared<State>(in, hidden, time, batch);
  fill_parameters(st->layer);
  auto params = ch::nn::named_parameters<ch::Cpu>(st->layer);
  const auto dy = rnd<3>({time, batch, hidden}, 99);
  Run r;
  r.step = [=] {
    st->x.zero_grad();
    for (auto& p : params) p.parameter->set_grad_arrived(false);
    st->layer(st->x).output.backward(dy);
  };
  r.outputs = [=](Sums& s) {
    st->x.zero_grad();
    for (auto& p : params) p.parameter->set_grad_arrived(false);
    const auto y = st->layer(st->x).output;
    s.push_back(checksum(y.value().data(), y.numel()));
    y.backward(dy);
    grad_sum(s, st->x);
    for (auto& p : params) s.push_back(checksum(static_cast<float*>(p.parameter->grad_data()), p.parameter->count()));
  };
  return r;
}
template <class Layer>
Run rnn_fwd(Index time, Index batch, Index in, Index hidden) {
  struct State {
    Layer layer;
    Ten<3> x;
    State(Index i, Index h, Index t, Index b) : layer(i, h), x(rnd<3>({t, b, i}, 1)) {}
  };
  auto st = std::make_shared<State>(in, hidden, time, batch);
  fill_parameters(st->layer);
  Run r;
  r.step = [=] {
    const ch::NoGrad no;
    auto y = st->layer(st->x).output;
    (void)y;
  };
  r.outputs = [=](Sums& s) {
    const ch::NoGrad no;
    const auto y = st->layer(st->x).output;
    s.push_back(checksum(y.value().data(), y.numel()));
  };
  return r;
}
const Reg all[] = {
    {"linear_64x64x64", [] { return lin(64, 64, 64); }},
    {"linear_256x4096x4096", [] { return lin(256, 4096, 4096); }},
    {"linear_37x1001x513", [] { return lin(37, 1001, 513); }},
    {"linear_1024x768x3072", [] { return lin(1024, 768, 3072); }},
    {"linear_8x2048x1000", [] { return lin(8, 2048, 1000); }},
    {"linear_double_128x512x512", [] { return lin<double>(128, 512, 512); }},
    {"linear_bf16_256x1024x1024", [] { return lin<ch::bf16>(256, 1024, 1024); }},
    {"linear_fwd_1x1024x1024",
     [] {
       return op([](const auto& x, const auto& w, const auto& b) { return ch::linear(x, w, b); }, rnd<2>({1, 1024}, 1),
                 rnd<2>({1024, 1024}, 2, 0.1), rnd<1>({1024}, 3));
     }},
    {"matmul_fwd_1024",
     [] {
       return op(mm, rnd<2>({1024, 1024}, 1), rnd<2>({1024, 1024}, 2));
     }},
    {"bmm_64x128x128",
     [] {
       return op(mm, var<3>({64, 128, 128}, 1), var<3>({64, 128, 128}, 2));
     }},
    {"bmm_512x16x16",
     [] {
       return op(mm, var<3>({512, 16, 16}, 1), var<3>({512, 16, 16}, 2));
     }},
    {"bmm_broadcast_32x64x64_1x64x64",
     [] {
       return op(mm, var<3>({32, 64, 64}, 1), var<3>({1, 64, 64}, 2));
     }},
    {"einsum_bhqd_bhkd_bhqk",
     [] {
       return op([](const auto& a, const auto& b) { return ch::einsum<"bhqd,bhkd->bhqk">(a, b); },
                 var<4>({8, 8, 128, 64}, 1), var<4>({8, 8, 128, 64}, 2));
     }},
    {"einsum_bqhd_bkhd_bhqk",
     [] {
       return op([](const auto& a, const auto& b) { return ch::einsum<"bqhd,bkhd->bhqk">(a, b); },
                 var<4>({8, 128, 8, 64}, 1), var<4>({8, 128, 8, 64}, 2));
     }},
    {"einsum_bij_jk_bik",
     [] {
       return op([](const auto& a, const auto& b) { return ch::einsum<"bij,jk->bik">(a, b); }, var<3>({16, 64, 256}, 1),
                 var<2>({256, 256}, 2));
     }},
    {"einsum_bi_bj_ij",
     [] {
       return op([](const auto& a, const auto& b) { return ch::einsum<"bi,bj->ij">(a, b); }, var<2>({512, 256}, 1),
                 var<2>({512, 256}, 2));
     }},
    {"einsum_bi_bi_b",
     [] {
       return op([](const auto& a, const auto& b) { return ch::einsum<"bi,bi->b">(a, b); }, var<2>({4096, 256}, 1),
                 var<2>({4096, 256}, 2));
     }},
    {"attn_causal_T1024_h12_d64",
     [] {
       return op(
           [](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v, true); },
           var<4>({1, 12, 1024, 64}, 1), var<4>({1, 12, 1024, 64}, 2), var<4>({1, 12, 1024, 64}, 3));
     }},
    {"attn_full_T1024_h12_d64",
     [] {
       return op([](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v); },
                 var<4>({1, 12, 1024, 64}, 1), var<4>({1, 12, 1024, 64}, 2), var<4>({1, 12, 1024, 64}, 3));
     }},
    {"attn_mask_T1024_h12_d64",
     [] {
       const auto m = band_mask(1024);
       return op(
           [m](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v, m); },
           var<4>({1, 12, 1024, 64}, 1), var<4>({1, 12, 1024, 64}, 2), var<4>({1, 12, 1024, 64}, 3));
     }},
    {"attn_dropout_causal_T1024_h12_d64",
     [] {
       return op(
           [](const auto& q, const auto& k, const auto& v) {
             return ch::scaled_dot_product_attention(q, k, v, ch::AttentionOptions{.causal = true, .dropout = 0.1});
           },
           var<4>({1, 12, 1024, 64}, 1), var<4>({1, 12, 1024, 64}, 2), var<4>({1, 12, 1024, 64}, 3));
     }},
    {"attn_causal_T128_b8h8_d64",
     [] {
       return op(
           [](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v, true); },
           var<4>({8, 8, 128, 64}, 1), var<4>({8, 8, 128, 64}, 2), var<4>({8, 8, 128, 64}, 3));
     }},
    {"attn_decode_fwd_q1_T1024_h12_d64",
     [] {
       return op([](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v); },
                 rnd<4>({1, 12, 1, 64}, 1), rnd<4>({1, 12, 1024, 64}, 2), rnd<4>({1, 12, 1024, 64}, 3));
     }},
    {"lstm_T128_b32_256", [] { return rnn<ch::nn::LSTM<ch::Cpu>, 4>(128, 32, 256, 256); }},
    {"gru_T128_b32_256", [] { return rnn<ch::nn::GRU<ch::Cpu>, 3>(128, 32, 256, 256); }},
    {"lstm_fwd_T128_b1_256", [] { return rnn_fwd<ch::nn::LSTM<ch::Cpu>>(128, 1, 256, 256); }},
    {"embedding_50kx256_32x128",
     [] {
       const auto i = ints<2>({32, 128}, 5, 50000);
       return op([i](const auto& w) { return ch::embedding(w, i); }, var<2>({50000, 256}, 1));
     }},
    {"ce_512x50257",
     [] {
       const auto t = ints<1>({512}, 5, 50257);
       return op([t](const auto& x) { return ch::cross_entropy(x, t); }, var<2>({512, 50257}, 1));
     }},
    {"ce_128x10",
     [] {
       const auto t = ints<1>({128}, 5, 10);
       return op([t](const auto& x) { return ch::cross_entropy(x, t); }, var<2>({128, 10}, 1));
     }},
    {"ce_seg_8x21x64x64",
     [] {
       const auto t = ints<3>({8, 64, 64}, 5, 21);
       return op([t](const auto& x) { return ch::cross_entropy(x, t); }, var<4>({8, 21, 64, 64}, 1));
     }},
    {"mse_1M",
     [] {
       const auto t = rnd<2>({1024, 1024}, 5);
       return op([t](const auto& x) { return ch::mse_loss(x, t); }, var<2>({1024, 1024}, 1));
     }},
    {"bce_logits_1M",
     [] {
       const auto t = rnd<2>({1024, 1024}, 5, 0.5, 0.5);
       return op([t](const auto& x) { return ch::bce_with_logits(x, t); }, var<2>({1024, 1024}, 1));
     }},
};
}  // namespace
