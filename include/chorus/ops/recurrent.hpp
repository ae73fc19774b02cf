#pragma once
/// Recurrent layers over whole sequences: LSTM (Hochreiter, Schmidhuber 1997) and GRU (Cho et al. 2014), with PyTorch's
/// weights and gate order.

#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/lists.hpp>
#include <chorus/ops/lstm_steps.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

namespace chorus {

namespace functors {

/// The next cell state from the pre-activation gates and the current cell state.
struct LstmCell {
  template <class S>
  CHORUS_HD S operator()(const S& input, const S& forget, const S& candidate, const S& cell) const {
    return sigmoid(forget) * cell + sigmoid(input) * tanh(candidate);
  }
  template <class S>
  CHORUS_HD Partials<S, 4> gradient(const S& dy, const S& input, const S& forget, const S& candidate,
                                    const S& cell) const {
    const S i = sigmoid(input), f = sigmoid(forget), c = tanh(candidate);
    return {{dy * c * (i * (1 - i)), dy * cell * (f * (1 - f)), dy * i * (1 - c * c), dy * f}};
  }
};
struct LstmOutput {
  template <class S>
  CHORUS_HD S operator()(const S& output, const S& cell) const {
    return sigmoid(output) * tanh(cell);
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& output, const S& cell) const {
    const S o = sigmoid(output), c = tanh(cell);
    return {{dy * c * (o * (1 - o)), dy * o * (1 - c * c)}};
  }
};

/// The candidate state: the reset gate is applied to the hidden state's contribution.
struct GruCandidate {
  template <class S>
  CHORUS_HD S operator()(const S& reset_x, const S& reset_h, const S& x, const S& h) const {
    return tanh(x + sigmoid(reset_x + reset_h) * h);
  }
  template <class S>
  CHORUS_HD Partials<S, 4> gradient(const S& dy, const S& reset_x, const S& reset_h, const S& x, const S& h) const {
    const S r = sigmoid(reset_x + reset_h), y = tanh(x + r * h);
    const S by_x = dy * (1 - y * y), by_reset = by_x * h * (r * (1 - r));
    return {{by_reset, by_reset, by_x, by_x * r}};
  }
};
/// The next state, interpolated between the candidate and the current state.
struct GruState {
  template <class S>
  CHORUS_HD S operator()(const S& update_x, const S& update_h, const S& candidate, const S& state) const {
    return candidate + sigmoid(update_x + update_h) * (state - candidate);
  }
  template <class S>
  CHORUS_HD Partials<S, 4> gradient(const S& dy, const S& update_x, const S& update_h, const S& candidate,
                                    const S& state) const {
    const S u = sigmoid(update_x + update_h), by_update = dy * (state - candidate) * (u * (1 - u));
    return {{by_update, by_update, dy * (1 - u), dy * u}};
  }
};

}  // namespace functors

/// The outputs of all steps, and the last state.
template <class Sequence, class State>
struct GruResult {
  Sequence output;
  State hidden;
  auto fields() { return std::tie(output, hidden); }
};

namespace detail {

/// Throws ShapeError unless x, whose axis `time` has the steps, and the weights fit.
template <Operand X, Operand W>
void check_recurrent(const char* operation, const X& x, int time, const W& weight_ih, const W& weight_hh,
                     Index gates) {
  static_assert(tensor_of<X>::rank == 3, "recurrent: expected an input [batch, time, features]");
  const auto& in = value_of(x).shape();
  const auto& ih = value_of(weight_ih).shape();
  const auto& hh = value_of(weight_hh).shape();
  check<ShapeError>(ih[1] == in[2] && hh[0] == gates * hh[1] && ih[0] == hh[0], operation, ": an input of shape ", in,
                    " and weights of shapes ", ih, " and ", hh, " do not fit: expected [", gates,
                    " hidden, features] and [", gates, " hidden, hidden]");
  check<ShapeError>(in[static_cast<std::size_t>(time)] > 0, operation, ": an input of shape ", in,
                    " has no time steps");
}

// The columns of one gate.
template <Operand X>
auto gate(const X& gates, Index number, Index hidden) {
  return slice(gates, -1, number * hidden, (number + 1) * hidden);
}

// [time, batch, features] -> [batch, features].
template <Operand X>
auto time_step(const X& sequence, Index t) {
  const auto& shape = value_of(sequence).shape();
  return reshape(slice(sequence, 0, t, t + 1), Shape<2>{shape[1], shape[2]});
}

template <Operand X, Operand W, Operand H>
void check_state(const char* operation, const X& x, const W& weight_hh, const H& state) {
  const Shape<2> expected{value_of(x).size(1), value_of(weight_hh).size(1)};
  check<ShapeError>(value_of(state).shape() == expected, operation, ": an initial state has shape ",
                    value_of(state).shape(), ", expected ", expected);
}

template <Operand X, Operand W>
auto zero_state(const X& x, const W& weight_hh) {
  return Tensor<typename tensor_of<X>::value_type, 2, typename tensor_of<X>::device_type>::zeros(
      {value_of(x).size(0), value_of(weight_hh).size(1)}, value_of(x).device());
}

// The initial state, in the type of the steps' states.
template <class State, Operand H>
State as_state(const H& h) {
  if constexpr (std::is_same_v<State, H>)
    return h;
  else if constexpr (requires { State(h.as_variable()); })
    return State(h.as_variable());
  else
    return State(h);
}

/// Which samples of a batch have a step: [time, batch, 1]; undefined if all have all of them.
template <Operand X, class D>
Tensor<bool, 3, D> real_steps(const char* operation, const X& x, const Tensor<std::int64_t, 1, D>& lengths) {
  if (!lengths.defined()) return {};
  const Index time = value_of(x).size(0), batch = value_of(x).size(1);
  check<ShapeError>(lengths.numel() == batch, operation, ": expected ", batch, " lengths, got ", lengths.numel());
  const auto near = contiguous(to_device(lengths, Cpu{}));
  auto steps = Tensor<bool, 3, Cpu>::empty({time, batch, 1});
  for (Index i = 0; i < batch; ++i) {
    check<UsageError>(near(i) >= 0 && near(i) <= time, operation, ": expected lengths in [0, ", time, "], got ",
                      near(i), " for sample ", i);
    for (Index t = 0; t < time; ++t) steps(t, i, 0) = t < near(i);
  }
  return to_device(steps, lengths.device());
}
/// The state after step t: that before it for samples which have ended.
template <class State, class D>
State state_after(const Tensor<bool, 3, D>& real, Index t, const State& next, const State& before) {
  return real.defined() ? State(where(contiguous(real.select(0, t)), next, before)) : next;
}
/// The output of step t: zero for samples which have ended.
template <class State, class D>
State output_of(const Tensor<bool, 3, D>& real, Index t, const State& state) {
  using Value = tensor_of<State>;
  return real.defined() ? State(where(contiguous(real.select(0, t)), state,
                                      Tensor<typename Value::value_type, 0, D>::zeros({}, real.device())))
                        : state;
}

/// `lstm` for x: [time, batch, features], with the same outputs.
template <Operand X, Operand W, Operand B, Operand H, Operand C>
auto lstm_by_time(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh, const H& h0,
                  const C& c0, bool reverse,
                  const Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>& lengths) {
  check_recurrent("lstm", x, 0, weight_ih, weight_hh, 4);
  check_state("lstm", x, weight_hh, h0);
  check_state("lstm", x, weight_hh, c0);
  const Index time = value_of(x).size(0), hidden = value_of(weight_hh).size(1);
  const auto real = real_steps("lstm", x, lengths);
  if constexpr (has_lstm_kernel<X, W, B, H, C>)
    if (may_use_lstm_kernel(bias_ih, bias_hh)) {
      auto made = recorded_lstm(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, reverse, real);
      if (real.defined())
        made.output = where(real, made.output, Tensor<typename tensor_of<X>::value_type, 0>::zeros({}));
      return made;
    }
  const auto from_x = linear(x, weight_ih, bias_ih);
  using State = decltype(pointwise("lstm", functors::LstmCell{}, time_step(from_x, 0),
                                   linear(h0, weight_hh, bias_hh), c0, c0));
  auto h = as_state<State>(h0), c = as_state<State>(c0);
  std::vector<State> steps(static_cast<std::size_t>(time));
  for (Index step = 0; step < time; ++step) {
    const Index t = reverse ? time - 1 - step : step;
    const auto gates = pointwise("lstm", functors::Add{}, time_step(from_x, t), linear(h, weight_hh, bias_hh));
    const State cell = pointwise("lstm", functors::LstmCell{}, gate(gates, 0, hidden), gate(gates, 1, hidden),
                                 gate(gates, 2, hidden), c);
    const State state = pointwise("lstm", functors::LstmOutput{}, gate(gates, 3, hidden), cell);
    c = state_after(real, t, cell, c);
    h = state_after(real, t, state, h);
    steps[static_cast<std::size_t>(t)] = output_of(real, t, state);
  }
  auto output = stack(0, steps);
  return LstmResult<decltype(output), State>{std::move(output), h, c};
}

/// `gru` for x: [time, batch, features].
template <Operand X, Operand W, Operand B, Operand H>
auto gru_by_time(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh, const H& h0,
                 bool reverse, const Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>& lengths) {
  check_recurrent("gru", x, 0, weight_ih, weight_hh, 3);
  check_state("gru", x, weight_hh, h0);
  const Index time = value_of(x).size(0), hidden = value_of(weight_hh).size(1);
  const auto from_x = linear(x, weight_ih, bias_ih);
  const auto real = real_steps("gru", x, lengths);
  using State = decltype(pointwise("gru", functors::Add{}, time_step(from_x, 0), linear(h0, weight_hh, bias_hh)));
  auto h = as_state<State>(h0);
  std::vector<State> steps(static_cast<std::size_t>(time));
  for (Index step = 0; step < time; ++step) {
    const Index t = reverse ? time - 1 - step : step;
    const auto gx = time_step(from_x, t);
    const auto gh = linear(h, weight_hh, bias_hh);
    const auto candidate = pointwise("gru", functors::GruCandidate{}, gate(gx, 0, hidden), gate(gh, 0, hidden),
                                     gate(gx, 2, hidden), gate(gh, 2, hidden));
    const State state =
        pointwise("gru", functors::GruState{}, gate(gx, 1, hidden), gate(gh, 1, hidden), candidate, h);
    h = state_after(real, t, state, h);
    steps[static_cast<std::size_t>(t)] = output_of(real, t, state);
  }
  auto output = stack(0, steps);
  return GruResult<decltype(output), State>{std::move(output), h};
}

}  // namespace detail

/// x: [batch, time, features], weight_ih: [4 hidden, features], weight_hh: [4 hidden, hidden], biases: [4 hidden]. Gate
/// order: input, forget, candidate, output. h0, c0: initial states, [batch, hidden]. `reverse` reads the sequence
/// backwards; outputs stay at their steps. `lengths`, [batch]: a sample ends after so many steps, and padding follows:
/// its last state is that of its end, `reverse` begins there, and outputs after it are zero, as PyTorch's packed
/// sequences. Throws ShapeError if sizes don't match, UsageError for a length outside of [0, time].
template <Operand X, Operand W, Operand B, Operand H, Operand C>
auto lstm(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh, const H& h0,
          const C& c0, bool reverse = false,
          const Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>& lengths = {}) {
  detail::check_recurrent("lstm", x, 1, weight_ih, weight_hh, 4);
  auto made =
      detail::lstm_by_time(transpose(x, 0, 1), weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, reverse, lengths);
  made.output = transpose(made.output, 0, 1);
  return made;
}
/// The same with initial states of zero.
template <Operand X, Operand W, Operand B>
auto lstm(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh) {
  const auto zero = detail::zero_state(x, weight_hh);
  return lstm(x, weight_ih, weight_hh, bias_ih, bias_hh, zero, zero);
}

/// x: [batch, time, features], weight_ih: [3 hidden, features], weight_hh: [3 hidden, hidden], biases: [3 hidden]. Gate
/// order: reset, update, candidate. h0: initial state, [batch, hidden]; `reverse` and `lengths` as for lstm. Throws
/// ShapeError if sizes don't match.
template <Operand X, Operand W, Operand B, Operand H>
auto gru(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh, const H& h0,
         bool reverse = false,
         const Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>& lengths = {}) {
  detail::check_recurrent("gru", x, 1, weight_ih, weight_hh, 3);
  auto made = detail::gru_by_time(transpose(x, 0, 1), weight_ih, weight_hh, bias_ih, bias_hh, h0, reverse, lengths);
  made.output = transpose(made.output, 0, 1);
  return made;
}
/// The same with an initial state of zero.
template <Operand X, Operand W, Operand B>
auto gru(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh) {
  return gru(x, weight_ih, weight_hh, bias_ih, bias_hh, detail::zero_state(x, weight_hh));
}

}  // namespace chorus
