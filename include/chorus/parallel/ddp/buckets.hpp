#pragma once
/// Gradient buckets: ranges of the flat gradients that are averaged while backward still fills the next ones
/// (Li et al., "PyTorch Distributed", VLDB 2020).

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/parallel/hooks/hook.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// Neighbouring gradients of one dtype that travel together.
struct Bucket {
  std::size_t index;                    // in the order in which buckets leave
  std::size_t group, begin, count;      // elements of the flat buffer
  std::vector<std::size_t> parameters;  // entries of the flat parameters
  std::vector<GradBucketPart> parts;    // the same, as hooks see them
  std::int64_t missing = 0;             // gradients that this backward pass has yet to deliver
  comm::Work work;                      // what it left with
  bool done = false;                    // its hook sends no more
};

/// Whether a gradient is sent, and when.
enum class Sending : std::uint8_t { no, early, late };

/// Cuts the gradients that are sent into buckets, in the order of the flat buffers; the late ones follow all others.
template <Device D>
[[gnu::cold]] std::vector<Bucket> cut_into_buckets(const nn::FlatParameters<D>& flat, const BucketOptions& options,
                                                   std::span<const Sending> sending) {
  constexpr double mib = 1024 * 1024;
  std::vector<Bucket> buckets;
  std::vector<Bucket> open(flat.groups().size());  // one for each dtype
  const auto close = [&](Bucket& bucket) {
    if (!bucket.parameters.empty()) {
      bucket.index = buckets.size();
      buckets.push_back(std::move(bucket));
    }
    bucket = {};
  };
  for (const auto when : {Sending::early, Sending::late}) {
    for (std::size_t i = 0; i < flat.entries().size(); ++i) {
      if (sending[i] != when) continue;
      const auto& entry = flat.entries()[i];
      auto& bucket = open[entry.group];
      const auto bytes = (bucket.count + entry.count) * size_of(flat.groups()[entry.group].dtype);
      const bool full = static_cast<double>(bytes) > mib * options.cap_mb(buckets.size());
      const bool gap = bucket.begin + bucket.count != entry.begin;  // one that isn't sent lies between
      if (full || gap) close(bucket);
      if (bucket.parameters.empty()) bucket.group = entry.group, bucket.begin = entry.begin;
      bucket.parameters.push_back(i);
      bucket.parts.push_back({entry.begin - bucket.begin, entry.parameter().extents(), entry.named.name});
      bucket.count += entry.count;
    }
    for (auto& bucket : open) close(bucket);
  }
  return buckets;
}

/// The buckets of a net. They leave front to back, each as soon as it is full: all ranks have to call in one order.
template <Device D>
class Buckets {
 public:
  [[gnu::cold]] void cut(const nn::FlatParameters<D>& flat, const BucketOptions& options,
                         std::span<const Sending> sending) {
    all_ = cut_into_buckets(flat, options, sending);
    of_.assign(sending.size(), nullptr);
    expected_.assign(sending.size(), 1);
    for (Bucket& bucket : all_)
      for (const std::size_t i : bucket.parameters) of_[i] = &bucket;
    begin_pass();
  }
  /// The gradient of entry `i` arrives that often in a backward pass; `any` where nobody knows.
  static constexpr int any = 1 << 20;
  void expect(std::size_t i, int times) { expected_[i] = times; }

  /// All gradients are missing.
  void begin_pass() {
    left_ = expected_;
    for (Bucket& bucket : all_) {
      bucket.missing = 0;
      for (const std::size_t i : bucket.parameters) bucket.missing += left_[i];
    }
    next_ = returned_ = 0;
    held_ = 0;
  }
  /// How often the gradient of entry `i` is still expected.
  int left(std::size_t i) const { return left_[i]; }
  /// It has arrived.
  void arrived(std::size_t i) { --left_[i], --of_[i]->missing; }
  /// Nothing is missing any more.
  void complete() {
    for (Bucket& bucket : all_) bucket.missing = 0;
  }

  /// The next bucket to leave, if it is full; else null.
  Bucket* next_full() {
    if (next_ == all_.size() || all_[next_].missing != 0 || held_ != 0) return nullptr;
    return &all_[next_++];
  }
  bool all_left() const { return next_ == all_.size(); }
  /// The next bucket to come back; null where none is on its way.
  Bucket* next_on_its_way() { return returned_ < next_ ? &all_[returned_] : nullptr; }
  std::span<Bucket> on_their_way() { return std::span(all_).subspan(returned_, next_ - returned_); }
  void returned() { ++returned_; }
  /// Full buckets don't leave before as many calls of `release`.
  void hold() { ++held_; }
  void release() { --held_; }

  /// Whether the gradient of entry `i` is sent.
  bool sends(std::size_t i) const { return of_[i] != nullptr; }
  std::span<Bucket> all() { return all_; }
  const std::vector<Bucket>& all() const { return all_; }

 private:
  std::vector<Bucket> all_;
  std::vector<Bucket*> of_;           // by entry; null: it is not sent
  std::vector<int> expected_, left_;  // by entry
  std::size_t next_ = 0, returned_ = 0;
  int held_ = 0;
};

}  // namespace chorus::ddp
