#pragma once
/// What the operators' cases are made of. A case makes its inputs from hashes, so that PyTorch's side
/// (torch_operators.py) has the same numbers, and gives a step to time and checksums of results and gradients.

#include <chorus/chorus.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace ch = chorus;
using ch::Index;
template <int R>
using S = ch::Shape<R>;
template <int R, class T = float>
using Ten = ch::Tensor<T, R>;
template <int R, class T = float>
using Var = ch::Variable<T, R>;
using L = std::int64_t;

inline std::uint32_t hash32(std::uint32_t i, std::uint32_t seed) {
  std::uint32_t h = i * 2654435761u + seed * 40503u;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return h;
}
inline double unit(std::uint32_t i, std::uint32_t seed) { return hash32(i, seed) / 4294967296.0 * 2 - 1; }

template <class T>
void fill_hash(T* p, Index n, std::uint32_t seed, double scale = 1, double off = 0) {
  for (Index i = 0; i < n; ++i)
    p[i] = static_cast<T>(static_cast<float>(unit(static_cast<std::uint32_t>(i), seed) * scale + off));
}
template <int R, class T = float>
Ten<R, T> rnd(const S<R>& s, std::uint32_t seed, double scale = 1, double off = 0) {
  auto t = Ten<R, T>::empty(s);
  fill_hash(t.data(), t.numel(), seed, scale, off);
  return t;
}
template <int R, class T = float>
Var<R, T> var(const S<R>& s, std::uint32_t seed, double scale = 1, double off = 0) {
  return Var<R, T>(rnd<R, T>(s, seed, scale, off), true);
}
template <int R>
Ten<R, L> ints(const S<R>& s, std::uint32_t seed, std::uint32_t n) {
  auto t = Ten<R, L>::empty(s);
  for (Index i = 0; i < t.numel(); ++i) t.data()[i] = hash32(static_cast<std::uint32_t>(i), seed) % n;
  return t;
}

struct Sum {
  double a, b, c;
};
template <class T>
Sum checksum(const T* p, Index n) {
  Sum s{};
  for (Index i = 0; i < n; ++i) {
    const double v = static_cast<double>(static_cast<float>(p[i]));
    s.a += v;
    s.b += v * unit(static_cast<std::uint32_t>(i), 777);
    s.c += std::abs(v);
  }
  return s;
}
template <>
inline Sum checksum<L>(const L* p, Index n) {
  Sum s{};
  for (Index i = 0; i < n; ++i) {
    const double v = static_cast<double>(p[i]);
    s.a += v;
    s.b += v * unit(static_cast<std::uint32_t>(i), 777);
    s.c += std::abs(v);
  }
  return s;
}
template <>
inline Sum checksum<double>(const double* p, Index n) {
  Sum s{};
  for (Index i = 0; i < n; ++i) {
    s.a += p[i];
    s.b += p[i] * unit(static_cast<std::uint32_t>(i), 777);
    s.c += std::abs(p[i]);
  }
  return s;
}

using Sums = std::vector<Sum>;
struct Run {
  std::function<void()> step;
  std::function<void(Sums&)> outputs;  // may be empty
};
using Make = std::function<Run()>;
inline std::map<std::string, Make>& cases() {
  static std::map<std::string, Make> all;
  return all;
}
struct Reg {
  Reg(std::string name, Make make) { cases()[std::move(name)] = std::move(make); }
};

template <class X>
void zero(const X&) {}
template <class T, int R>
void zero(const Var<R, T>& x) {
  x.zero_grad();
}
template <class X>
void grad_sum(Sums&, const X&) {}
template <class T, int R>
void grad_sum(Sums& s, const Var<R, T>& x) {
  if (!x.requires_grad()) return;
  const auto g = ch::contiguous(x.grad());
  s.push_back(checksum(g.data(), g.numel()));
}

// Forward and backward of f(in...); dy is a fixed random gradient. Inputs that are Tensors get none.
template <class F, class... In>
Run op(F f, In... in) {
  using Y = decltype(f(in...));
  auto inputs = std::make_shared<std::tuple<In...>>(in...);
  Run r;
  if constexpr (ch::AnyTensor<Y>) {
    r.step = [=] {
      auto y = std::apply(f, *inputs);
      (void)y;
    };
    r.outputs = [=](Sums& s) {
      const auto y = ch::contiguous(std::apply(f, *inputs));
      s.push_back(checksum(y.data(), y.numel()));
    };
  } else {
    using T = typename Y::value_type;
    constexpr int R = Y::rank;
    const auto y0 = std::apply(f, *inputs);
    Ten<R, T> dy = rnd<R, T>(y0.shape(), 99);
    r.step = [=] {
      std::apply([](const auto&... x) { (zero(x), ...); }, *inputs);
      const auto y = std::apply(f, *inputs);
      y.backward(dy);
    };
    r.outputs = [=](Sums& s) {
      std::apply([](const auto&... x) { (zero(x), ...); }, *inputs);
      const auto y = std::apply(f, *inputs);
      s.push_back(checksum(y.value().data(), y.numel()));
      y.backward(dy);
      std::apply([&](const auto&... x) { (grad_sum(s, x), ...); }, *inputs);
    };
  }
  return r;
}

// Parameters of a net: matrices uniform with variance 1 / fan_in, biases 0, other vectors 1.
template <class Module>
void fill_parameters(Module& module) {
  std::uint32_t i = 0;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(module)) {
    auto& p = *named.parameter;
    float* data = static_cast<float*>(p.value_data());
    const auto e = p.extents();
    const auto dot = named.name.rfind('.');
    const auto last = dot == std::string::npos ? named.name : named.name.substr(dot + 1);
    if (e.size() >= 2)
      fill_hash(data, p.count(), 1000 + i,
                std::sqrt(3.0 / (static_cast<double>(p.count()) / static_cast<double>(e[0]))));
    else
      std::fill_n(data, p.count(), last.find("bias") != std::string::npos ? 0.0f : 1.0f);
    p.touch();
    ++i;
  }
}
