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

/// What is done where an averaged gradient has numbers that are infinite, no numbers, or too large to be squared. All
/// ranks hold the same averages, so all decide the same.
enum class NonFinite : std::uint8_t {
  propagate,    ///< nothing
  throw_error,  ///< every rank throws NonFiniteError, which names parameters, and the ranks from which it came
  skip_step     ///< every rank forgets this pass's gradients, so that the optimizer's step changes nothing
};

/// What `first_bucket_cap_mb` and `bucket_cap_mb` are where they are not given, in MiB: PyTorch's 1 and 25 for GPUs,
/// where a collective costs a launch and wants to be large, and the first one shall start early. Ranks on CPUs start
/// one within microseconds, and what counts is how much is left to send when backward ends, which is at least the last
/// bucket. But a model whose gradients all fit the first bucket sends them by itself when backward has ended: to wake
/// another thread on a core that computes costs more than so little data takes.
template <Device D>
inline constexpr double default_first_bucket_cap_mb = std::same_as<D, Cpu> ? 3 : 1;
template <Device D>
inline constexpr double default_bucket_cap_mb = std::same_as<D, Cpu> ? 2 : 25;

struct BucketOptions {
  /// Largest size of the first bucket, in MiB. Small, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Largest size of the others, in MiB. A parameter larger than that has a bucket of its own.
  double bucket_cap_mb = 25;

  double cap_mb(std::size_t bucket) const { return bucket == 0 ? first_bucket_cap_mb : bucket_cap_mb; }
};

struct DistributedDataParallelOptions {
  /// See BucketOptions. They hold from the first step on.
  std::optional<double> first_bucket_cap_mb = {};  ///< not given: `default_first_bucket_cap_mb` of the model's device
  std::optional<double> bucket_cap_mb = {};        ///< not given: `default_bucket_cap_mb` of the model's device
  /// The axis of the inputs along which their samples lie: 1 for an LSTM's [time, batch, features]. A rank has as many
  /// as the first input with such an axis.
  int dim = 0;
  /// Send rank 0's buffers to all ranks before each forward pass in training, and in `eval()`.
  bool broadcast_buffers = true;
  /// Allow parameters that get no gradient in some backward passes, others on each rank. Costs a small collective a
  /// step.
  bool find_unused_parameters = false;
  /// Every backward pass uses the same parameters, equally often: what the first one has shown is expected of all.
  /// Allows parameters that some ranks, or all, never use, and such whose gradient comes in several parts (a backward
  /// pass within backward); what no rank uses is never sent. The first pass sends at its end.
  bool static_graph = false;
  /// Compare the ranks' models and take rank 0's numbers at construction. Without, the ranks must have them already.
  bool init_sync = true;
  /// Names of parameters and buffers that are each rank's own: never compared, sent or averaged.
  std::vector<std::string> parameters_and_buffers_to_ignore = {};
  NonFinite non_finite = NonFinite::propagate;

  template <Device D>
  BucketOptions buckets() const {
    return {first_bucket_cap_mb.value_or(default_first_bucket_cap_mb<D>),
            bucket_cap_mb.value_or(default_bucket_cap_mb<D>)};
  }

  /// Whether that parameter or buffer is each rank's own.
  bool ignores(const std::string& name) const {
    const auto& ignored = parameters_and_buffers_to_ignore;
    return std::find(ignored.begin(), ignored.end(), name) != ignored.end();
  }

  /// These options. Throws UsageError for sizes that are none, and for names that the model doesn't have.
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

  /// All of them, for the comparison of ranks.
  template <Device D>
  [[gnu::cold]] std::string describe() const {
    const auto caps = buckets<D>();
    std::string text = cat("options: bucket_cap_mb ", caps.first_bucket_cap_mb, " ", caps.bucket_cap_mb);
    text += cat(", dim ", dim, ", broadcast_buffers ", broadcast_buffers, ", find_unused_parameters ",
                find_unused_parameters, ", static_graph ", static_graph, ", non_finite ", static_cast<int>(non_finite),
                ", ignored");
    for (const auto& name : parameters_and_buffers_to_ignore) text += cat(" ", name);
    return text + "\n";
  }
};

}  // namespace chorus
