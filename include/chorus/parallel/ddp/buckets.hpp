#pragma once
/// Gradient buckets: ranges of the flat gradients that are averaged while backward still fills later ones (Li et al.,
/// "PyTorch Distributed", VLDB 2020).

#include <chorus/comm/work.hpp>
#include <chorus/parallel/ddp/hook.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// Neighbouring gradients of one dtype that are sent together.
struct Bucket {
  std::size_t index;                    // in the order in which buckets leave
  std::size_t group, begin, count;      // elements of the flat buffer
  std::vector<std::size_t> parameters;  // entries of the flat parameters
  std::vector<GradBucketPart> parts;    // the same, in the form that hooks get
  std::int64_t missing = 0;             // gradients that this backward pass has yet to deliver
  comm::Work work;                      // the communication that the hook started
  bool done = false;                    // the hook's last round has ended
};

/// The buckets of a net (see cut_buckets.hpp). They are sent front to back, in the same order on all ranks.
class Buckets {
 public:
  /// Takes new buckets of the gradients of that many parameters.
  [[gnu::cold]] void replace(std::vector<Bucket> buckets, std::size_t entries) {
    all_ = std::move(buckets);
    of_.assign(entries, nullptr);
    expected_.assign(entries, 1);
    for (Bucket& bucket : all_)
      for (const std::size_t i : bucket.parameters) of_[i] = &bucket;
    begin_pass();
  }
  /// The gradient of entry `i` arrives `times` times in a backward pass; `any` if that is unknown.
  static constexpr int any = 1 << 20;
  void expect(std::size_t i, int times) { expected_[i] = times; }

  /// All gradients are missing.
  void begin_pass() {
    left_ = expected_;
    for (Bucket& bucket : all_) {
      bucket.missing = 0;
      for (const std::size_t i : bucket.parameters) bucket.missing += left_[i];
    }
    next_ = returned_ = held_ = 0;
  }
  /// How often the gradient of entry `i` is still expected.
  int left(std::size_t i) const { return left_[i]; }
  /// The gradient of entry `i` has arrived.
  void arrived(std::size_t i) { --left_[i], --of_[i]->missing; }
  /// No gradient is missing any more.
  void complete() {
    for (Bucket& bucket : all_) bucket.missing = 0;
  }

  /// The next bucket to send, if it is full; else null.
  Bucket* next_full() {
    if (next_ == all_.size() || all_[next_].missing != 0 || held_ != 0) return nullptr;
    return &all_[next_++];
  }
  bool all_left() const { return next_ == all_.size(); }
  /// The next bucket whose communication must end; null if none is being sent.
  Bucket* next_on_its_way() { return returned_ < next_ ? &all_[returned_] : nullptr; }
  std::span<Bucket> on_their_way() { return std::span(all_).subspan(returned_, next_ - returned_); }
  void returned() { ++returned_; }
  /// Each `hold` keeps full buckets back until a `release`.
  void hold() { ++held_; }
  void release() { --held_; }

  /// Whether the gradient of entry `i` is sent.
  bool sends(std::size_t i) const { return of_[i] != nullptr; }
  /// The bucket that sends the gradient of entry `i`; null if none does.
  const Bucket* bucket_of(std::size_t i) const { return of_[i]; }
  std::span<Bucket> all() { return all_; }
  const std::vector<Bucket>& all() const { return all_; }

 private:
  std::vector<Bucket> all_;
  std::vector<Bucket*> of_;           // by entry; null: not sent
  std::vector<int> expected_, left_;  // by entry
  std::size_t next_ = 0, returned_ = 0, held_ = 0;
};

}  // namespace chorus::ddp
