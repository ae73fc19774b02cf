#pragma once
/// What DistributedDataParallel does about gradients that are not finite.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace chorus::detail {

/// Calls `f(float*)` or `f(double*)`: a pointer into a flat buffer as what it is.
template <class F>
void with_type(DType type, std::byte* at, const F& f) {
  check<UsageError>(type == DType::f32 || type == DType::f64, "DistributedDataParallel: gradients of dtype ", type,
                    " can't be averaged; expected F32 or F64");
  if (type == DType::f32)
    f(reinterpret_cast<float*>(at));
  else
    f(reinterpret_cast<double*>(at));
}

/// The first entry of a bucket whose gradient is not finite, or no_bucket.
template <Device D>
[[gnu::cold]] std::size_t first_not_finite(const GradientLayout<D>& layout, std::size_t bucket) {
  for (const std::size_t i : layout.buckets()[bucket].parameters) {
    const auto& p = layout.parameter(i);
    bool bad = false;
    with_type(p.dtype(), static_cast<std::byte*>(p.grad_data()),
              [&](const auto* grad) { bad = !std::isfinite(kernels::square_sum(p.where(), p.count(), grad)); });
    if (bad) return i;
  }
  return GradientLayout<D>::no_bucket;
}
/// The same of all buckets.
template <Device D>
[[gnu::cold]] std::size_t first_not_finite(const GradientLayout<D>& layout) {
  for (std::size_t b = 0; b < layout.buckets().size(); ++b)
    if (const auto i = first_not_finite(layout, b); i != GradientLayout<D>::no_bucket) return i;
  return GradientLayout<D>::no_bucket;
}

/// Throws NonFiniteError on every rank. `averaged` is the entry whose average is bad, `own` one that was bad on this
/// rank before, if any.
template <Device D, class Communicator>
[[noreturn, gnu::cold]] void raise_not_finite(const GradientLayout<D>& layout, Communicator& communicator,
                                              std::size_t averaged, std::size_t own) {
  const auto mine = static_cast<std::int64_t>(own);
  std::vector<std::int64_t> bad(static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span<const std::int64_t>(&mine, 1), std::span<std::int64_t>(bad), {});
  std::string from;
  for (std::size_t rank = 0; rank < bad.size(); ++rank)
    if (bad[rank] >= 0)
      from += cat(from.empty() ? "" : ", ", layout.name(static_cast<std::size_t>(bad[rank])), " on rank ", rank);
  fail<NonFiniteError>("DistributedDataParallel: the averaged gradient of ", layout.name(averaged),
                       " is not finite; it came from ", from.empty() ? "a sum that overflowed" : from);
}

}  // namespace chorus::detail
