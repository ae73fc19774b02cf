#pragma once
/// Which gradients a rank sends, where they lie, and in which bucket each leaves.

#include <algorithm>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/parallel/ddp/gradient_buckets.hpp>
#include <chorus/parallel/hooks/all_reduce.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::detail {

/// The flat parameters' entries, by number, and the buckets that they are cut into.
template <Device D>
class GradientLayout {
 public:
  static constexpr std::size_t no_bucket = static_cast<std::size_t>(-1);

  /// What the first backward pass of a static graph has shown of a parameter: how often its gradient arrived on this
  /// rank, and whether it did on any.
  struct Uses {
    int here;
    bool anywhere;
  };

  [[gnu::cold]] GradientLayout(nn::FlatParameters<D>& flat, const DistributedDataParallelOptions& options)
      : flat_(flat), options_(options) {
    // What is not sent lies behind what is: ranks may have parameters of their own there, of any size.
    if (!options.parameters_and_buffers_to_ignore.empty() || !options.delay_all_reduce_named_params.empty()) {
      std::vector<std::size_t> order;
      for (const int wanted : {0, 1, 2, 3})
        for (std::size_t i = 0; i < entries(); ++i)
          if (place(i) == wanted) order.push_back(i);
      flat_.reorder(order);
    }
    rebuild();
  }

  const nn::FlatParameters<D>& flat() const { return flat_; }
  std::size_t entries() const { return flat_.entries().size(); }
  ParameterOn<D>& parameter(std::size_t i) const { return flat_.entries()[i].parameter(); }
  const std::string& name(std::size_t i) const { return flat_.entries()[i].named.name; }
  std::size_t index_of(const ParameterOn<D>& parameter) const {
    return std::lower_bound(by_address_.begin(), by_address_.end(), std::pair(&parameter, std::size_t{0}))->second;
  }

  std::vector<GradientBucket>& buckets() { return buckets_; }
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  /// The bucket of entry `i`, or no_bucket.
  std::size_t bucket_of(std::size_t i) const { return bucket_of_[i]; }
  bool is_sent(std::size_t i) const { return bucket_of_[i] != no_bucket; }
  /// Whether ranks share its gradient: it is sent, or rests.
  bool is_shared(std::size_t i) const { return is_sent(i) || (rests(i) && parameter(i).wants_grad()); }
  Sending sending(std::size_t i) const {
    if (!parameter(i).wants_grad() || options_.ignores(name(i)) || unused_for_good(i) || rests(i)) return Sending::no;
    return lists(options_.delay_all_reduce_named_params, name(i)) ? Sending::late : Sending::early;
  }
  /// Those that are shared, and what may lie between: ranks have as many, in the same order.
  [[gnu::cold]] std::size_t common_entries() const {
    std::size_t common = 0;
    for (std::size_t i = 0; i < entries(); ++i)
      if (is_shared(i)) common = i + 1;
    return common;
  }

  D device(const GradientBucket& bucket) const { return parameter(bucket.parameters.front()).where(); }
  std::byte* gradients(const GradientBucket& bucket) const { return flat_.groups()[bucket.group].grad(bucket.begin); }
  DType dtype(const GradientBucket& bucket) const { return flat_.groups()[bucket.group].dtype; }
  std::size_t bytes(const GradientBucket& bucket) const { return bucket.count * size_of(dtype(bucket)); }
  std::span<const GradBucketPart> parts(std::size_t bucket) const { return parts_[bucket]; }

  /// Whether no parameter was frozen or thawed since the buckets were made.
  bool buckets_fit() const {
    for (std::size_t i = 0; i < bucket_of_.size(); ++i)
      if ((sending(i) != Sending::no) != is_sent(i)) return false;
    return true;
  }
  [[gnu::cold]] void rebuild() {
    flat_.count_generation();
    std::vector<Sending> kinds;
    for (std::size_t i = 0; i < entries(); ++i) kinds.push_back(sending(i));
    buckets_ = make_buckets(flat_, options_.template buckets<D>(), kinds);
    bucket_of_.assign(entries(), no_bucket);
    parts_.assign(buckets_.size(), {});
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const std::size_t i : buckets_[b].parameters) {
        bucket_of_[i] = b;
        parts_[b].push_back({flat_.entries()[i].begin - buckets_[b].begin, parameter(i).extents(), name(i)});
      }
    by_address_.clear();
    for (std::size_t i = 0; i < entries(); ++i) by_address_.push_back({&parameter(i), i});
    std::sort(by_address_.begin(), by_address_.end());
  }
  /// For the comparison of ranks: which gradients are wanted.
  [[gnu::cold]] std::string describe() const {
    std::string text;
    for (std::size_t i = 0; i < entries(); ++i)
      if (!options_.ignores(name(i))) text += cat(name(i), parameter(i).wants_grad() ? "\n" : ", frozen,\n");
    return text;
  }
  /// Lays the flat buffers out anew: `wanted[i]` is the present number of the entry that becomes number i, but that
  /// each rank's own stay behind all others, whoever had them where.
  [[gnu::cold]] void reorder(std::span<const std::size_t> wanted) {
    std::vector<std::size_t> order(wanted.begin(), wanted.end());
    std::stable_partition(order.begin(), order.end(), [this](std::size_t i) { return !options_.ignores(name(i)); });
    flat_.reorder(order);
    resting_.clear();
    if (!uses_.empty()) {
      std::vector<Uses> uses;
      for (const std::size_t i : order) uses.push_back(uses_[i]);
      uses_ = std::move(uses);
    }
    rebuild();
  }

  /// Takes note of what a static graph uses; what no rank uses is sent no more.
  [[gnu::cold]] void set_uses(std::vector<Uses> uses) {
    uses_ = std::move(uses);
    rebuild();
  }
  bool knows_uses() const { return !uses_.empty(); }
  bool unused_for_good(std::size_t i) const { return !uses_.empty() && !uses_[i].anywhere; }
  /// Leaves these entries out of the buckets for now.
  [[gnu::cold]] void set_resting(std::vector<char> resting) {
    resting_ = std::move(resting);
    rebuild();
  }
  /// Whether these do rest, and no others.
  bool are_resting(const std::vector<char>& entries) const {
    return resting_.empty() ? std::find(entries.begin(), entries.end(), 1) == entries.end() : entries == resting_;
  }
  bool rests(std::size_t i) const { return !resting_.empty() && resting_[i] != 0; }
  /// How often the gradient of entry `i` arrives in a backward pass.
  int expected_arrivals(std::size_t i) const { return uses_.empty() ? 1 : uses_[i].here; }

 private:
  static bool lists(const std::vector<std::string>& names, const std::string& wanted) {
    return std::find(names.begin(), names.end(), wanted) != names.end();
  }
  [[gnu::cold]] int place(std::size_t i) const {
    if (options_.ignores(name(i))) return 3;
    const auto when = sending(i);
    return when == Sending::early ? 0 : when == Sending::late ? 1 : 2;
  }

  nn::FlatParameters<D>& flat_;
  const DistributedDataParallelOptions& options_;
  std::vector<GradientBucket> buckets_;
  std::vector<std::size_t> bucket_of_;              // by entry
  std::vector<std::vector<GradBucketPart>> parts_;  // by bucket
  std::vector<std::pair<const ParameterOn<D>*, std::size_t>> by_address_;
  std::vector<Uses> uses_;     // by entry; empty: not known
  std::vector<char> resting_;  // by entry; empty: none does
};

}  // namespace chorus::detail
