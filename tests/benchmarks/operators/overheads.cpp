/// Chains of small operations, where calls count and not numbers.
#include <span>

#include "cases.hpp"
namespace {
template <int N, class F, class X>
Run repeat_fwd(F f, X x) {
  return {[f, x] {
            for (int i = 0; i < N; ++i) {
              auto y = f(x);
              (void)y;
            }
          },
          {}};
}
template <int N, class F, class X>
Run chain_fwdbwd(F f, X x) {
  auto y0 = f(x);
  auto dy = rnd<decltype(y0)::rank>(y0.shape(), 99);
  return {[=] {
            x.zero_grad();
            auto y = f(x);
            for (int i = 1; i < N; ++i) y = f(y);
            y.backward(dy);
          },
          {}};
}
const Reg all[] = {
    {"O_add_nograd_n1",
     [] {
       const auto b = rnd<1>({1}, 2);
       return repeat_fwd<100>([b](const auto& x) { return x + b; }, rnd<1>({1}, 1));
     }},
    {"O_add_nograd_n64",
     [] {
       const auto b = rnd<1>({64}, 2);
       return repeat_fwd<100>([b](const auto& x) { return x + b; }, rnd<1>({64}, 1));
     }},
    {"O_add_nograd_n1024",
     [] {
       const auto b = rnd<1>({1024}, 2);
       return repeat_fwd<100>([b](const auto& x) { return x + b; }, rnd<1>({1024}, 1));
     }},
    {"O_addrow_nograd_16x16",
     [] {
       const auto b = rnd<1>({16}, 2);
       return repeat_fwd<100>([b](const auto& x) { return x + b; }, rnd<2>({16, 16}, 1));
     }},
    {"O_add_chain_fwdbwd_n64",
     [] {
       const auto b = rnd<1>({64}, 2);
       return chain_fwdbwd<100>([b](const auto& x) { return x + b; }, var<1>({64}, 1));
     }},
    {"O_relu_chain_fwdbwd_n64",
     [] { return chain_fwdbwd<100>([](const auto& x) { return ch::relu(x); }, var<1>({64}, 1)); }},
    {"O_muladd_self_chain_fwdbwd_n64",
     [] { return chain_fwdbwd<100>([](const auto& x) { return x * 0.5 + x; }, var<1>({64}, 1)); }},
    {"O_linear_chain_fwdbwd_8x8x8",
     [] {
       const auto w = rnd<2>({8, 8}, 2, 0.3);
       const auto b = rnd<1>({8}, 3);
       return chain_fwdbwd<100>([w, b](const auto& x) { return ch::linear(x, w, b); }, var<2>({8, 8}, 1));
     }},
    {"O_linear_chain_fwdbwd_1x64x64",
     [] {
       const auto w = rnd<2>({64, 64}, 2, 0.3);
       const auto b = rnd<1>({64}, 3);
       return chain_fwdbwd<100>([w, b](const auto& x) { return ch::linear(x, w, b); }, var<2>({1, 64}, 1));
     }},
    {"O_softmax_nograd_8x16",
     [] {
       return repeat_fwd<100>([](const auto& x) { return ch::softmax(x, 1); }, rnd<2>({8, 16}, 1));
     }},
    {"O_layernorm_nograd_8x64",
     [] {
       const auto w = rnd<1>({64}, 2), b = rnd<1>({64}, 3);
       return repeat_fwd<100>([w, b](const auto& x) { return ch::layer_norm(x, w, b); }, rnd<2>({8, 64}, 1));
     }},
    {"O_sum_nograd_n64", [] { return repeat_fwd<100>([](const auto& x) { return ch::sum(x); }, rnd<1>({64}, 1)); }},
    {"O_reshape_nograd",
     [] {
       return repeat_fwd<100>([](const auto& x) { return ch::reshape(x, S<2>{8, 8}); }, rnd<1>({64}, 1));
     }},
    {"O_slice_nograd",
     [] {
       return repeat_fwd<100>([](const auto& x) { return ch::slice(x, 0, 16, 32); }, rnd<2>({64, 4}, 1));
     }},
    {"O_transpose_nograd_8x8",
     [] {
       return repeat_fwd<100>([](const auto& x) { return ch::transpose(x, 0, 1); }, rnd<2>({8, 8}, 1));
     }},
    {"O_conv2d_nograd_1x3x8x8",
     [] {
       const auto w = rnd<4>({4, 3, 3, 3}, 2);
       return repeat_fwd<100>([w](const auto& x) { return ch::conv2d(x, w, Ten<1>(), {.padding = 1}); },
                              rnd<4>({1, 3, 8, 8}, 1));
     }},
    {"S_concat_list_2000x1000",
     [] {
       std::vector<Var<1>> xs;
       for (int i = 0; i < 2000; ++i) xs.push_back(var<1>({1000}, static_cast<std::uint32_t>(i)));
       const auto dy = rnd<1>({2000000}, 99);
       return Run{[=] {
                    for (auto& x : xs) x.zero_grad();
                    ch::concat(0, std::span<const Var<1>>(xs)).backward(dy);
                  },
                  {}};
     }},
    {"S_concat_list_64x100k",
     [] {
       std::vector<Var<1>> xs;
       for (int i = 0; i < 64; ++i) xs.push_back(var<1>({100000}, static_cast<std::uint32_t>(i)));
       const auto dy = rnd<1>({6400000}, 99);
       return Run{[=] {
                    for (auto& x : xs) x.zero_grad();
                    ch::concat(0, std::span<const Var<1>>(xs)).backward(dy);
                  },
                  {}};
     }},
    {"S_sum_of_2000_tensors_n64",
     [] {
       std::vector<Var<1>> xs;
       for (int i = 0; i < 2000; ++i) xs.push_back(var<1>({64}, static_cast<std::uint32_t>(i)));
       const auto dy = rnd<1>({64}, 99);
       return Run{[=] {
                    for (auto& x : xs) x.zero_grad();
                    Var<1> s = xs[0];
                    for (std::size_t i = 1; i < xs.size(); ++i) s = s + xs[i];
                    s.backward(dy);
                  },
                  {}};
     }},
    {"S_slices_500_of_500x256",
     [] {
       auto x = var<2>({500, 256}, 1);
       const auto dy = rnd<2>({1, 256}, 99);
       return Run{[=] {
                    x.zero_grad();
                    Var<2> s = ch::slice(x, 0, 0, 1);
                    for (Index i = 1; i < 500; ++i) s = s + ch::slice(x, 0, i, i + 1);
                    s.backward(dy);
                  },
                  {}};
     }},
};
}  // namespace
