#pragma once
/// Position encodings: learned, sinusoidal, rotary.

#include <algorithm>
#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/rows_of_places.hpp>
#include <chorus/tensor/kept_for_replays.hpp>
#include <cmath>
#include <vector>

namespace chorus::nn {

/// Adds a learned vector for each position. x: [batch, length, features], weight: [most, features].
template <Device D, Real T = float>
class LearnedPositions : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;

  /// Initialised from N(0, 0.02²). Throws ShapeError unless both sizes are positive.
  LearnedPositions(Index most, Index features) {
    check<ShapeError>(most > 0 && features > 0, "LearnedPositions: ", most, " positions of ", features,
                      " features: both must be positive");
    weight = Parameter(init::normal<T, D, 2>({most, features}, 0, 0.02));
  }
  /// Throws ShapeError if the sequence is longer than `most`.
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const Index own = value_of(x).size(-2), length = chorus::detail::whole_length(own);
      check<ShapeError>(length <= weight.shape()[0], "LearnedPositions: a sequence of ", length, " is longer than ",
                        weight.shape()[0], " positions");
      return x + chorus::detail::rows_of_places(weight, 0, own);
    });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override {
    return cat("LearnedPositions(", weight.shape()[0], ", ", weight.shape()[1], ")");
  }
};

namespace detail {
// [at least `length`, features / 2]: sine and cosine of position * 10000^(-2 i / features).
template <Real T, Device D>
struct PositionTables {
  Index features = 0, length = 0;
  D device{};
  Tensor<T, 2, D> sine{}, cosine{};
};

// Each thread caches its tables.
template <Real T, Device D>
const PositionTables<T, D>& position_tables(Index length, Index features, D device) {
  thread_local std::vector<PositionTables<T, D>> kept;
  auto tables = std::find_if(kept.begin(), kept.end(),
                             [&](const auto& t) { return t.features == features && t.device == device; });
  if (tables != kept.end() && tables->length >= length) {
    chorus::detail::keep_for_replays(tables->sine.storage());
    chorus::detail::keep_for_replays(tables->cosine.storage());
    return *tables;
  }
  const auto table = [&, places = tables == kept.end() ? length : std::max(length, 2 * tables->length)](auto f) {
    auto host = Tensor<T, 2, Cpu>::empty({places, features / 2});
    for (Index place = 0; place < places; ++place)
      for (Index i = 0; i < features / 2; ++i)
        host(place, i) =
            static_cast<T>(f(static_cast<double>(place) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(features))));
    return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
  };
  const auto sine = table([](double angle) { return std::sin(angle); });
  const auto cosine = table([](double angle) { return std::cos(angle); });
  if (tables == kept.end()) tables = kept.insert(kept.end(), {.features = features, .device = device});
  tables->length = sine.size(0);
  tables->sine = sine;
  tables->cosine = cosine;
  return *tables;
}
}  // namespace detail

/// Adds sines (features 0, 2, ...) and cosines (1, 3, ...) of the position at decreasing frequencies (Vaswani et al.
/// 2017) to x: [batch, length, features]. Throws ShapeError for an odd number of features.
struct SinusoidalPositions : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      using T = typename tensor_of<X>::value_type;
      const Index length = value_of(x).size(-2), features = value_of(x).size(-1);
      check<ShapeError>(features % 2 == 0, "SinusoidalPositions: ", features, " features, expected an even number");
      const auto& tables =
          detail::position_tables<T>(chorus::detail::whole_length(length), features, value_of(x).device());
      const auto rows = [&](const auto& table) { return chorus::detail::rows_of_places(table, 0, length); };
      return x + reshape(stack(2, rows(tables.sine), rows(tables.cosine)), Shape<2>{length, features});
    });
  }
  std::string describe() const override { return "SinusoidalPositions"; }
};

/// Rotates the pairs (i, i + features / 2) of queries or keys x: [..., length, features] by an angle proportional to
/// the position, so that their products depend only on distances (Su et al. 2021). `first` is the position of the first
/// entry. Throws ShapeError for an odd number of features.
template <Operand X>
auto rotary_positions(const X& x, Index first = 0) {
  using T = typename tensor_of<X>::value_type;
  const Index length = value_of(x).size(-2), features = value_of(x).size(-1);
  check<ShapeError>(features % 2 == 0, "rotary_positions: ", features, " features, expected an even number");
  check<UsageError>(first >= 0, "rotary_positions: expected a first position of at least 0, got ", first);
  const auto& tables =
      detail::position_tables<T>(first + chorus::detail::whole_length(length), features, value_of(x).device());
  const auto rows = [&](const auto& table) { return chorus::detail::rows_of_places(table, first, length); };
  const auto sine = rows(tables.sine), cosine = rows(tables.cosine);
  const auto a = slice(x, -1, 0, features / 2), b = slice(x, -1, features / 2, features);
  return concat(-1, a * cosine - b * sine, b * cosine + a * sine);
}

}  // namespace chorus::nn
