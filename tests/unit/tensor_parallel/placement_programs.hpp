#pragma once
/// Public bugs of missing and double sums as programs with placement types. The line `wrong` is the bug: the compiler
/// refuses it with the sentence in `says` (tests/structure/compile_errors.py). The program below it is right:
/// placement_test.cpp compares it with one device.

#include <chorus/nn/linear.hpp>
#include <chorus/nn/placed_parameters.hpp>
#include <chorus/ops/columns.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/vocabulary.hpp>
#include <cstdint>
#include <functional>
#include <vector>

namespace bugs {

namespace ch = chorus;
using ch::Cpu;
using T = ch::axis::Tensor;
using CopiedT = ch::placement::Copied<T>;
/// A second axis of ranks, which these tests don't have.
struct Sequence {
  static ch::TensorGroupRef group() { return nullptr; }
};
template <int dim, int Rank>
using Split = ch::nn::SplitParameter<T, dim, double, Rank>;
template <int Rank>
using Summed = ch::nn::Summed<T, double, Rank>;

template <int Rank>
ch::Tensor<double, Rank> numbers(const ch::Shape<Rank>& shape) {
  return ch::nn::init::default_uniform<double, Cpu, Rank>(shape, 4);
}

/// What the programs compute with. x: [4, 3, 8], of a plain layer; `index` is the program.
struct Own : ch::nn::Module {
  ch::nn::Linear<Cpu, double> first{5, 8};
  Split<0, 2> up{numbers<2>({10, 8})}, heads{numbers<2>({8, 8}), 2}, classes{numbers<2>({7, 8})};
  Split<0, 1> up_bias{numbers<1>({10})};
  Split<1, 2> down{numbers<2>({8, 10})}, out{numbers<2>({8, 8}), 2};
  Summed<2> summed{numbers<2>({8, 8})}, summed_key{numbers<2>({2, 8})};
  Summed<1> summed_scale{numbers<1>({8})}, summed_bias{numbers<1>({8})}, head_scale{numbers<1>({2})};
  ch::Parameter<double, 2> whole{numbers<2>({8, 8})}, key{numbers<2>({2, 8})};
  ch::Parameter<double, 1> bias{numbers<1>({8})}, scale{numbers<1>({8})}, plain_scale{numbers<1>({2})};
  std::size_t index = 0;
  CHORUS_MODULE(Own, first, up, heads, classes, up_bias, down, out, summed, summed_key, summed_scale, summed_bias,
                head_scale, whole, key, bias, scale, plain_scale)
  inline ch::Variable<double, 0> forward(const ch::Tensor<double, 3>& x) const;
};
using X = ch::Variable<double, 3>;

/// [batch, length, 8] -> [batch, heads, length, 2], whose heads ranks split.
template <class C>
auto queries(const Own& m, const C& x) {
  return ch::transpose<1, 2>(ch::reshape<2>(ch::linear(x, m.heads), {4, 3, 4, 2}));
}
/// [batch, length, 2], the same for all heads -> [batch, 1, length, 2]
template <class K>
auto beside_heads(const K& key) {
  return ch::reshape(key, ch::Shape<4>{4, 1, 3, 2});
}
/// A square, so that gradients differ from number to number.
template <class Y>
auto loss_of(const Y& y) {
  return ch::mean(ch::square(y));
}

#ifndef CHORUS_TESTS_WRONG_PROGRAMS_ALONE

struct Program {
  const char* report;
  std::function<ch::Variable<double, 0>(const Own&, const X&)> run;
};
inline const std::vector<Program>& programs() {
  static const std::vector<Program> all = {
      // A router's gradient is not summed where the sequence is split.
      // says: linear: a whole value meets what differs between ranks
      // wrong: return ch::linear(ch::take_part<T, 1>(x), m.whole);
      {"https://github.com/NVIDIA/Megatron-LM/issues/619",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::linear(ch::take_part<T, 1>(x), m.summed)));
       }},
      // Nor is the final norm's.
      // says: layer_norm: a whole value meets what differs between ranks
      // wrong: return ch::layer_norm(ch::take_part<T, 1>(x), m.scale, m.bias);
      {"https://github.com/NVIDIA/Megatron-LM/issues/1446",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::layer_norm(ch::take_part<T, 1>(x), m.summed_scale, m.summed_bias)));
       }},
      // The shared part of MLA's keys: gathered forward, never summed backward.
      // says: *: a whole value meets what differs between ranks
      // wrong: const auto key = ch::all_gather<T>(ch::linear(ch::take_part<T, 1>(x), m.summed_key));
      // wrong: return queries(m, ch::copy<T>(x)) * beside_heads(key);
      {"https://github.com/NVIDIA/Megatron-LM/issues/1699",
       [](const Own& m, const X& x) {
         const auto key = ch::all_gather<CopiedT>(ch::linear(ch::take_part<T, 1>(x), m.summed_key));
         return loss_of(ch::all_gather<T>(queries(m, ch::copy<T>(x)) * beside_heads(key)));
       }},
      // The same key, computed on all ranks, beside split heads.
      // says: matmul: a whole value meets what differs between ranks
      // wrong: const auto key = beside_heads(ch::linear(x, m.key));
      // wrong: return ch::matmul(queries(m, ch::copy<T>(x)), ch::transpose(key, 2, 3));
      {"https://github.com/NVIDIA/Megatron-LM/issues/6839",
       [](const Own& m, const X& x) {
         const auto key = ch::copy<T>(beside_heads(ch::linear(x, m.key)));
         return loss_of(ch::all_gather<T>(ch::matmul(queries(m, ch::copy<T>(x)), ch::transpose<2, 3>(key))));
       }},
      // GatedDeltaNet's norm of each head.
      // says: rms_norm: a whole value meets what differs between ranks
      // wrong: return ch::rms_norm(queries(m, ch::copy<T>(x)), m.plain_scale);
      {"https://github.com/NVIDIA/Megatron-LM/issues/7452",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::rms_norm(queries(m, ch::copy<T>(x)), m.head_scale)));
       }},
      // The loss of multi-token prediction is a mean over this rank's tokens.
      // says: mse_loss: it mixes columns, which ranks split (Split): all_gather<Axis>(x) is missing
      // wrong: return ch::mse_loss(ch::take_part<T, 1>(x), ch::Tensor<double, 3>::ones({4, 3, 8}));
      {"https://github.com/NVIDIA/Megatron-LM/issues/7452#case-3",
       [](const Own&, const X& x) {
         const auto target = ch::take_part<T, 1>(ch::Tensor<double, 3>::ones({4, 3, 8}));
         return ch::all_reduce<T>(ch::mean(ch::square(ch::take_part<T, 1>(x) - target)));
       }},
      // The count of tokens is summed although it is the whole one.
      // says: all_reduce: expected a term of a sum (Partial)
      // wrong: const auto count = ch::sum(x * x);
      // wrong: return ch::all_reduce<T>(count);
      {"https://github.com/NVIDIA/Megatron-LM/issues/7481",
       [](const Own&, const X& x) {
         const auto part = ch::take_part<T, 1>(x);
         return ch::all_reduce<T>(ch::sum(part * part));
       }},
      // A loss of this rank's tokens, times the number of ranks.
      // says: backward: ranks hold different parts or terms of x
      // wrong: (ch::mean(ch::square(ch::take_part<T, 1>(x))) * 2.0).backward();
      {"https://github.com/NVIDIA/Megatron-LM/issues/906",
       [](const Own&, const X& x) { return ch::all_reduce<T>(ch::mean(ch::square(ch::take_part<T, 1>(x)))); }},
      // A second loss over parts is added to the whole one.
      // says: +: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::mean(x) + ch::mean(ch::square(ch::take_part<T, 1>(x)));
      {"https://github.com/NVIDIA/Megatron-LM/issues/3943",
       [](const Own&, const X& x) {
         return ch::mean(x) + ch::all_reduce<T>(ch::mean(ch::square(ch::take_part<T, 1>(x))));
       }},
      // The balance loss is a product of sums over this rank's tokens.
      // says: *: an operand is a term of a sum that was not taken (Partial)
      // wrong: const auto counts = ch::mean<1>(ch::take_part<T, 1>(x));
      // wrong: return ch::mean(counts * counts);
      {"https://github.com/NVIDIA/Megatron-LM/issues/3672",
       [](const Own&, const X& x) {
         const auto counts = ch::all_reduce<T>(ch::mean<1>(ch::take_part<T, 1>(x)));
         return ch::mean(counts * counts);
       }},
      // The z-loss of logits whose sum was not taken.
      // says: square: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::square(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down));
      {"https://github.com/NVIDIA/Megatron-LM/issues/5047",
       [](const Own& m, const X& x) {
         return ch::mean(ch::square(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down))));
       }},
      // Heads for keys and values that all ranks share.
      // says: +: a whole value meets what differs between ranks
      // wrong: return queries(m, ch::copy<T>(x)) + beside_heads(ch::linear(x, m.key));
      {"https://github.com/bigcode-project/Megatron-LM/issues/37",
       [](const Own& m, const X& x) {
         return loss_of(
             ch::all_gather<T>(queries(m, ch::copy<T>(x)) + ch::copy<T>(beside_heads(ch::linear(x, m.key)))));
       }},
      // The norms of queries and keys have whole weights and split heads.
      // says: layer_norm: a whole value meets what differs between ranks
      // wrong: return ch::layer_norm(queries(m, ch::copy<T>(x)), m.plain_scale, m.head_scale);
      {"https://github.com/NVIDIA-NeMo/RL/issues/3716",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::layer_norm(queries(m, ch::copy<T>(x)), m.head_scale, m.head_scale)));
       }},
      // LoRA's first factor is whole, and its result meets split columns.
      // says: linear: a whole value meets what differs between ranks
      // wrong: return ch::linear(ch::copy<T>(x), m.whole);
      {"https://github.com/modelscope/mcore-bridge/issues/173",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::linear(ch::linear(ch::copy<T>(x), m.summed), m.up)));
       }},
      // The base layer's sum is not taken yet, the adapter's result is whole.
      // says: +: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down) + ch::linear(x, m.whole);
      {"https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5635",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)) +
                        ch::linear(x, m.whole));
       }},
      // An adapter that all experts share gets its tokens' gradients of one rank.
      // says: linear: a whole value meets what differs between ranks
      // wrong: return ch::linear(ch::take_part<T, 0>(x), m.key);
      {"https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6009",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::linear(ch::take_part<T, 0>(x), m.summed_key)));
       }},
      // Summed twice.
      // says: all_reduce: expected a term of a sum (Partial)
      // wrong: return ch::all_reduce<T>(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)));
      {"https://github.com/inclusionAI/AReno/issues/496",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)));
       }},
      // A row-parallel layer takes its columns of a whole input, whose gradient must be gathered.
      // says: linear: it mixes columns, which ranks split in one operand alone: take_part<Axis, dim>(x)
      // wrong: return ch::all_reduce<T>(ch::linear(x, m.out));
      {"https://github.com/huggingface/nanotron/issues/172",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_reduce<T>(ch::linear(ch::take_part<T, 2>(x, 2), m.out)));
       }},
      // The input of split experts.
      // says: linear: a whole value meets what differs between ranks
      // wrong: return ch::linear(x, m.up, m.up_bias);
      {"https://github.com/pytorch/torchtitan/issues/1805",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_gather<T>(ch::linear(ch::copy<T>(x), m.up, m.up_bias)));
       }},
      // The router's gate multiplies experts' split results.
      // says: *: a whole value meets what differs between ranks
      // wrong: const auto gate = ch::sigmoid(ch::mean(x, -1));
      // wrong: return ch::linear(ch::copy<T>(x), m.up) * ch::reshape(gate, {4, 3, 1});
      {"https://github.com/pytorch/torchtitan/issues/2416",
       [](const Own& m, const X& x) {
         const auto gate = ch::copy<T>(ch::reshape(ch::sigmoid(ch::mean(x, -1)), {4, 3, 1}));
         return loss_of(ch::all_gather<T>(ch::linear(ch::copy<T>(x), m.up) * gate));
       }},
      // A gradient that is a term of a sum is called whole.
      // says: mse_loss: x is a copy, whose gradient is a term of a sum (Copied)
      // wrong: return ch::mse_loss(ch::copy<T>(x), ch::Tensor<double, 3>::ones({4, 3, 8}));
      {"https://github.com/pytorch/torchtitan/issues/3412",
       [](const Own&, const X& x) { return ch::mse_loss(x, ch::Tensor<double, 3>::ones({4, 3, 8})); }},
      // The loss that is shown is this rank's.
      // says: item: ranks hold different parts or terms of x
      // wrong: return ch::mean(ch::take_part<T, 1>(x)).item();
      {"https://github.com/pytorch/torchtitan/issues/3329",
       [](const Own&, const X& x) { return ch::all_reduce<T>(ch::mean(ch::take_part<T, 1>(x))); }},
      // Each rank adds the number.
      // says: +: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down) + 1.0;
      {"https://github.com/pytorch/pytorch/issues/163193",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)) + 1.0);
       }},
      // A norm of terms.
      // says: norm: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::norm(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down));
      {"https://github.com/pytorch/pytorch/issues/159856",
       [](const Own& m, const X& x) {
         return ch::norm(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)));
       }},
      // A maximum of terms.
      // says: amax: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::amax(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down), -1);
      {"https://github.com/pytorch/pytorch/issues/165962",
       [](const Own& m, const X& x) {
         return loss_of(ch::amax(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)), -1));
       }},
      // The router's softmax sees this rank's experts.
      // says: softmax: it mixes columns, which ranks split (Split): all_gather<Axis>(x) is missing
      // wrong: return ch::softmax<-1>(ch::linear(ch::copy<T>(x), m.classes));
      {"https://github.com/huggingface/transformers/issues/48205",
       [](const Own& m, const X& x) {
         return loss_of(ch::softmax(ch::all_gather<T>(ch::linear(ch::copy<T>(x), m.classes)), -1));
       }},
      // A gather whose backward does not sum, though ranks go on differently.
      // says: *: a whole value meets what differs between ranks
      // wrong: const auto part = ch::take_part<T, 2>(x);
      // wrong: return ch::take_part<T, 2>(ch::copy<T>(x)) * ch::mean(ch::all_gather<T>(part));
      {"https://github.com/ByteDance-Seed/VeOmni/issues/681",
       [](const Own&, const X& x) {
         const auto all = ch::all_gather<CopiedT>(ch::take_part<T, 2>(x));
         return loss_of(ch::all_gather<T>(ch::take_part<T, 2>(ch::copy<T>(x)) * ch::mean(all)));
       }},
      // Each rank adds the bias.
      // says: linear: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down, m.bias));
      {"https://github.com/huggingface/text-generation-inference/issues/1036",
       [](const Own& m, const X& x) {
         return loss_of(ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)) + m.bias);
       }},
      // The shared expert is summed alone, and again with the others.
      // says: +: an operand is a term of a sum that was not taken (Partial)
      // wrong: const auto c = ch::copy<T>(ch::reshape(x, ch::Shape<2>{12, 8}));
      // wrong: const auto shared = ch::all_reduce<T>(ch::linear(ch::linear(c, m.heads), m.out));
      // wrong: return ch::linear(ch::linear(c, m.up), m.down) + shared;
      {"https://github.com/vllm-project/vllm/issues/49366",
       [](const Own& m, const X& x) {
         const auto c = ch::copy<T>(x);
         const auto shared = ch::linear(ch::linear(c, m.heads), m.out);
         return loss_of(ch::all_reduce<T>(ch::linear(ch::linear(c, m.up), m.down) + shared));
       }},
      // The residual is added before the sum.
      // says: +: an operand is a term of a sum that was not taken (Partial)
      // wrong: return ch::all_reduce<T>(x + ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down));
      {"https://github.com/vllm-project/tpu-inference/issues/3435",
       [](const Own& m, const X& x) {
         return loss_of(x + ch::all_reduce<T>(ch::linear(ch::linear(ch::copy<T>(x), m.up), m.down)));
       }},
      // The axis of the sequence is left out of a sum of gradients: the layer knows the other axis alone.
      // says: linear: a whole value meets what differs between ranks
      // wrong: return ch::linear(ch::take_part<Sequence, 1>(ch::copy<T>(x)), m.up);
      {"https://github.com/ByteDance-Seed/VeOmni/issues/1115",
       [](const Own& m, const X& x) {
         const auto y = ch::linear(ch::take_part<Sequence, 1>(ch::copy<T>(x)), ch::copy<Sequence>(m.up));
         return loss_of(ch::all_gather<T>(ch::all_gather<Sequence>(y * 2.0)));
       }},
      // The gradient of a sum over ranks, of which each rank takes its own loss.
      // says: backward: ranks hold different parts or terms of x
      // wrong: ch::all_reduce<CopiedT>(ch::sum(ch::take_part<T, 1>(x))).backward();
      {"https://github.com/jax-ml/jax/issues/3970",
       [](const Own&, const X& x) {
         const auto all = ch::all_reduce<CopiedT>(ch::mean(ch::take_part<T, 1>(x)));
         return ch::all_reduce<T>(ch::mean(ch::square(ch::take_part<T, 1>(x) * all)));
       }},
  };
  return all;
}

ch::Variable<double, 0> Own::forward(const ch::Tensor<double, 3>& x) const {
  return programs().at(index).run(*this, first(x));
}

#endif

}  // namespace bugs
