#pragma once
/// LSTM and GRU with several layers and both directions, with PyTorch's parameter names (`weight_ih_l0_reverse`) and
/// initialisation.

#include <chorus/autograd/batch_axis.hpp>
#include <chorus/nn/elsewhere.hpp>
#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/recurrent.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace chorus::nn {

/// Options of the layers LSTM and GRU.
struct RecurrentOptions {
  Index num_layers = 1;
  bool bias = true;
  /// Inputs and outputs are [batch, time, features] instead of [time, batch, features].
  bool batch_first = false;
  /// Dropout on the outputs of all layers but the last.
  double dropout = 0;
  bool bidirectional = false;
};

/// The base of LSTM and GRU: parameters, and the loop over layers and directions.
template <Device D, Real T>
class Recurrent : public Module {
 public:
  using device_type = D;

  /// The weights of one layer in one direction.
  struct Cell {
    Parameter<T, 2, D> weight_ih, weight_hh;
    Parameter<T, 1, D> bias_ih, bias_hh;
  };
  /// Layer 0, its reverse direction if there is one, layer 1, ...
  std::vector<Cell> cells;

  /// Initial states of zero for the input x: [layers * directions, batch, hidden].
  template <Operand X>
  Tensor<T, 3, D> zero_states(const X& x) const {
    const Index batch = value_of(x).size(options_.batch_first ? 0 : 1);
    return Tensor<T, 3, D>::zeros({static_cast<Index>(cells.size()), batch, hidden_}, value_of(x).device());
  }

  void visit(Visitor& visitor) override {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const auto directions = static_cast<std::size_t>(this->directions());
      const std::string ending = cat("_l", i / directions, i % directions == 1 ? "_reverse" : "");
      visitor.parameter("weight_ih" + ending, cells[i].weight_ih);
      visitor.parameter("weight_hh" + ending, cells[i].weight_hh);
      if (!options_.bias) continue;
      visitor.parameter("bias_ih" + ending, cells[i].bias_ih);
      visitor.parameter("bias_hh" + ending, cells[i].bias_hh);
    }
  }
  std::string describe() const override {
    return cat(name_, "(", cells[0].weight_ih.shape()[1], ", ", hidden_, ", num_layers=", options_.num_layers,
               options_.bidirectional ? ", bidirectional)" : ")");
  }

 protected:
  Recurrent(const char* name, Index gates, Index in_features, Index hidden, const RecurrentOptions& options)
      : name_(name), hidden_(hidden), options_(options) {
    check<ShapeError>(in_features > 0 && hidden > 0 && options.num_layers > 0, name, ": ", in_features, " inputs, ",
                      hidden, " hidden features, ", options.num_layers, " layers: all must be positive");
    check<UsageError>(options.dropout >= 0 && options.dropout < 1, name,
                      ": expected a dropout probability in [0, 1), got ", options.dropout);
    const double bound = 1 / std::sqrt(static_cast<double>(hidden));
    for (Index i = 0; i < options.num_layers * directions(); ++i) {
      const Index inputs = i < directions() ? in_features : hidden * directions();
      Cell cell;
      cell.weight_ih = Parameter(init::uniform<T, D, 2>({gates * hidden, inputs}, bound));
      cell.weight_hh = Parameter(init::uniform<T, D, 2>({gates * hidden, hidden}, bound));
      if (options.bias) {
        cell.bias_ih = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
        cell.bias_hh = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
      }
      cells.push_back(std::move(cell));
    }
  }

  Index directions() const { return options_.bidirectional ? 2 : 1; }

  /// Calls `run(input, cell, number, reverse)`, which returns outputs [time, batch, hidden], for all layers and
  /// directions. Returns the last layer's outputs.
  template <class X, class Run>
  auto through_layers(const X& x, const Run& run) const {
    const auto layer = [&](const auto& in, Index number) {
      const auto at = static_cast<std::size_t>(number * directions());
      auto forward = run(in, cells[at], number * directions(), false);
      if (!options_.bidirectional) return forward;
      return concat(2, forward, run(in, cells[at + 1], number * directions() + 1, true));
    };
    const auto turned = [](const auto& y) { return transpose(y, 0, 1); };
    auto y = options_.batch_first ? layer(turned(x), 0) : layer(x, 0);
    for (Index number = 1; number < options_.num_layers; ++number) {
      // Dropout is keyed by samples, which it expects along axis 0.
      if (options_.dropout > 0 && this->training()) y = turned(dropout(turned(y), options_.dropout));
      y = layer(y, number);
    }
    return options_.batch_first ? decltype(y)(turned(y)) : y;
  }

  /// Row `number` of the initial states [layers * directions, batch, hidden].
  template <Operand H>
  auto state_of(const H& states, Index number) const {
    const Shape<3> expected{static_cast<Index>(cells.size()), value_of(states).size(1), hidden_};
    check<ShapeError>(value_of(states).shape() == expected, name_, ": initial states have shape ",
                      value_of(states).shape(), ", expected ", expected);
    return reshape(slice(states, 0, number, number + 1), Shape<2>{expected[1], expected[2]});
  }
  /// Stacks the states of all layers and directions, [batch, hidden] each, to [layers * directions, batch, hidden],
  /// marked with batch axis 1 for DataParallel.
  template <class State>
  static auto join_states(const std::vector<State>& states) {
    return batch_axis<1>(stack(0, states));
  }

 private:
  const char* name_;
  Index hidden_;
  RecurrentOptions options_;
};

/// x: [time, batch, features] (or batch first) -> {output: [time, batch, directions * hidden], hidden, cell: [layers *
/// directions, batch, hidden]}. Initial states default to zero. `lengths`, [batch]: where each sample ends and its
/// padding begins; the states are those of the ends, and outputs after them are zero, as with PyTorch's packed
/// sequences. Throws ShapeError if sizes don't match, UsageError for a length outside of [0, time].
template <Device D, Real T>
class LSTM final : public Recurrent<D, T> {
 public:
  LSTM(Index in_features, Index hidden, const RecurrentOptions& options = {})
      : Recurrent<D, T>("LSTM", 4, in_features, hidden, options) {}

  using Lengths = Tensor<std::int64_t, 1, D>;

  template <Operand X, Operand H, Operand C>
  auto operator()(const X& x, const H& h0, const C& c0, const Lengths& lengths = {}) const {
    return detail::watched(*this, [&] { return run(x, h0, c0, lengths); });
  }
  template <Operand X>
  auto operator()(const X& x, const Lengths& lengths = {}) const {
    const auto zero = this->zero_states(x);
    return (*this)(x, zero, zero, lengths);
  }

 private:
  template <class X, class H, class C>
  auto run(const X& x, const H& h0, const C& c0, const Lengths& lengths) const {
    using chorus::detail::lstm_by_time;
    const auto& cell0 = this->cells[0];
    using State = decltype(lstm_by_time(x, cell0.weight_ih, cell0.weight_hh, cell0.bias_ih, cell0.bias_hh,
                                        this->state_of(h0, 0), this->state_of(c0, 0), false, lengths)
                               .hidden);
    std::vector<State> hidden, cell;
    auto output = this->through_layers(x, [&](const auto& in, const auto& of, Index number, bool reverse) {
      auto made = lstm_by_time(in, of.weight_ih, of.weight_hh, of.bias_ih, of.bias_hh, this->state_of(h0, number),
                               this->state_of(c0, number), reverse, lengths);
      hidden.push_back(made.hidden);
      cell.push_back(made.cell);
      return made.output;
    });
    auto states = this->join_states(hidden);
    return LstmResult<decltype(output), decltype(states)>{std::move(output), std::move(states),
                                                          this->join_states(cell)};
  }
};

/// The same with one state: {output, hidden}. A second argument of integers is lengths.
template <Device D, Real T>
class GRU final : public Recurrent<D, T> {
 public:
  GRU(Index in_features, Index hidden, const RecurrentOptions& options = {})
      : Recurrent<D, T>("GRU", 3, in_features, hidden, options) {}

  using Lengths = Tensor<std::int64_t, 1, D>;

  template <Operand X, Operand H>
  auto operator()(const X& x, const H& h0, const Lengths& lengths = {}) const {
    return detail::watched(*this, [&] { return run(x, h0, lengths); });
  }
  template <Operand X>
  auto operator()(const X& x, const Lengths& lengths = {}) const {
    return (*this)(x, this->zero_states(x), lengths);
  }

 private:
  template <class X, class H>
  auto run(const X& x, const H& h0, const Lengths& lengths) const {
    using chorus::detail::gru_by_time;
    const auto& cell0 = this->cells[0];
    using State = decltype(gru_by_time(x, cell0.weight_ih, cell0.weight_hh, cell0.bias_ih, cell0.bias_hh,
                                       this->state_of(h0, 0), false, lengths)
                               .hidden);
    std::vector<State> hidden;
    auto output = this->through_layers(x, [&](const auto& in, const auto& of, Index number, bool reverse) {
      auto made = gru_by_time(in, of.weight_ih, of.weight_hh, of.bias_ih, of.bias_hh, this->state_of(h0, number),
                              reverse, lengths);
      hidden.push_back(made.hidden);
      return made.output;
    });
    auto states = this->join_states(hidden);
    return GruResult<decltype(output), decltype(states)>{std::move(output), std::move(states)};
  }
};

}  // namespace chorus::nn
