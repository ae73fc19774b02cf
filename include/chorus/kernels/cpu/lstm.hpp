#pragma once
/// The steps of an LSTM on the CPU: in each, a product with the packed weight and one pass over the gates.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/packed_matrix.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/packet_math.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/few_rows.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/lstm.hpp>
#include <optional>

namespace chorus::kernels {

namespace detail {

template <class T>
Packet<T> sigmoid_of(const Packet<T>& x) {
  using namespace math::packets;
  return Eigen::internal::pdiv(splat(T{1}), padd(splat(T{1}), Exp::of<T>(Eigen::internal::pnegate(x))));
}

/// y - y², the derivative of a sigmoid whose value is y.
template <class T>
Packet<T> sigmoid_slope(const Packet<T>& y) {
  return pmul(y, psub(splat(T{1}), y));
}
/// 1 - y², the derivative of a tanh whose value is y.
template <class T>
Packet<T> tanh_slope(const Packet<T>& y) {
  return psub(splat(T{1}), pmul(y, y));
}

/// Calls f(sample) on several threads, for work on the 4 * hidden gates of each sample.
template <class F>
void for_samples(const LstmSteps& s, const F& f) {
  const Index least = std::max<Index>(1, thread_elements / (32 * s.hidden + 1));
  parallel_ranges(s.batch, 1, least, [&](Index first, Index count) {
    for (Index b = first; b < first + count; ++b) f(b);
  });
}

/// The gates' values, the next cell and the next state of one sample; `product`: the weight times the state before.
template <class T>
void lstm_gates(Index hidden, const T* product, T* gates, const T* cell_before, T* cell, T* state) {
  using math::packets::Tanh;
  for_packets<T>(hidden, [=](Index j, auto count) {
    const auto sum = [=](Index gate) {
      return padd(load(gates + gate * hidden + j, count), load(product + gate * hidden + j, count));
    };
    const auto input = sigmoid_of<T>(sum(0)), forget = sigmoid_of<T>(sum(1)), output = sigmoid_of<T>(sum(3));
    const auto candidate = Tanh::of<T>(sum(2));
    const auto next = pmadd(input, candidate, pmul(forget, load(cell_before + j, count)));
    store(gates + j, input, count);
    store(gates + hidden + j, forget, count);
    store(gates + 2 * hidden + j, candidate, count);
    store(gates + 3 * hidden + j, output, count);
    store(cell + j, next, count);
    store(state + j, pmul(output, Tanh::of<T>(next)), count);
  });
}

/// From the gradients dh of a sample's state and dc of its cell: those of the gates, and in dc of the cell before.
template <class T>
void lstm_gates_backward(Index hidden, const T* gates, const T* cell_before, const T* cell, const T* dh, T* dc,
                         T* dgates) {
  using math::packets::Tanh;
  for_packets<T>(hidden, [=](Index j, auto count) {
    const auto input = load(gates + j, count), forget = load(gates + hidden + j, count);
    const auto candidate = load(gates + 2 * hidden + j, count), output = load(gates + 3 * hidden + j, count);
    const auto out = Tanh::of<T>(load(cell + j, count)), by_state = load(dh + j, count);
    const auto by_cell = pmadd(pmul(by_state, output), tanh_slope<T>(out), load(dc + j, count));
    store(dgates + j, pmul(pmul(by_cell, candidate), sigmoid_slope<T>(input)), count);
    store(dgates + hidden + j, pmul(pmul(by_cell, load(cell_before + j, count)), sigmoid_slope<T>(forget)), count);
    store(dgates + 2 * hidden + j, pmul(pmul(by_cell, input), tanh_slope<T>(candidate)), count);
    store(dgates + 3 * hidden + j, pmul(pmul(by_state, out), sigmoid_slope<T>(output)), count);
    store(dc + j, pmul(by_cell, forget), count);
  });
}

}  // namespace detail

template <std::floating_point T>
void lstm_forward(Cpu device, const LstmSteps& s, const T* weight, T* gates, T* states, T* cells, bool recorded) {
  const Index h = s.hidden, row = s.batch * h;
  const bool few = !recorded && s.batch <= few_rows;
  std::optional<detail::PackedMatrix<T>> packed;
  if (!few) packed.emplace(device, Trans::yes, h, 4 * h, weight, h);
  const Index pitch = few ? 4 * h : packed->pitch();
  const Scratch<T> products(device, s.batch * pitch);
  T* const product = products.data();
  for (Index number = 0; number < s.time; ++number) {
    const Index t = s.step(number);
    const T* const before = states + s.row_before(t) * row;
    if (few)
      linear_of_few_rows(device, s.batch, 4 * h, h, before, weight, product, static_cast<const T*>(nullptr));
    else
      packed->multiply(s.batch, before, h, product);
    detail::for_samples(s, [&](Index b) {
      const Index from = s.row_before(t) * row + b * h, to = s.row_of(t) * row + b * h;
      if (s.real != nullptr && !s.real[t * s.batch + b]) {
        std::copy_n(states + from, h, states + to);
        std::copy_n(cells + from, h, cells + to);
      } else {
        detail::lstm_gates(h, product + b * pitch, gates + (t * s.batch + b) * 4 * h, cells + from, cells + to,
                           states + to);
      }
    });
  }
}

template <std::floating_point T>
void lstm_backward(Cpu device, const LstmSteps& s, const T* weight, const T* gates, const T* states, const T* cells,
                   const T* dstates, T* dh, T* dc, T* dgates, T* dweight, bool accumulate_weight) {
  const Index h = s.hidden, row = s.batch * h;
  const detail::PackedMatrix<T> packed(device, Trans::no, 4 * h, h, weight, h);
  const Index pitch = packed.pitch();
  const Scratch<T> sums(device, s.batch * pitch);
  T* const carried = sums.data();  // the gradient of the state before the step that was taken last
  std::fill_n(carried, s.batch * pitch, T{0});
  for (Index number = s.time; number-- > 0;) {
    const Index t = s.step(number);
    detail::for_samples(s, [&](Index b) {
      const Index before = s.row_before(t) * row + b * h, at = s.row_of(t) * row + b * h;
      const Index place = (t * s.batch + b) * 4 * h;
      T* const by_state = carried + b * pitch;
      for_packets<T>(h, [=](Index j, auto count) {
        store(by_state + j, padd(load(by_state + j, count), load(dstates + at + j, count)), count);
      });
      if (s.real != nullptr && !s.real[t * s.batch + b]) {
        std::fill_n(dgates + place, 4 * h, T{0});
      } else {
        detail::lstm_gates_backward(h, gates + place, cells + before, cells + at, by_state, dc + b * h,
                                    dgates + place);
        if (s.real != nullptr) std::fill_n(by_state, h, T{0});
      }
    });
    packed.multiply(s.batch, dgates + t * 4 * row, 4 * h, carried, /*accumulate=*/s.real != nullptr);
  }
  const T* const first = dstates + s.row_before(s.step(0)) * row;
  for (Index b = 0; b < s.batch; ++b)
    for (Index j = 0; j < h; ++j) dh[b * h + j] = carried[b * pitch + j] + first[b * h + j];
  if (dweight != nullptr)
    gemm(device, Trans::yes, Trans::no, 4 * h, h, s.time * s.batch, dgates, 4 * h, states + s.row_before(0) * row, h,
         dweight, h, accumulate_weight);
}

}  // namespace chorus::kernels
