#pragma once
/// Functions and operators of placed values: see rules.hpp for what they accept.

#include <array>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/placement/collectives.hpp>
#include <chorus/ops/placement/rows_here.hpp>
#include <chorus/ops/placement/rules.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/softmax.hpp>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorus {

#define CHORUS_OF_PLACED(FUNCTION)                                                                \
  template <class X, class... Ks, class... Numbers>                                               \
  auto FUNCTION(const Placed<X, Ks...>& x, const Numbers&... numbers) {                           \
    constexpr auto missing = detail::Combined<detail::nonlinear_kind, Placed<X, Ks...>>::missing; \
    detail::expect<missing>([] {});                                                               \
    return detail::unless<missing>(x.with(FUNCTION(x.part(), numbers...)));                       \
  }
CHORUS_OF_PLACED(relu)
CHORUS_OF_PLACED(relu6)
CHORUS_OF_PLACED(sigmoid)
CHORUS_OF_PLACED(log_sigmoid)
CHORUS_OF_PLACED(silu)
CHORUS_OF_PLACED(gelu)
CHORUS_OF_PLACED(gelu_tanh)
CHORUS_OF_PLACED(mish)
CHORUS_OF_PLACED(hardsigmoid)
CHORUS_OF_PLACED(hardswish)
CHORUS_OF_PLACED(leaky_relu)
CHORUS_OF_PLACED(elu)
CHORUS_OF_PLACED(softplus)
CHORUS_OF_PLACED(hardtanh)
CHORUS_OF_PLACED(abs)
CHORUS_OF_PLACED(square)
CHORUS_OF_PLACED(sqrt)
CHORUS_OF_PLACED(rsqrt)
CHORUS_OF_PLACED(exp)
CHORUS_OF_PLACED(log)
CHORUS_OF_PLACED(sin)
CHORUS_OF_PLACED(cos)
CHORUS_OF_PLACED(tanh)
CHORUS_OF_PLACED(erf)
CHORUS_OF_PLACED(pow)
CHORUS_OF_PLACED(clamp)
#undef CHORUS_OF_PLACED

#define CHORUS_OF_PLACED(OP, RULE)                                          \
  template <class A, class B>                                               \
  requires detail::SomePlaced<A, B>                                         \
  auto operator OP(const A& a, const B& b) {                                \
    constexpr auto missing = detail::Combined<detail::RULE, A, B>::missing; \
    detail::expect<missing>([] {});                                         \
    if constexpr (missing != detail::Missing::nothing)                      \
      return detail::refused_of(a, b);                                      \
    else                                                                    \
      return detail::combined<detail::RULE, detail::Beside::elements>(      \
          #OP, a, b, [](const auto& x, const auto& y) { return x OP y; });  \
  }

namespace detail {
// What a refused call of several operands returns.
template <class A, class... More>
auto refused_of(const A& a, const More&... more) {
  if constexpr (PlacedLike<A> || sizeof...(More) == 0)
    return refused(part_of_placed(as_placed(a)));
  else
    return refused_of(more...);
}
}  // namespace detail

CHORUS_OF_PLACED(+, add_kinds)
CHORUS_OF_PLACED(-, add_kinds)
CHORUS_OF_PLACED(*, multiply_kinds)
CHORUS_OF_PLACED(/, divide_kinds)
#undef CHORUS_OF_PLACED

template <class X, class... Ks>
auto operator-(const Placed<X, Ks...>& x) {
  return x.with(-x.part());
}

/// Products of columns by rows are Partial.
template <class A, class B>
requires detail::SomePlaced<A, B>
auto matmul(const A& a, const B& b) {
  constexpr auto missing = detail::Combined<detail::product_kinds, A, B>::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing)
    return detail::refused_of(a, b);
  else
    return detail::combined<detail::product_kinds, detail::Beside::matrices>(
        "matmul", a, b, [](const auto& x, const auto& y) { return matmul(x, y); });
}
/// x: [..., in], weight: [out, in]. An output that is a sum over ranks (Partial) gets its bias after the sum.
template <class X, class W>
requires detail::SomePlaced<X, W>
auto linear(const X& x, const W& weight) {
  constexpr auto missing = detail::Combined<detail::linear_kinds, X, W>::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing)
    return detail::refused_of(x, weight);
  else
    return detail::combined<detail::linear_kinds, detail::Beside::anyhow>(
        "linear", x, weight, [](const auto& in, const auto& w) { return linear(in, w); });
}
template <class X, class W, class B>
requires detail::SomePlaced<X, W, B>
auto linear(const X& x, const W& weight, const B& bias) {
  using Product = detail::Combined<detail::linear_kinds, X, W>;
  using WithBias =
      detail::Combined<detail::add_kinds, typename Product::template result<detail::recorded_part<X, W>>, B>;
  constexpr auto missing = Product::missing != detail::Missing::nothing ? Product::missing : WithBias::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing) {
    return detail::refused_of(x, weight, bias);
  } else {
    const auto& b = detail::as_placed(bias);
    const auto product = detail::combined<detail::linear_kinds, detail::Beside::anyhow>(
        "linear", x, weight, [&](const auto& in, const auto& w) { return linear(in, w, detail::part_of_placed(b)); });
    detail::check_all_shares<detail::add_kinds, detail::Beside::elements>(typename WithBias::both{}, "linear", product,
                                                                          b);
    return detail::placed_from(typename WithBias::kinds{}, detail::part_of_placed(product), product, b);
  }
}

/// table: [entries, features]. If ranks have some of the entries, the rows are Partial: zero for others' entries.
template <class W, class I>
requires detail::SomePlaced<W, I>
auto embedding(const W& table, const I& index) {
  constexpr auto missing = detail::Combined<detail::embedding_kinds, W, I>::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing) {
    return detail::refused_of(table, index);
  } else {
    const auto& rows = detail::as_placed(table);
    return detail::combined<detail::embedding_kinds, detail::Beside::anyhow>(
        "embedding", rows, index, [&](const auto& part, const auto& words) {
          const auto* const share = detail::share_of_entries(rows);
          if (share != nullptr && share->group != nullptr)
            return detail::rows_here(part, words, share->width, share->range());
          return embedding(part, words);
        });
  }
}

/// The sum of all elements. If they are split, it is Partial.
template <class X, class... Ks>
auto sum(const Placed<X, Ks...>& x) {
  return detail::mapped<detail::sum_kind>("sum", x, [](const auto& part) { return sum(part); });
}
/// The sum along axis `dim`, which is removed. If ranks split that axis, it is Partial.
template <int dim, class X, class... Ks>
auto sum(const Placed<X, Ks...>& x) {
  constexpr int axis = detail::from_the_last<dim, tensor_of<X>::rank>;
  return detail::mapped<detail::sum_along<axis>>("sum", x, [](const auto& part) { return sum(part, axis); });
}
namespace detail {
// The mean of this rank's numbers as a term of the mean of all ranks'.
template <class Mean, class Sum>
auto term_of_mean(Index here, Index all, const Mean& mean, const Sum& sum) {
  if (here == all) return mean();
  return here == 0 ? decltype(mean())(sum()) : mean() * (static_cast<double>(here) / static_cast<double>(all));
}
}  // namespace detail
/// The mean of all elements. If they are split, it is Partial: the terms are divided by the number of all ranks'.
template <class X, class... Ks>
auto mean(const Placed<X, Ks...>& x) {
  return detail::mapped<detail::sum_kind>("mean", x, [&](const auto& part) {
    return detail::term_of_mean(
        value_of(part).numel(), numel(x.shape()), [&] { return mean(part); }, [&] { return sum(part); });
  });
}
/// The mean along axis `dim`, which is removed; as `sum`.
template <int dim, class X, class... Ks>
auto mean(const Placed<X, Ks...>& x) {
  constexpr int axis = detail::from_the_last<dim, tensor_of<X>::rank>;
  return detail::mapped<detail::sum_along<axis>>("mean", x, [&](const auto& part) {
    return detail::term_of_mean(
        value_of(part).size(axis), x.shape()[detail::at_dim<axis, tensor_of<X>::rank>()],
        [&] { return mean(part, axis); }, [&] { return sum(part, axis); });
  });
}

/// Along axis `dim`, which ranks may not split.
template <int dim, class X, class... Ks>
auto softmax(const Placed<X, Ks...>& x) {
  constexpr int axis = detail::from_the_last<dim, tensor_of<X>::rank>;
  constexpr auto missing = detail::Combined<detail::normalized_along<axis>, Placed<X, Ks...>>::missing;
  detail::expect<missing>([] {});
  return detail::unless<missing>(x.with(softmax(x.part(), axis)));
}
template <int dim, class X, class... Ks>
auto log_softmax(const Placed<X, Ks...>& x) {
  constexpr int axis = detail::from_the_last<dim, tensor_of<X>::rank>;
  constexpr auto missing = detail::Combined<detail::normalized_along<axis>, Placed<X, Ks...>>::missing;
  detail::expect<missing>([] {});
  return detail::unless<missing>(x.with(log_softmax(x.part(), axis)));
}
/// x: [..., features], which ranks may not split; weight and bias: [features]. Where x is Copied or Split they are
/// Summed parameters, or copies.
template <class X, class W, class B>
requires detail::SomePlaced<X, W, B>
auto layer_norm(const X& x, const W& weight, const B& bias, double eps = 1e-5) {
  using Scaled = detail::Combined<detail::norm_kinds, X, W>;
  using Shifted =
      detail::Combined<detail::norm_kinds, typename Scaled::template result<detail::recorded_part<X, W>>, B>;
  constexpr auto missing = Scaled::missing != detail::Missing::nothing ? Scaled::missing : Shifted::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing) {
    return detail::refused_of(x, weight, bias);
  } else {
    const auto& in = detail::as_placed(x);
    const auto& w = detail::as_placed(weight);
    const auto& b = detail::as_placed(bias);
    return detail::placed_from(
        typename Shifted::kinds{},
        layer_norm(detail::part_of_placed(in), detail::part_of_placed(w), detail::part_of_placed(b), eps), in, w);
  }
}
/// For layers whose parameters are whole: gradients of weight and bias are summed where x is Copied or Split.
template <class X, class... Ks, Operand W, Operand B>
auto layer_norm_of_whole(const Placed<X, Ks...>& x, const W& weight, const B& bias, double eps) {
  return layer_norm(x, detail::copied_beside(x, weight), detail::copied_beside(x, bias), eps);
}
template <class X, class W>
requires detail::SomePlaced<X, W>
auto rms_norm(const X& x, const W& weight, double eps = 1e-6) {
  constexpr auto missing = detail::Combined<detail::norm_kinds, X, W>::missing;
  detail::expect<missing>([] {});
  if constexpr (missing != detail::Missing::nothing)
    return detail::refused_of(x, weight);
  else
    return detail::combined<detail::norm_kinds, detail::Beside::anyhow>(
        "rms_norm", x, weight, [&](const auto& in, const auto& w) { return rms_norm(in, w, eps); });
}

/// Drops the same elements as on one device: random numbers are drawn at the part's position.
template <class X, class... Ks>
auto dropout(const Placed<X, Ks...>& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 2, "dropout: expected an input with a batch axis");
  constexpr auto missing = detail::Combined<detail::nonlinear_kind, Placed<X, Ks...>>::missing;
  detail::expect<missing>([] {});
  constexpr int splits = ((detail::split_dim<Ks> != 0 ? 1 : 0) + ... + 0);
  static_assert(splits <= 1, "dropout: two axes of ranks split x: all_gather<Axis>(x) is missing");
  if constexpr (splits == 1) {
    constexpr int dim = (0 + ... + detail::split_dim<Ks>);
    static_assert(-dim < tensor_of<X>::rank,
                  "dropout: ranks split the axis of samples: all_gather<Axis>(x) is missing");
    if (x.group() != nullptr && training && p > 0) {
      check<UsageError>(p < 1, "dropout: expected a probability in [0, 1), got ", p);
      const auto& shape = value_of(x.part()).shape();
      Index inner = 1;
      for (auto i = detail::at_dim<dim, tensor_of<X>::rank>() + 1; i < shape.size(); ++i) inner *= shape[i];
      const auto part = x.range();
      return x.with(detail::dropout_part(x.part(), p, {x.width() * inner, part.begin * inner, part.count * inner}));
    }
  }
  return detail::unless<missing>(x.with(dropout(x.part(), p, training)));
}

/// In another scalar type. Terms of a sum (Partial) are not rounded.
template <Scalar To, class X, class... Ks>
auto to(const Placed<X, Ks...>& x) {
  using From = typename tensor_of<X>::value_type;
  constexpr bool wider = sizeof(To) > sizeof(From) || std::is_same_v<To, From>;
  constexpr auto missing =
      wider ? detail::Missing::nothing : detail::Combined<detail::nonlinear_kind, Placed<X, Ks...>>::missing;
  detail::expect<missing>([] {});
  return detail::unless<missing>(x.with(to<To>(x.part())));
}

/// `shape` counts all entries. The axis that ranks split keeps its size and all axes behind it. Throws ShapeError.
template <class X, class... Ks, std::size_t NewRank>
auto reshape(const Placed<X, Ks...>& x, std::array<Index, NewRank> shape) {
  const auto whole = x.shape();
  const auto set_part = [&]<class K>(std::type_identity<K>) {
    if constexpr (detail::split_dim<K> != 0) {
      constexpr int dim = detail::split_dim<K>;
      constexpr auto to = detail::at_dim<dim, NewRank>(), from = detail::at_dim<dim, tensor_of<X>::rank>();
      for (std::size_t i = 0; to + i < NewRank; ++i)
        check<ShapeError>(shape[to + i] == whole[from + i], "reshape: split columns must stay the last axis: expected ",
                          whole[from + i], " as its size, got ", shape);
    }
  };
  (set_part(std::type_identity<Ks>{}), ...);
  const auto set_size = [&]<class K>(std::type_identity<K>) {
    if constexpr (detail::split_dim<K> != 0)
      shape[detail::at_dim<detail::split_dim<K>, NewRank>()] = detail::share_along<typename K::axis>(x).range().count;
  };
  (set_size(std::type_identity<Ks>{}), ...);
  return x.with(reshape(x.part(), shape));
}
/// The same if the axis that ranks split becomes axis `dim`: heads of features, `reshape<2>(x, {batch, length, heads,
/// head})`. Throws ShapeError if ranks would have parts of an entry, or if other axes move over it.
template <int dim, class X, class K, std::size_t NewRank>
requires(detail::split_dim<K> != 0) auto reshape(const Placed<X, K>& x, std::array<Index, NewRank> shape) {
  constexpr int from = detail::split_dim<K>, to = detail::from_the_last<dim, static_cast<int>(NewRank)>;
  const auto before = detail::around_axis(x.shape(), detail::at_dim<from, tensor_of<X>::rank>()),
             after = detail::around_axis(shape, detail::at_dim<to, NewRank>());
  check<ShapeError>(before.outer == after.outer && before.axis * before.inner == after.axis * after.inner &&
                        x.unit() * before.inner % after.inner == 0,
                    "reshape: expected a shape in which ranks have whole entries of axis ", dim, " of ", shape,
                    ", from units of ", x.unit(), " along axis ", from, " of ", x.shape());
  detail::AxisShare share{after.axis, x.unit() * before.inner / after.inner, x.group()};
  shape[detail::at_dim<to, NewRank>()] = share.range().count;
  auto part = reshape(x.part(), shape);
  return Placed<decltype(part), placement::Split<typename K::axis, to>>(std::move(part), {std::move(share)});
}
template <int dim, class X, class K, std::size_t NewRank>
auto reshape(const Placed<X, K>& x, const Index (&shape)[NewRank]) {
  return reshape<dim>(x, std::to_array(shape));
}
/// Swaps axes a and b.
template <int a, int b, class X, class... Ks>
auto transpose(const Placed<X, Ks...>& x) {
  constexpr int i = detail::from_the_last<a, tensor_of<X>::rank>, j = detail::from_the_last<b, tensor_of<X>::rank>;
  return detail::mapped<detail::swapped<i, j>>("transpose", x, [](const auto& part) { return transpose(part, i, j); });
}

// Refused: which axis is meant must be known to the compiler, and is not in these calls.
#define CHORUS_OF_PLACED(FUNCTION)                                                                                 \
  template <class X, class... Ks, class... More>                                                                   \
  auto FUNCTION(const Placed<X, Ks...>& x, Index, const More&...) {                                                \
    constexpr auto missing = detail::Combined<detail::alike_kind, Placed<X, Ks...>>::missing;                      \
    detail::expect<missing>([] {});                                                                                \
    static_assert(missing != detail::Missing::nothing || detail::is_refused<Placed<X, Ks...>> || detail::never<X>, \
                  #FUNCTION ": expected an axis that the compiler knows: " #FUNCTION "<1>(x)");                    \
    return detail::refused(x.part());                                                                              \
  }
CHORUS_OF_PLACED(sum)
CHORUS_OF_PLACED(mean)
CHORUS_OF_PLACED(softmax)
CHORUS_OF_PLACED(log_softmax)
#undef CHORUS_OF_PLACED

// Functions of all of x: refused for values that are split and for terms of a sum.
#define CHORUS_OF_PLACED(FUNCTION)                                                            \
  template <class X, class... Ks, class... More>                                              \
  auto FUNCTION(const Placed<X, Ks...>& x, const More&... more) {                             \
    constexpr auto missing = detail::Combined<detail::alike_kind, Placed<X, Ks...>>::missing; \
    detail::expect<missing>([] {});                                                           \
    return detail::unless<missing>(x.with(FUNCTION(x.part(), more...)));                      \
  }
CHORUS_OF_PLACED(amax)
CHORUS_OF_PLACED(amin)
CHORUS_OF_PLACED(argmax)
CHORUS_OF_PLACED(logsumexp)
CHORUS_OF_PLACED(norm)
CHORUS_OF_PLACED(var)
#undef CHORUS_OF_PLACED

#define CHORUS_OF_PLACED(FUNCTION)                                                \
  template <class A, class B, class... More>                                      \
  requires detail::SomePlaced<A, B>                                               \
  auto FUNCTION(const A& a, const B&, const More&...) {                           \
    constexpr auto missing = detail::Combined<detail::loss_kinds, A, B>::missing; \
    detail::expect<missing>([] {});                                               \
    return sum(detail::part_of_placed(detail::as_placed(a)));                     \
  }
CHORUS_OF_PLACED(cross_entropy)
CHORUS_OF_PLACED(cross_entropy_per_sample)
CHORUS_OF_PLACED(nll_loss)
CHORUS_OF_PLACED(bce_with_logits)
CHORUS_OF_PLACED(mse_loss)
CHORUS_OF_PLACED(l1_loss)
CHORUS_OF_PLACED(smooth_l1_loss)
CHORUS_OF_PLACED(huber_loss)
CHORUS_OF_PLACED(kl_div)
#undef CHORUS_OF_PLACED

}  // namespace chorus
