#pragma once
/// TensorDataset, VectorDataset, Subset, ConcatDataset and random_split.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::data {

namespace detail {

/// References an lvalue dataset, which must outlive the reference; keeps a temporary.
template <class D>
std::shared_ptr<const D> kept(const D& dataset) {
  return {std::shared_ptr<void>(), &dataset};
}
template <class D>
requires(!std::is_lvalue_reference_v<D>) std::shared_ptr<const D> kept(D&& dataset) {
  return std::make_shared<const D>(std::move(dataset));
}

template <class T, int Rank>
auto row_of(const Tensor<T, Rank>& tensor, Index i) {
  if constexpr (Rank == 1)
    return tensor(i);
  else
    return tensor[i];
}

}  // namespace detail

/// Like PyTorch's TensorDataset: sample i is a tuple of each tensor's element i along its first axis, a tensor with one
/// axis less or a number.
template <AnyTensor... Xs>
requires(sizeof...(Xs) > 0) class TensorDataset {
 public:
  /// Throws ShapeError if the tensors' first axes differ.
  explicit TensorDataset(Xs... tensors) : tensors_(std::move(tensors)...), size_(std::get<0>(tensors_).size(0)) {
    static_assert(((Xs::rank > 0) && ...), "TensorDataset: samples lie along the first axis");
    const auto same = [&](const auto& x) {
      check<ShapeError>(x.size(0) == size_, "TensorDataset: expected ", size_,
                        " samples, as in the first tensor, got shape ", x.shape());
    };
    std::apply([&](const auto&... x) { (same(x), ...); }, tensors_);
  }
  Index size() const { return size_; }
  auto get(Index i) const {
    detail::check_place("TensorDataset", i, size_);
    return std::apply([&](const auto&... x) { return std::tuple{detail::row_of(x, i)...}; }, tensors_);
  }

 private:
  std::tuple<Xs...> tensors_;
  Index size_;
};

/// The elements of a std::vector: texts, structs, tensors of any sizes.
template <class Sample>
class VectorDataset {
 public:
  explicit VectorDataset(std::vector<Sample> samples) : samples_(std::move(samples)) {}
  Index size() const { return static_cast<Index>(samples_.size()); }
  const Sample& get(Index i) const {
    detail::check_place("VectorDataset", i, size());
    return samples_[static_cast<std::size_t>(i)];
  }

 private:
  std::vector<Sample> samples_;
};

/// The samples of a dataset at `indices`, in that order. An lvalue dataset must outlive it; a temporary is kept.
template <Dataset D>
class Subset {
 public:
  /// Throws UsageError if an index is out of range.
  Subset(const D& dataset, std::vector<Index> indices) : Subset(detail::kept(dataset), std::move(indices)) {}
  Subset(D&& dataset, std::vector<Index> indices) : Subset(detail::kept(std::move(dataset)), std::move(indices)) {}
  Subset(std::shared_ptr<const D> dataset, std::vector<Index> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    for (const Index i : indices_) detail::check_place("Subset", i, dataset_->size());
  }

  const std::vector<Index>& indices() const { return indices_; }
  Index size() const { return static_cast<Index>(indices_.size()); }

  auto get(Index i) const requires detail::ReadsSamples<D> { return dataset_->get(at(i)); }
  auto get(Index i, RandomStream& random) const requires detail::DrawsSamples<D> {
    return dataset_->get(at(i), random);
  }
  std::int64_t get(Index i, std::span<float> image) const requires LabelledImages<D> {
    return dataset_->get(at(i), image);
  }
  Index classes() const requires LabelledImages<D> { return dataset_->classes(); }
  ImageShape image_shape() const requires LabelledImages<D> { return dataset_->image_shape(); }
  Normalize normalization() const requires requires(const D& d) {
    { d.normalization() } -> std::convertible_to<Normalize>;
  }
  { return dataset_->normalization(); }

 private:
  Index at(Index i) const {
    detail::check_place("Subset", i, size());
    return indices_[static_cast<std::size_t>(i)];
  }

  std::shared_ptr<const D> dataset_;
  std::vector<Index> indices_;
};
template <class D>
Subset(D&&, std::vector<Index>) -> Subset<std::remove_cvref_t<D>>;

/// The samples of several datasets of one type, concatenated.
template <Dataset D>
class ConcatDataset {
 public:
  /// Lvalue datasets must outlive it; temporaries are kept. Throws ShapeError if images have different shapes.
  template <class First, class... More>
  requires std::same_as<std::remove_cvref_t<First>, D> &&
      (std::same_as<std::remove_cvref_t<More>, D>&&...) explicit ConcatDataset(First&& first, More&&... more)
      : ConcatDataset(std::vector<std::shared_ptr<const D>>{detail::kept(std::forward<First>(first)),
                                                            detail::kept(std::forward<More>(more))...}) {}
  explicit ConcatDataset(std::vector<D> parts) : ConcatDataset(shared(std::move(parts))) {}

  Index size() const { return ends_.back(); }

  auto get(Index i) const requires detail::ReadsSamples<D> {
    const auto [part, place] = find(i);
    return part->get(place);
  }
  auto get(Index i, RandomStream& random) const requires detail::DrawsSamples<D> {
    const auto [part, place] = find(i);
    return part->get(place, random);
  }
  std::int64_t get(Index i, std::span<float> image) const requires LabelledImages<D> {
    const auto [part, place] = find(i);
    return part->get(place, image);
  }
  Index classes() const requires LabelledImages<D> {
    Index most = 0;
    for (const auto& part : parts_) most = std::max(most, static_cast<Index>(part->classes()));
    return most;
  }
  ImageShape image_shape() const requires LabelledImages<D> { return parts_[0]->image_shape(); }
  /// The normalisation of the first dataset, for all.
  Normalize normalization() const requires requires(const D& d) {
    { d.normalization() } -> std::convertible_to<Normalize>;
  }
  { return parts_[0]->normalization(); }

 private:
  explicit ConcatDataset(std::vector<std::shared_ptr<const D>> parts) : parts_(std::move(parts)) {
    check<UsageError>(!parts_.empty(), "ConcatDataset: expected at least one dataset, got none");
    for (const auto& part : parts_) {
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + static_cast<Index>(part->size()));
      if constexpr (LabelledImages<D>)
        check<ShapeError>(part->image_shape() == parts_[0]->image_shape(), "ConcatDataset: expected images of shape ",
                          parts_[0]->image_shape(), ", as in the first dataset, got ", part->image_shape());
    }
  }
  static std::vector<std::shared_ptr<const D>> shared(std::vector<D> parts) {
    std::vector<std::shared_ptr<const D>> out;
    for (auto& part : parts) out.push_back(detail::kept(std::move(part)));
    return out;
  }
  std::pair<const D*, Index> find(Index i) const {
    detail::check_place("ConcatDataset", i, size());
    const auto part = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), i) - ends_.begin());
    return {parts_[part].get(), i - (part == 0 ? 0 : ends_[part - 1])};
  }

  std::vector<std::shared_ptr<const D>> parts_;
  std::vector<Index> ends_;
};
template <class First, class... More>
requires Dataset<std::remove_cvref_t<First>> ConcatDataset(First&&, More&&...)
->ConcatDataset<std::remove_cvref_t<First>>;
template <Dataset D>
ConcatDataset(std::vector<D>) -> ConcatDataset<D>;

namespace detail {
/// Numbers of samples for lengths. Floating-point lengths are fractions of `size` and must add up to 1.
template <class Length>
std::vector<Index> split_counts(std::span<const Length> lengths, Index size) {
  std::vector<Index> counts;
  if constexpr (std::is_floating_point_v<Length>) {
    double sum = 0;
    for (const auto length : lengths) {
      check<UsageError>(length >= 0, "random_split: expected fractions of at least 0, got ", length);
      const double begin = sum;
      sum += static_cast<double>(length);
      const auto count = [&](double part) { return std::llround(std::min(part, 1.0) * static_cast<double>(size)); };
      counts.push_back(count(sum) - count(begin));
    }
    check<UsageError>(std::abs(sum - 1) < 1e-6, "random_split: expected fractions that add up to 1, got ", sum);
  } else {
    Index sum = 0;
    for (const auto length : lengths) {
      check<UsageError>(std::cmp_greater_equal(length, 0) && std::cmp_less_equal(length, size - sum),
                        "random_split: expected lengths that add up to the dataset's ", size, " samples, got ", sum,
                        " and then ", length);
      counts.push_back(static_cast<Index>(length));
      sum += counts.back();
    }
    check<UsageError>(sum == size, "random_split: expected lengths that add up to the dataset's ", size,
                      " samples, got ", sum);
  }
  return counts;
}
}  // namespace detail

/// Disjoint random parts of a dataset: `random_split(all, {0.8, 0.2}, run.seed())`, or by numbers of samples, `{800,
/// 200}`. With one seed they are the same on all ranks and under every policy. Throws UsageError if the lengths don't
/// add up. An lvalue dataset must outlive the parts; a temporary is kept.
template <class D, class Length, std::size_t N>
requires Dataset<std::remove_cvref_t<D>> std::vector<Subset<std::remove_cvref_t<D>>> random_split(
    D&& dataset, const Length (&lengths)[N], std::uint64_t seed = 0) {
  const auto counts = detail::split_counts(std::span<const Length>(lengths), static_cast<Index>(dataset.size()));
  const auto order = kernels::permutation(seed ^ static_cast<std::uint64_t>(Purpose::split), 0, dataset.size());
  const auto shared = detail::kept(std::forward<D>(dataset));
  std::vector<Subset<std::remove_cvref_t<D>>> out;
  auto at = order.begin();
  for (const Index count : counts) {
    out.emplace_back(shared, std::vector<Index>(at, at + count));
    at += count;
  }
  return out;
}

}  // namespace chorus::data
