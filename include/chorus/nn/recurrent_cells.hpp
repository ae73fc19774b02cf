#pragma once
/// One step of recurrent layers, for loops of your own: LSTMCell and GRUCell, with PyTorch's parameter names and
/// initialisation. LSTM and GRU (nn/recurrent.hpp) compute whole sequences faster.

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/recurrent.hpp>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

namespace chorus::nn {

/// Options of LSTMCell and GRUCell.
struct RecurrentCellOptions {
  bool bias = true;
};

/// The states after a step of an LSTMCell: [batch, hidden] each.
template <class State>
struct LstmState {
  State hidden, cell;
  auto fields() { return std::tie(hidden, cell); }
};

/// The base of LSTMCell and GRUCell: parameters for `gates` gates.
template <Device D, Real T>
class RecurrentCell : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight_ih, weight_hh;
  Parameter<T, 1, D> bias_ih, bias_hh;

  void visit(Visitor& visitor) override {
    visitor.parameter("weight_ih", weight_ih);
    visitor.parameter("weight_hh", weight_hh);
    if (bias_ih) visitor.parameter("bias_ih", bias_ih);
    if (bias_hh) visitor.parameter("bias_hh", bias_hh);
  }
  std::string describe() const override {
    return cat(name_, "(", weight_ih.shape()[1], ", ", weight_hh.shape()[1], ")");
  }

 protected:
  RecurrentCell(const char* name, Index gates, Index in_features, Index hidden, const RecurrentCellOptions& options)
      : name_(name) {
    check<ShapeError>(in_features > 0 && hidden > 0, name, ": ", in_features, " inputs and ", hidden,
                      " hidden features: both must be positive");
    const double bound = 1 / std::sqrt(static_cast<double>(hidden));
    weight_ih = Parameter(init::uniform<T, D, 2>({gates * hidden, in_features}, bound));
    weight_hh = Parameter(init::uniform<T, D, 2>({gates * hidden, hidden}, bound));
    if (!options.bias) return;
    bias_ih = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
    bias_hh = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
  }

  // The input as a sequence of one step.
  template <Operand X>
  static auto one_step(const X& x) {
    static_assert(tensor_of<X>::rank == 2, "recurrent cell: expected an input [batch, features]");
    return reshape(x, Shape<3>{value_of(x).size(0), 1, value_of(x).size(1)});
  }

 private:
  const char* name_;
};

/// x: [batch, features], states [batch, hidden], 0 by default -> {hidden, cell}: [batch, hidden] each. A loop begins
/// with the first step: `auto state = cell(x[0]);`. Throws ShapeError if sizes don't match.
template <Device D, Real T = float>
class LSTMCell final : public RecurrentCell<D, T> {
 public:
  LSTMCell(Index in_features, Index hidden, const RecurrentCellOptions& options = {})
      : RecurrentCell<D, T>("LSTMCell", 4, in_features, hidden, options) {}

  template <Operand X, Operand H, Operand C>
  auto operator()(const X& x, const H& hidden, const C& cell) const {
    return detail::watched(*this, [&] {
      auto made = lstm(this->one_step(x), this->weight_ih, this->weight_hh, this->bias_ih, this->bias_hh, hidden, cell);
      return LstmState<decltype(made.hidden)>{std::move(made.hidden), std::move(made.cell)};
    });
  }
  template <Operand X>
  auto operator()(const X& x) const {
    const auto zero = chorus::detail::zero_state(x, this->weight_hh);
    return (*this)(x, zero, zero);
  }
  template <Operand X, class State>
  auto operator()(const X& x, const LstmState<State>& state) const {
    return (*this)(x, state.hidden, state.cell);
  }
};

/// The same with one state: [batch, hidden].
template <Device D, Real T = float>
class GRUCell final : public RecurrentCell<D, T> {
 public:
  GRUCell(Index in_features, Index hidden, const RecurrentCellOptions& options = {})
      : RecurrentCell<D, T>("GRUCell", 3, in_features, hidden, options) {}

  template <Operand X, Operand H>
  auto operator()(const X& x, const H& hidden) const {
    return detail::watched(*this, [&] {
      return gru(this->one_step(x), this->weight_ih, this->weight_hh, this->bias_ih, this->bias_hh, hidden).hidden;
    });
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return (*this)(x, chorus::detail::zero_state(x, this->weight_hh));
  }
};

}  // namespace chorus::nn
