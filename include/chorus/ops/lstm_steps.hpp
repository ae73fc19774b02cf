#pragma once
/// The steps of an LSTM as one recorded operation, on CPUs: see <chorus/ops/recurrent.hpp>.

#include <chorus/autograd/interceptor.hpp>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/lstm.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/shape.hpp>
#include <concepts>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus {

/// The outputs of all steps, [batch, time, hidden], and the last step's states, [batch, hidden].
template <class Sequence, class State>
struct LstmResult {
  Sequence output;
  State hidden, cell;
  auto fields() { return std::tie(output, hidden, cell); }
};

namespace detail {

/// Whether a kernel exists: on the CPU, in float and double, without gradients of gradients.
template <Operand X, Operand... Rest>
inline constexpr bool has_lstm_kernel =
    std::same_as<typename tensor_of<X>::device_type, Cpu> && std::floating_point<typename tensor_of<X>::value_type> &&
    of_one_type<X, Rest...> && !(is_graph_variable<X> || ... || is_graph_variable<Rest>);

/// Observers follow single operations.
template <Operand B>
bool may_use_lstm_kernel(const B& bias_ih, const B& bias_hh) {
  return operation_watch == nullptr && interceptor == nullptr &&
         value_of(bias_ih).defined() == value_of(bias_hh).defined();
}

/// from_x: [time, batch, 4 hidden], the input's contribution, whose memory becomes that of the gates. -> [time + 2,
/// batch, hidden]: the states with the initial one, then the last cells.
template <class T>
Variable<T, 3> lstm_steps(const Variable<T, 3>& from_x, const Variable<T, 2>& weight, const Variable<T, 2>& h0,
                          const Variable<T, 2>& c0, bool reverse, const Tensor<bool, 3>& real) {
  const auto gates = value_of(from_x);
  const auto w = contiguous(value_of(weight));
  const kernels::LstmSteps s{gates.size(0), gates.size(1), w.size(1), reverse, real.data()};
  const Index first = s.row_before(s.step(0)), last = s.row_of(s.step(s.time - 1));
  auto states = Tensor<T, 3>::empty({s.time + 2, s.batch, s.hidden});
  auto cells = Tensor<T, 3>::empty({s.time + 1, s.batch, s.hidden});
  states[first] = value_of(h0);
  cells[first] = value_of(c0);
  count_multiply_adds(s.time * s.batch * 4 * s.hidden * s.hidden);
  const bool recorded = grad_enabled() && (node_of(from_x) || node_of(weight) || node_of(h0) || node_of(c0));
  kernels::lstm_forward(Cpu{}, s, w.data(), gates.data(), states.data(), cells.data(), recorded);
  states[s.time + 1] = cells[last];
  return record(
      "lstm", states,
      [s, real, gates, cells, states = Saved(states), w = Saved(w)](const auto& dy, auto dx, auto dw, auto dh0,
                                                                    auto dc0) {
        auto dh = Tensor<T, 2>::empty({s.batch, s.hidden});
        const auto dc = clone(dy[s.time + 1]);
        const auto dgates = Tensor<T, 3>::empty(gates.shape());
        T* dweight = nullptr;
        bool accumulate = false;
        if (dw) {
          const auto target = dw->target();
          dweight = target.data();
          accumulate = target.accumulate;
        }
        kernels::lstm_backward(Cpu{}, s, w.read("lstm").data(), gates.data(), states.read("lstm").data(), cells.data(),
                               dy.data(), dh.data(), dc.data(), dgates.data(), dweight, accumulate);
        if (dx) dx->add(dgates);
        if (dh0) dh0->add(dh);
        if (dc0) dc0->add(dc);
      },
      from_x, weight, h0, c0);
}

/// x: [time, batch, features] -> output: [time, batch, hidden], with the states of samples that have ended after their
/// end. `real`: see real_steps.
template <Operand X, Operand W, Operand B, Operand H, Operand C>
auto recorded_lstm(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh, const H& h0,
                   const C& c0, bool reverse, const Tensor<bool, 3>& real) {
  using Bias = RecordedLike<B, B>;
  const auto bias = value_of(bias_ih).defined() ? bias_ih + bias_hh : Bias();
  const auto packed = with_variables([&](const auto&... all) { return lstm_steps(all..., reverse, real); },
                                     linear(x, weight_ih, bias), weight_hh, h0, c0);
  const Index time = value_of(x).size(0);
  const Shape<2> state{value_of(h0).shape()};
  auto output = reverse ? slice(packed, 0, 0, time) : slice(packed, 0, 1, time + 1);
  const auto row = [&](Index at) { return reshape(slice(packed, 0, at, at + 1), state); };
  auto hidden = row(reverse ? 0 : time), cell = row(time + 1);
  return LstmResult<decltype(output), decltype(hidden)>{std::move(output), std::move(hidden), std::move(cell)};
}

}  // namespace detail

}  // namespace chorus
