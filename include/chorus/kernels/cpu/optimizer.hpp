#pragma once
/// Optimizer steps on the CPU.

#include <algorithm>
#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/packet_math.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <cmath>
#include <numeric>

namespace chorus::kernels {

template <Real T>
void sgd_step(Cpu, Index count, T* p, const T* g, T* momentum, const SgdScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr), decay = scalar(s.weight_decay), keep = scalar(s.momentum),
             mix = scalar(1 - s.dampening);
  parallel_packets<T>(count, [=](Index i, auto n) {
    const auto value = load(p + i, n);
    auto step = pmadd(decay, value, load(g + i, n));
    if (momentum != nullptr) {
      const auto m = s.first_step ? step : pmadd(mix, step, pmul(keep, load(momentum + i, n)));
      store(momentum + i, m, n);
      step = s.nesterov ? pmadd(keep, m, step) : m;
    }
    store(p + i, pmadd(lr, step, value), n);
  });
}

template <Real T>
void adam_step(Cpu, Index count, T* p, const T* g, T* m, T* v, T* vmax, const AdamScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto exponent = static_cast<double>(s.step);
  const auto step_size = scalar(-s.lr / (1 - std::pow(s.beta1, exponent)));
  const auto correction = scalar(1 / std::sqrt(1 - std::pow(s.beta2, exponent))), eps = scalar(s.eps);
  const auto keep1 = scalar(s.beta1), mix1 = scalar(1 - s.beta1), keep2 = scalar(s.beta2), mix2 = scalar(1 - s.beta2);
  const auto decay = scalar(s.decoupled ? 0 : s.weight_decay),
             shrink = scalar(s.decoupled ? 1 - s.lr * s.weight_decay : 1);
  parallel_packets<T>(count, [=](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto mean = pmadd(mix1, grad, pmul(keep1, load(m + i, n)));
    auto square = pmadd(pmul(mix2, grad), grad, pmul(keep2, load(v + i, n)));
    store(m + i, mean, n);
    store(v + i, square, n);
    if (vmax != nullptr) {
      square = Eigen::internal::pmax(load(vmax + i, n), square);
      store(vmax + i, square, n);
    }
    const auto denominator = pmadd(math::packets::sqrt(square), correction, eps);
    store(p + i, pmadd(step_size, Eigen::internal::pdiv(mean, denominator), pmul(shrink, value)), n);
  });
}

template <Real T>
void rms_prop_step(Cpu, Index count, T* p, const T* g, T* v, T* m, const RmsPropScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr), keep = scalar(s.alpha), mix = scalar(1 - s.alpha), eps = scalar(s.eps);
  const auto decay = scalar(s.weight_decay), momentum = scalar(s.momentum);
  parallel_packets<T>(count, [=](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto square = pmadd(pmul(mix, grad), grad, pmul(keep, load(v + i, n)));
    store(v + i, square, n);
    auto step = Eigen::internal::pdiv(grad, padd(math::packets::sqrt(square), eps));
    if (m != nullptr) {
      step = pmadd(momentum, load(m + i, n), step);
      store(m + i, step, n);
    }
    store(p + i, pmadd(lr, step, value), n);
  });
}

template <Real T>
void adagrad_step(Cpu, Index count, T* p, const T* g, T* sum, const AdagradScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay));
  const auto eps = scalar(s.eps), decay = scalar(s.weight_decay);
  parallel_packets<T>(count, [=](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto square = pmadd(grad, grad, load(sum + i, n));
    store(sum + i, square, n);
    store(p + i, pmadd(lr, Eigen::internal::pdiv(grad, padd(math::packets::sqrt(square), eps)), value), n);
  });
}

}  // namespace chorus::kernels
