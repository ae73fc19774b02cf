#pragma once
/// The options of DistributedDataParallel, under PyTorch's names.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace chorus {

/// The reaction to averaged gradients that are infinite, NaN or too large to be squared. All ranks hold the same
/// averages, so all decide the same.
enum class NonFinite : std::uint8_t {
  propagate,    ///< no reaction
  throw_error,  ///< every rank throws NonFiniteError, which names the parameters and the ranks of origin
  skip_step     ///< every rank drops this pass's gradients, so that the optimizer's step changes nothing
};

/// Defaults of `first_bucket_cap_mb` and `bucket_cap_mb`, in MiB. GPUs: PyTorch's 1 and 25; a collective costs a launch
/// and should be large, and the first one should start early. CPUs: a collective starts within microseconds, so the
/// data left to send when backward ends matters most, which is at least the last bucket. A model whose gradients all
/// fit the first bucket sends them in backward's thread: waking another thread on a busy core costs more than so little
/// data.
template <Device D>
inline constexpr double default_first_bucket_cap_mb = std::same_as<D, Cpu> ? 3 : 1;
template <Device D>
inline constexpr double default_bucket_cap_mb = std::same_as<D, Cpu> ? 2 : 25;

/// The next gradient in the order of memory, for a rule that cuts buckets.
struct NextGradient {
  std::string_view name = {};
  std::size_t entry = 0;         ///< its number in that order
  std::size_t bytes = 0;         ///< of this gradient
  std::size_t bucket = 0;        ///< the number of the open bucket
  std::size_t bucket_bytes = 0;  ///< of the gradients in the open bucket
};
/// Whether a bucket begins with that gradient. All ranks need the same answers.
using CutBuckets = std::function<bool(const NextGradient&)>;

/// Cuts buckets by size.
struct BucketOptions {
  /// Largest size of the first bucket, in MiB. Small, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Largest size of the other buckets, in MiB. A larger parameter has a bucket of its own.
  double bucket_cap_mb = 25;

  double cap_mb(std::size_t bucket) const { return bucket == 0 ? first_bucket_cap_mb : bucket_cap_mb; }
  bool operator()(const NextGradient& next) const {
    return static_cast<double>(next.bucket_bytes + next.bytes) > 1024 * 1024 * cap_mb(next.bucket);
  }
};

struct DistributedDataParallelOptions {
  /// See BucketOptions. They apply from the first step on.
  std::optional<double> first_bucket_cap_mb = {};  ///< not given: `default_first_bucket_cap_mb` of the model's device
  std::optional<double> bucket_cap_mb = {};        ///< not given: `default_bucket_cap_mb` of the model's device
  CutBuckets buckets = {};                         ///< a rule of your own, in place of these sizes
  /// The axis of the inputs that holds their samples: 1 for an LSTM's [time, batch, features]. The first input with
  /// such an axis gives a rank's number of samples.
  int dim = 0;
  /// Send rank 0's buffers to all ranks before each forward pass in training, and in `eval()`.
  bool broadcast_buffers = true;
  /// Allow parameters that get no gradient in some backward passes, different ones on each rank. Costs a small
  /// collective per step.
  bool find_unused_parameters = false;
  /// Every backward pass uses the same parameters, equally often: all passes must match the first. Allows parameters
  /// that some or all ranks never use, and gradients that arrive in several parts (backward within backward).
  /// Parameters that no rank uses are never sent. The first pass sends its buckets at its end.
  bool static_graph = false;
  /// Compare the ranks' models and take rank 0's parameters and buffers at construction. If false, they must be equal.
  bool init_sync = true;
  /// Names of parameters and buffers that each rank owns: never compared, sent or averaged.
  std::vector<std::string> parameters_and_buffers_to_ignore = {};
  NonFinite non_finite = NonFinite::propagate;

  template <Device D>
  BucketOptions caps() const {
    return {first_bucket_cap_mb.value_or(default_first_bucket_cap_mb<D>),
            bucket_cap_mb.value_or(default_bucket_cap_mb<D>)};
  }

  /// Whether that parameter or buffer belongs to each rank alone.
  bool ignores(const std::string& name) const {
    const auto& ignored = parameters_and_buffers_to_ignore;
    return std::find(ignored.begin(), ignored.end(), name) != ignored.end();
  }

  /// Returns these options. Throws UsageError for invalid sizes and for names that the model doesn't have.
  template <Device D>
  [[gnu::cold]] DistributedDataParallelOptions checked_for(nn::Module& model) const {
    const auto check_cap = [](double cap) {
      check<UsageError>(cap >= 0, "DistributedDataParallel: expected a bucket cap of at least 0 MiB, got ", cap);
    };
    check_cap(first_bucket_cap_mb.value_or(0));
    check_cap(bucket_cap_mb.value_or(0));
    const auto lists = [](const auto& all, const std::string& wanted) {
      return std::any_of(all.begin(), all.end(), [&](const auto& named) { return named.name == wanted; });
    };
    const auto parameters = nn::named_parameters<D>(model);
    const auto buffers = nn::named_buffers<D>(model);
    for (const auto& wanted : parameters_and_buffers_to_ignore)
      check<UsageError>(lists(parameters, wanted) || lists(buffers, wanted),
                        "DistributedDataParallel: parameters_and_buffers_to_ignore names '", wanted,
                        "', which the model does not have");
    return *this;
  }

  /// All options as text, for the comparison of ranks.
  template <Device D>
  [[gnu::cold]] std::string describe() const {
    const auto [first, others] = caps<D>();
    std::string text = cat("options: bucket_cap_mb ", first, " ", others);
    text += cat(", dim ", dim, ", broadcast_buffers ", broadcast_buffers, ", find_unused_parameters ",
                find_unused_parameters, ", static_graph ", static_graph, ", non_finite ", static_cast<int>(non_finite),
                ", ignored");
    for (const auto& name : parameters_and_buffers_to_ignore) text += cat(" ", name);
    return text + "\n";
  }
};

}  // namespace chorus
