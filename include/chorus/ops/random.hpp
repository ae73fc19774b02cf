#pragma once
/// Random numbers in and outside of a forward pass: rand, randn, randint, bernoulli, multinomial, normal, randperm.

#include <algorithm>
#include <array>
#include <chorus/core/random.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cast.hpp>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// How draws depend on samples. In a policy's forward pass a number depends on the seed, the pass, the operation, the
/// sample's index in the global batch and the position in the sample. One device, DataParallel and
/// DistributedDataParallel therefore draw the same bits.
///   * If the first size (or that along the policy's `dim`) is this device's number of samples, rows belong to samples.
///   * If the first size is no multiple of it, or for a Parameter, all devices draw the same numbers.
/// On several devices other shapes are ambiguous, such as two rows per sample, or 64 rows of noise for a weight at 32
/// samples: UsageError asks for `same_on_all`. A weight with as many rows as the device has samples looks like samples:
/// set `same_on_all = true`.
struct RandomOptions {
  /// true: all devices draw the same numbers. false: rows belong to samples, equally many rows for each.
  std::optional<bool> same_on_all = {};
  /// The axis of the samples; -1: see above.
  int axis = -1;
  /// Outside of a policy's forward pass: the global index of row 0, so that ranks, which share a seed, can draw
  /// different rows.
  std::int64_t first_row = 0;
};

namespace detail {

template <Device D>
void check_can_draw(std::string_view operation, const RandomKey& key) {
  if constexpr (std::is_same_v<D, Cpu>)
    check<UsageError>(key.replays == nullptr, operation,
                      ": a captured step would replay the same random numbers of the host");
}

/// The random key for a tensor's shape, and the axis of its rows.
struct RandomRows {
  RandomKey key;
  std::size_t axis;
};

[[gnu::cold]] inline void check_samples_known(std::string_view operation, std::span<const Index> shape, Index size,
                                              const RandomContext& context) {
  const bool multiple = size % context.samples == 0;
  const bool of_others = context.is_share && context.is_share(size);
  check<UsageError>(
      !multiple && !of_others, operation, ": the shape ", shape, " has a size of ", size,
      multiple ? ": these may be several rows for each of this device's "
               : ": another device has that many samples, this device has ",
      context.samples,
      " samples, or values that all devices share: expected {.same_on_all = false} or {.same_on_all = true}");
}

/// Throws UsageError if the shape is ambiguous.
inline RandomRows random_rows(std::string_view operation, std::span<const Index> shape, const RandomOptions& options) {
  const int rank = static_cast<int>(shape.size());
  check<UsageError>(options.axis >= -1 && options.axis < std::max(rank, 1), operation,
                    ": expected an axis of samples in range, got axis ", options.axis, " of shape ", shape);
  auto* context = random_context();
  const auto place = [](int axis) { return static_cast<std::size_t>(axis); };
  int axis = std::max(options.axis, 0);
  if (context == nullptr) {
    auto key = next_key_outside_of_policies();
    key.first_sample = options.first_row;
    return {key, place(axis)};
  }
  auto key = next_key(*context, true);
  const Index samples = context->samples;
  const bool several = context->devices > 1, for_all = options.same_on_all.value_or(false) || rank == 0;
  const auto first_of = [&](Index rows) { return samples > 0 ? rows / samples * key.first_sample : 0; };
  const auto settled = [&](std::int64_t first) {
    key.first_sample = first;
    return RandomRows{key, place(axis)};
  };
  if (for_all) return settled(0);
  const bool both = options.axis < 0 && context->dim > 0 && context->dim < rank;  // two axes may be that of the samples
  if (both && shape[place(context->dim)] == samples) {
    check<UsageError>(!several || shape[0] != samples || samples == 0, operation, ": two axes of the shape ", shape,
                      " have this device's number of samples; expected {.axis = ...} to name the axis of the samples");
    axis = context->dim;
  }
  const Index rows = shape[place(axis)];
  if (options.same_on_all.has_value() || (several && rows == samples)) {
    check<UsageError>(samples == 0 || rows % samples == 0, operation, ": ", rows, " rows along axis ", axis,
                      " of the shape ", shape, " do not belong to ", samples, " samples");
    check<UsageError>(!both || rows == samples, operation, ": several rows a sample in the shape ", shape,
                      "; expected {.axis = ...} to name the samples' axis");
    return settled(samples == 0 && !several ? key.first_sample : first_of(rows));
  }
  if (!several) return settled(samples > 0 && rows % samples == 0 ? first_of(rows) : key.first_sample);
  if (samples > 0 && rows > 0) {  // a rank without samples cannot tell
    check_samples_known(operation, shape, rows, *context);
    if (both) check_samples_known(operation, shape, shape[place(context->dim)], *context);
  }
  return settled(0);
}

template <Scalar T, std::size_t Rank, Device D>
using OfShape = Tensor<T, static_cast<int>(Rank), D>;

/// A tensor filled by `draw(rows, inner, numbers, key)`.
template <Scalar T, std::size_t Rank, Device D, class Draw>
OfShape<T, Rank, D> drawn(const char* operation, const std::array<Index, Rank>& shape, D device,
                          const RandomOptions& options, const Draw& draw) {
  const auto [key, axis] = random_rows(operation, shape, options);
  check_can_draw<D>(operation, key);
  auto rows_first = shape;
  Index rows = 1;
  if constexpr (Rank > 0) {
    std::swap(rows_first[0], rows_first[axis]);
    rows = rows_first[0];
  }
  auto out = OfShape<T, Rank, D>::empty(rows_first, device);
  draw(rows, rows == 0 ? 0 : out.numel() / rows, out.data(), key);
  return axis == 0 ? out : contiguous(out.transpose(0, static_cast<Index>(axis)));
}

/// By default noise for parameters is the same on all devices.
template <class... Xs>
RandomOptions options_for(RandomOptions options) {
  if ((std::is_base_of_v<AnyParameter, Xs> && ...) && !options.same_on_all) options.same_on_all = true;
  return options;
}

template <Operand X>
const auto& defined_value(const char* operation, const X& x) {
  const auto& value = value_of(x);
  check<UsageError>(value.defined(), operation, ": the operand is undefined");
  return value;
}

/// Not checked on GPUs, which would have to wait.
template <AnyTensor X, class Right>
void check_numbers(const X& x, const Right& right, const char* operation, const char* expected) {
  if constexpr (std::is_same_v<typename X::device_type, Cpu>) {
    const auto dense = contiguous(x);
    for (Index i = 0; i < dense.numel(); ++i) {
      const auto number = static_cast<double>(dense.data()[i]);
      check<UsageError>(right(number), operation, ": expected ", expected, ", got ", number);
    }
  }
}
inline void check_deviation(double std) {
  check<UsageError>(std >= 0, "normal: expected a standard deviation of at least 0, got ", std);
}
template <AnyTensor X>
void check_deviations(const X& std) {
  check_numbers(
      std, [](double number) { return number >= 0; }, "normal", "a standard deviation of at least 0");
}

}  // namespace detail

/// Uniform in [0, 1): `ch::rand<float, 2>({n, d}, device)`. T: float, double, bf16, half. For the dependence on samples
/// and for errors see RandomOptions, here and below. The default device is that of the pass.
template <Real T, std::size_t Rank, Device D = Cpu>
detail::OfShape<T, Rank, D> rand(const std::array<Index, Rank>& shape, D device = default_device<D>(),
                                 const RandomOptions& options = {}) {
  using C = compute_type<T>;
  // The largest number below 1 in T, so that nothing is rounded up to 1.
  const C last = Narrow<T> ? C(1) - (std::is_same_v<T, bf16> ? C(0x1p-8) : C(0x1p-11)) : std::nextafter(C(1), C(0));
  return to<T>(detail::drawn<C>("rand", shape, device, options,
                                [&](Index rows, Index inner, C* out, const RandomKey& key) {
                                  kernels::draw_uniform(device, rows, inner, out, last, key);
                                }));
}

/// Standard normal: `ch::randn<float, 2>({n, d}, device)`.
template <Real T, std::size_t Rank, Device D = Cpu>
detail::OfShape<T, Rank, D> randn(const std::array<Index, Rank>& shape, D device = default_device<D>(),
                                  const RandomOptions& options = {}) {
  using C = compute_type<T>;
  return to<T>(detail::drawn<C>("randn", shape, device, options,
                                [&](Index rows, Index inner, C* out, const RandomKey& key) {
                                  kernels::draw_normal(device, rows, inner, out, key);
                                }));
}

/// Uniform integers in [low, high): `ch::randint<std::int64_t, 1>(0, 1000, {n}, device)`. Throws UsageError unless low
/// < high, and if T cannot hold them.
template <std::integral T, std::size_t Rank, Device D = Cpu>
detail::OfShape<T, Rank, D> randint(std::int64_t low, std::int64_t high, const std::array<Index, Rank>& shape,
                                    D device = default_device<D>(), const RandomOptions& options = {}) {
  static_assert(!std::is_same_v<T, bool>, "randint: bool is not supported; use bernoulli");
  check<UsageError>(low < high, "randint: expected low < high, got ", low, " and ", high);
  check<UsageError>(std::in_range<T>(low) && std::in_range<T>(high - 1), "randint: numbers from ", low, " to ",
                    high - 1, " do not fit into ", dtype<T>);
  const auto range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  return detail::drawn<T>("randint", shape, device, options,
                          [&](Index rows, Index inner, T* out, const RandomKey& key) {
                            kernels::draw_integers(device, rows, inner, out, low, range, key);
                          });
}

/// Uniform in [0, 1), with x's type, shape and device. x gets no gradient.
template <Operand X>
auto rand_like(const X& x, const RandomOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto& value = detail::defined_value("rand_like", x);
  return rand<T>(value.shape(), value.device(), detail::options_for<X>(options));
}

/// Standard normal, with x's type, shape and device. x gets no gradient. For a differentiable sample of N(mean, std²)
/// use `mean + std * ch::randn_like(std)` (Kingma, Welling 2014).
template <Operand X>
auto randn_like(const X& x, const RandomOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto& value = detail::defined_value("randn_like", x);
  return randn<T>(value.shape(), value.device(), detail::options_for<X>(options));
}

/// For each element p: 1 with probability p, else 0, in p's type. p gets no gradient. Throws UsageError if an element
/// is not in [0, 1]; on a GPU its result is NaN instead.
template <Operand P>
auto bernoulli(const P& p, const RandomOptions& options = {}) {
  using T = typename tensor_of<P>::value_type;
  static_assert(Real<T>, "bernoulli: expected floating-point probabilities");
  using C = compute_type<T>;
  const auto chance = contiguous(to<C>(detail::defined_value("bernoulli", p)));
  detail::check_numbers(
      chance, [](double number) { return number >= 0 && number <= 1; }, "bernoulli", "probabilities in [0, 1]");
  const auto own = detail::options_for<P>(options);
  const auto out = rand<C>(chance.shape(), chance.device(), own);
  kernels::is_below(chance.device(), chance.numel(), chance.data(), out.data());
  return to<T>(out);
}

/// Samples of N(mean, std²), for numbers or tensors of one shape. Not differentiable: see randn_like. Throws UsageError
/// if std is negative (not checked on a GPU), ShapeError if shapes differ.
template <Operand M, Operand S>
auto normal(const M& mean, const S& std, const RandomOptions& options = {}) {
  const auto& centre = detail::defined_value("normal", mean);
  const auto& spread = detail::defined_value("normal", std);
  check<ShapeError>(std::ranges::equal(centre.shape(), spread.shape()), "normal: expected one shape, got mean ",
                    centre.shape(), " and deviation ", spread.shape());
  detail::check_deviations(spread);
  return centre + spread * randn_like(spread, detail::options_for<M, S>(options));
}
template <Operand M>
auto normal(const M& mean, double std, const RandomOptions& options = {}) {
  detail::check_deviation(std);
  return detail::defined_value("normal", mean) + randn_like(mean, options) * std;
}
template <Operand S>
auto normal(double mean, const S& std, const RandomOptions& options = {}) {
  detail::check_deviations(detail::defined_value("normal", std));
  return value_of(std) * randn_like(std, options) + mean;
}
template <Real T, std::size_t Rank, Device D = Cpu>
detail::OfShape<T, Rank, D> normal(double mean, double std, const std::array<Index, Rank>& shape,
                                   D device = default_device<D>(), const RandomOptions& options = {}) {
  detail::check_deviation(std);
  return randn<T>(shape, device, options) * std + mean;
}

namespace detail {

/// The key for `count` dependent numbers that the host draws. Throws UsageError if `count` is this device's number of
/// samples and there are several devices.
inline RandomKey key_of_whole(std::string_view operation, Index count, std::string_view what,
                              const RandomOptions& options) {
  auto* context = random_context();
  auto key = context != nullptr ? next_key(*context, true) : next_key_outside_of_policies();
  if (context != nullptr) {
    check<UsageError>(context->devices <= 1 || count != context->samples || count == 0 || options.same_on_all,
                      operation, ": ", count, " is this device's number of samples; ", what,
                      ": expected {.same_on_all = true}, the same on all devices, or {.same_on_all = false}, each "
                      "device its own");
    if (options.same_on_all.value_or(true)) key.first_sample = 0;
  } else {
    key.first_sample = options.first_row;
  }
  check_can_draw<Cpu>(operation, key);
  return key;
}

}  // namespace detail

/// A random permutation of 0 to n - 1 (Fisher, Yates), made on the host. In a forward pass all devices get the same
/// one. With several devices, throws UsageError if n is this device's number of samples, since a permutation of a share
/// is none of the batch: `same_on_all` then says whether all devices get the same permutation or their own.
template <std::integral T = std::int64_t, Device D = Cpu>
Tensor<T, 1, D> randperm(Index n, D device = default_device<D>(), const RandomOptions& options = {}) {
  check<UsageError>(n >= 0 && std::in_range<T>(n), "randperm: expected a number of at least 0 that fits into ",
                    dtype<T>, ", got ", n);
  const auto own = detail::key_of_whole("randperm", n, "an order on one device is not the batch's", options);
  const auto words = philox(own.seed, kernels::dropout_counter(own, own.first_sample, 0));
  const auto order = kernels::permutation(std::uint64_t{words[0]} << 32 | words[1], words[2], n);
  auto out = Tensor<T, 1>::empty({n});
  std::transform(order.begin(), order.end(), out.data(), [](Index at) { return static_cast<T>(at); });
  return to_device(out, device);
}

namespace detail {

/// The non-negative weights of a row, and their cumulative sums.
struct Categories {
  std::vector<double> weights, up_to;
  Index possible = 0;

  Categories(std::span<const double> row, Index number) : weights(row.begin(), row.end()) {
    double sum = 0;
    for (const double weight : row) {
      check<UsageError>(weight >= 0 && weight <= std::numeric_limits<double>::max(),
                        "multinomial: expected finite weights of at least 0, got ", weight, " in row ", number);
      possible += weight > 0 ? 1 : 0;
      up_to.push_back(sum += weight);
    }
    check<UsageError>(sum > 0 && sum <= std::numeric_limits<double>::max(),
                      "multinomial: expected weights with a finite sum above 0, got ", sum, " in row ", number);
  }
  /// Chooses a category by a number in [0, 1).
  std::int64_t choose(double unit) const {
    const auto first_above = std::upper_bound(up_to.begin(), up_to.end(), unit * up_to.back());
    auto chosen = first_above == up_to.end() ? up_to.size() - 1 : static_cast<std::size_t>(first_above - up_to.begin());
    while (!(weights[chosen] > 0)) --chosen;  // rounding may lead past the last one
    return static_cast<std::int64_t>(chosen);
  }
  /// Chooses `count` distinct categories, by a number in [0, 1) for each: those with the smallest exponential times.
  /// This is equivalent to drawing one after the other (Efraimidis, Spirakis 2006).
  void choose(const double* units, Index count, std::int64_t* out) const {
    std::vector<std::pair<double, std::int64_t>> times;
    for (std::size_t i = 0; i < weights.size(); ++i)
      if (weights[i] > 0) times.emplace_back(-std::log1p(-units[i]) / weights[i], static_cast<std::int64_t>(i));
    std::partial_sort(times.begin(), times.begin() + count, times.end());
    for (Index i = 0; i < count; ++i) out[i] = times[static_cast<std::size_t>(i)].second;
  }
};

}  // namespace detail

/// weights: [categories] or [rows, categories], non-negative, with any sum -> [num_samples] or [rows, num_samples]:
/// draws categories of each row in proportion to their weights, with `replacement` or without. Made on the host.
/// Without replacement, draws from [categories] are the same on all devices; else RandomOptions applies to the result's
/// rows. Weights get no gradient. Throws UsageError if weights are negative, not finite or all 0, if num_samples is not
/// positive, or if fewer categories than needed have a positive weight.
template <Operand W>
auto multinomial(const W& weights, Index num_samples, bool replacement = false, const RandomOptions& options = {}) {
  constexpr int rank = tensor_of<W>::rank;
  static_assert(rank == 1 || rank == 2, "multinomial: expected weights [categories] or [rows, categories]");
  static_assert(Real<typename tensor_of<W>::value_type>, "multinomial: expected floating-point weights");
  const auto& given = detail::defined_value("multinomial", weights);
  const auto host = to<double>(to_device(given, Cpu{}));
  const Index rows = rank == 1 ? 1 : host.size(0), categories = host.size(-1);
  check<UsageError>(num_samples > 0 && categories > 0, "multinomial: expected some samples and categories, got ",
                    num_samples, " of ", categories);
  auto own = detail::options_for<W>(options);
  const bool together = rank == 1 && !replacement;
  Shape<rank> shape{};
  shape[0] = rank == 1 ? num_samples : rows;
  if constexpr (rank == 2) shape[1] = num_samples;
  own.axis = 0;
  const auto key = together ? detail::key_of_whole("multinomial", num_samples,
                                                   "distinct draws on one device are not distinct in the batch", own)
                            : detail::random_rows("multinomial", shape, own).key;
  detail::check_can_draw<Cpu>("multinomial", key);
  const Index lines = rank == 1 && replacement ? num_samples : rows;  // each with its own sample's numbers
  const Index inner = replacement ? rows * num_samples / std::max<Index>(lines, 1) : categories;
  std::vector<double> units(static_cast<std::size_t>(lines * inner));
  kernels::draw_uniform(Cpu{}, lines, inner, units.data(), std::nextafter(1.0, 0.0), key);
  auto out = Tensor<std::int64_t, rank>::empty(shape);
  for (Index row = 0; row < rows; ++row) {
    const detail::Categories of({host.data() + row * categories, static_cast<std::size_t>(categories)}, row);
    check<UsageError>(replacement || of.possible >= num_samples, "multinomial: expected ", num_samples,
                      " categories with a weight above 0, got ", of.possible, " in row ", row);
    std::int64_t* chosen = out.data() + row * num_samples;
    const double* unit = units.data() + row * (replacement ? num_samples : categories);
    if (!replacement)
      of.choose(unit, num_samples, chosen);
    else
      for (Index i = 0; i < num_samples; ++i) chosen[i] = of.choose(unit[i]);
  }
  return to_device(out, given.device());
}

}  // namespace chorus
