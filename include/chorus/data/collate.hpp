#pragma once
/// Collates samples to a batch: stacks tensors, makes numbers a tensor, and other values, such as texts, a vector.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/data/fields.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>
#include <concepts>
#include <cstddef>
#include <functional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::data {

namespace detail {

template <class X>
using NumberInRow = typename decltype(std::span(std::declval<const X&>()))::value_type;

/// A sequence of numbers: std::vector, std::array, std::span.
template <class X>
concept NumbersInARow = requires { typename NumberInRow<X>; } && Scalar<NumberInRow<X>> &&
    !std::same_as<NumberInRow<X>, char>;

/// Collates one field of samples. Samples `begin` to `end` - 1 are in the batch; the others only affect its shape.
class Collator {
 public:
  /// `padding`: padding values for the first axis of the fields in order; the last value is used for all later fields.
  /// Empty: no padding. `most`: the padded length; 0: that of the longest.
  Collator(const char* who, Index begin, Index end, std::span<const double> padding = {}, Index most = 0)
      : who_(who), begin_(begin), end_(end), padding_(padding), most_(most) {}

  /// `of(sample)` returns the field.
  template <class Sample, class Of>
  auto operator()(const std::vector<Sample>& samples, const Of& of) {
    using X = std::remove_cvref_t<decltype(of(samples.front()))>;
    if constexpr (Scalar<X>) {
      auto out = Tensor<X, 1>::empty({end_ - begin_});
      for (Index i = begin_; i < end_; ++i) out.data()[i - begin_] = of(samples[static_cast<std::size_t>(i)]);
      return out;
    } else if constexpr (AnyTensor<X>) {
      static_assert(std::is_same_v<typename X::device_type, Cpu>,
                    "DataLoader: samples are tensors on the CPU; the policy moves a batch to its device");
      return stack<typename X::value_type, X::rank>(samples,
                                                    [&](const Sample& sample) { return contiguous(of(sample)); });
    } else if constexpr (NumbersInARow<X>) {
      using T = NumberInRow<X>;
      return stack<T, 1>(samples, [&](const Sample& sample) { return View<T>{of(sample)}; });
    } else if constexpr (HasFields<X>) {
      return fields(samples, of, std::make_index_sequence<field_count<X>>());
    } else {
      std::vector<X> out;
      for (Index i = begin_; i < end_; ++i) out.push_back(of(samples[static_cast<std::size_t>(i)]));
      return out;
    }
  }

 private:
  /// A sequence of numbers, with the part of a tensor's interface that `stack` needs.
  template <class T>
  struct View {
    std::span<const T> numbers;
    Shape<1> shape() const { return {static_cast<Index>(numbers.size())}; }
    const T* data() const { return numbers.data(); }
    std::size_t numel() const { return numbers.size(); }
  };

  template <class Sample, class Of, std::size_t... I>
  auto fields(const std::vector<Sample>& samples, const Of& of, std::index_sequence<I...>) {
    // In braces, which are evaluated from left to right, since padded fields are counted.
    return std::tuple{
        (*this)(samples, [&](const Sample& sample) -> decltype(auto) { return field<I>(of(sample)); })...};
  }

  template <class T, int Rank, class Sample, class Get>
  Tensor<T, Rank + 1> stack(const std::vector<Sample>& samples, const Get& get) {
    Shape<Rank> common = get(samples.front()).shape();
    const bool pads = Rank > 0 && !padding_.empty();
    for (std::size_t i = 0; i < samples.size(); ++i) {
      Shape<Rank> shape = get(samples[i]).shape();
      if constexpr (Rank > 0)
        if (pads) {
          check<ShapeError>(most_ == 0 || shape[0] <= most_, who_, ": expected at most ", most_,
                            " along the first axis, got shape ", shape, " of sample ", i, " of the batch");
          common[0] = shape[0] = std::max({common[0], shape[0], most_});
        }
      check<ShapeError>(shape == common, who_, ": expected samples of one shape, got ", common, " and, of sample ", i,
                        " of the batch, ", get(samples[i]).shape(),
                        pads ? " (the first axis alone is padded)" : " (data::pad_to_longest pads the first axis)");
    }
    Shape<Rank + 1> shape{end_ - begin_};
    std::copy(common.begin(), common.end(), shape.begin() + 1);
    auto out = Tensor<T, Rank + 1>::empty(shape);
    const auto stride = static_cast<std::size_t>(numel(common));
    const T filling = pads ? static_cast<T>(padding_[std::min(padded_++, padding_.size() - 1)]) : T{};
    for (Index i = begin_; i < end_; ++i) {
      T* const to = out.data() + static_cast<std::size_t>(i - begin_) * stride;
      const auto from = get(samples[static_cast<std::size_t>(i)]);
      const auto count = static_cast<std::size_t>(from.numel());
      std::copy_n(from.data(), count, to);
      std::fill_n(to + count, stride - count, filling);
    }
    return out;
  }

  const char* who_;
  Index begin_, end_;
  std::span<const double> padding_;
  Index most_;
  std::size_t padded_ = 0;  // number of padded fields so far
};

/// An empty batch with the shapes of `batch`, which has one sample. Throws UsageError if samples are not along the
/// first axis.
template <class B>
B none_of(const B& batch) {
  if constexpr (AnyTensor<B>) {
    if constexpr (B::rank > 0)
      if (batch.defined() && batch.size(0) == 1) return batch.slice(0, 0, 0);
    fail<UsageError>(
        "DataLoader: this rank's share of a batch is empty, and the collate function's tensor for one "
        "sample has shape ",
        batch.shape(),
        ", expected a first axis of 1: set .drop_last, or use batches of at least one sample for each rank");
  } else if constexpr (HasFields<B>) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return B{none_of<std::remove_cvref_t<decltype(field<I>(batch))>>(field<I>(batch))...};
    }
    (std::make_index_sequence<field_count<B>>());
  } else if constexpr (requires {
                         B{};
                         std::declval<B&>().clear();
                       }) {
    return B{};
  } else {
    return batch;
  }
}

}  // namespace detail

/// A DataLoader's default, like PyTorch's default_collate. Tensors of one shape are stacked along a new first axis.
/// Numbers, and sequences of numbers (std::vector, std::array), become a tensor. Pairs, tuples and plain structs become
/// a tuple of their collated members. Other values, such as texts, become a std::vector. Throws ShapeError if shapes
/// differ.
struct DefaultCollate {
  template <class Sample>
  auto operator()(const std::vector<Sample>& samples, Index begin, Index end) const {
    return detail::Collator("DataLoader", begin, end)(samples, std::identity{});
  }
};

/// The type of pad_to_longest and pad_to.
template <bool Whole>
struct Padding {
  /// The length is that of the global batch, so other ranks' samples are read, too.
  static constexpr bool whole_batch = Whole;
  Index length = 0;
  std::vector<double> values = {};

  template <class Sample>
  auto operator()(const std::vector<Sample>& samples, Index begin, Index end) const {
    const char* who = Whole ? "pad_to_longest" : "pad_to";
    return detail::Collator(who, begin, end, values, length)(samples, std::identity{});
  }
};

/// Collates like DefaultCollate, but pads tensors and sequences of numbers along their first axis to the longest in the
/// global batch. `pad_to_longest(0, -100)` pads a sample's first such member with 0 and all others with -100. The
/// length is the same on all ranks and under every policy, so each rank reads the whole batch; `pad_to` reads only the
/// rank's share. To keep a sample's length, store it beside the sequence, `struct { tokens; Index length; }`.
template <std::convertible_to<double>... Values>
Padding<true> pad_to_longest(Values... values) {
  if constexpr (sizeof...(Values) == 0)
    return {0, {0.0}};
  else
    return {0, {static_cast<double>(values)...}};
}

/// Pads to a fixed length. Throws UsageError for a length below 1, and, when used, ShapeError for a longer sample.
template <std::convertible_to<double>... Values>
Padding<false> pad_to(Index length, Values... values) {
  check<UsageError>(length >= 1, "pad_to: expected a length of at least 1, got ", length);
  if constexpr (sizeof...(Values) == 0)
    return {length, {0.0}};
  else
    return {length, {static_cast<double>(values)...}};
}

namespace detail {

/// A library function, which also gets samples outside of the batch, for their shapes.
template <class Collate, class Sample>
concept CollatesRange = requires(const Collate& collate, const std::vector<Sample>& samples) {
  collate(samples, Index{}, Index{});
};

template <class Collate, class Sample>
auto collated(const Collate& collate, std::vector<Sample> samples, Index begin, Index end) {
  if constexpr (CollatesRange<Collate, Sample>) {
    return collate(std::as_const(samples), begin, end);
  } else {
    static_assert(
        requires { collate(std::move(samples)); },
        "DataLoader: expected a collate function of a std::vector of the samples that get returns");
    const bool none = begin == end;
    auto batch = collate(std::move(samples));
    return none ? none_of(batch) : batch;
  }
}

/// Whether the loader reads all ranks' samples.
template <class Collate>
constexpr bool collates_whole() {
  if constexpr (requires { Collate::whole_batch; })
    return Collate::whole_batch;
  else
    return false;
}

}  // namespace detail

}  // namespace chorus::data
