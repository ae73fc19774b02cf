#pragma once
/// The places of a forward pass whose ranks share the tokens of each sample.

#include <chorus/core/narrow_float.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/kernels/dropout_part.hpp>
#include <chorus/parallel/sequence/ring.hpp>
#include <chorus/parallel/sequence/ring_attention.hpp>
#include <chorus/parallel/sequence/stretches.hpp>
#include <memory>
#include <span>
#include <utility>

namespace chorus::sequence {

/// Nodes of the tape may outlive the policy: then `alive` has expired, and their calls throw UsageError.
template <class Communicator>
class Places final : public SharedPlaces {
 public:
  /// Of samples of `length` tokens. Throws UsageError if there are fewer tokens than ranks.
  Places(const Ring<Communicator>& ring, Index length, std::weak_ptr<void> alive)
      : ring_(ring), length_(length), runs_(stretches(length, ring.size(), ring.member())), alive_(std::move(alive)) {
    check<UsageError>(length >= ring.size(), "SequenceParallel: expected at least one token for each of ", ring.size(),
                      " ranks, got samples of ", length, "; use fewer ranks");
  }

  Index length() const override { return length_; }
  const Runs& runs() const override { return runs_; }

  /// Whether the operation that draws now has a number for each place.
  bool draws_by_place() const { return draws_by_place_; }
  RandomKey next_key(Index rows) override {
    const detail::Replaced<bool> draws(draws_by_place_, true);
    return next_random_key(rows);
  }
  RandomKey next_key_of_dropout(std::span<const Index> shape, bool plain) override {
    check<UsageError>(plain, "SequenceParallel: dropout: expected a value on the CPU, without gradients of gradients");
    const Index samples = detail::samples_here();
    const bool merged = shape[0] == samples * own() && shape[0] != samples;
    check<UsageError>(merged || (shape.size() > 1 && shape[0] == samples && shape[1] == own()),
                      "SequenceParallel: dropout: expected [", samples, ", ", own(),
                      ", ...], a value for each sample and place, got ", shape);
    return next_key(samples);
  }
  void dropout(DType type, Index samples, Index rows, Index inner, double p, const RandomKey& key, const void* in,
               void* out, bool accumulate, ColumnsOfPlaces part) const override {
    const auto drop_in = [&]<class T>(T) { drop<T>(samples, rows, inner, p, key, in, out, accumulate, part); };
    switch (type) {
      case DType::f32:
        return drop_in(float{});
      case DType::f64:
        return drop_in(double{});
      case DType::bfloat16:
        return drop_in(bf16{});
      default:
        return drop_in(half{});
    }
  }

  void sum(std::span<double> numbers) const override { living().sum(numbers); }

  void widen(Index& queries, Index& keys) const override {
    check<UsageError>(queries == own() && keys == own(), "SequenceParallel: attention: expected ", own(),
                      " queries and the same number of keys, this rank's part of ", length_, " places, got ", queries,
                      " and ", keys, ": only self-attention is supported");
    queries = keys = length_;
  }
  void attention_forward(const kernels::AttentionShape& s, const float* q, const float* k, const float* v,
                         const float* mask, float* y, float* log_sums) override {
    RingAttention<float, Communicator>(living(), length_, s).forward(q, k, v, mask, y, log_sums);
  }
  void attention_forward(const kernels::AttentionShape& s, const double* q, const double* k, const double* v,
                         const double* mask, double* y, double* log_sums) override {
    RingAttention<double, Communicator>(living(), length_, s).forward(q, k, v, mask, y, log_sums);
  }
  void attention_backward(const kernels::AttentionShape& s, const float* q, const float* k, const float* v,
                          const float* mask, const float* y, const float* log_sums, const float* dy, float* dq,
                          float* dk, float* dv) override {
    RingAttention<float, Communicator>(living(), length_, s).backward(q, k, v, mask, y, log_sums, dy, dq, dk, dv);
  }
  void attention_backward(const kernels::AttentionShape& s, const double* q, const double* k, const double* v,
                          const double* mask, const double* y, const double* log_sums, const double* dy, double* dq,
                          double* dk, double* dv) override {
    RingAttention<double, Communicator>(living(), length_, s).backward(q, k, v, mask, y, log_sums, dy, dq, dk, dv);
  }

 private:
  const Ring<Communicator>& living() const {
    check<UsageError>(!alive_.expired(), "SequenceParallel: the policy that ran the forward pass was destroyed");
    return ring_;
  }
  // [samples, own places, ...] if there is a row for each sample; else [samples * own places, inner].
  template <class T>
  void drop(Index samples, Index rows, Index inner, double p, const RandomKey& key, const void* in, void* out,
            bool accumulate, ColumnsOfPlaces part) const {
    const bool merged = rows != samples;
    const Index numbers = merged ? inner : inner / own();  // of a place
    if (part.count == 0) part = {numbers, 0, numbers};
    const Index lines = part.count == 0 ? 0 : numbers / part.count;
    const auto* from = static_cast<const T*>(in);
    auto* to = static_cast<T*>(out);
    for (Index sample = 0; sample < samples; ++sample)
      for (const AxisPart& run : runs_) {
        RandomKey at = key;
        at.first_sample += sample;
        if (merged) at.first_sample = at.first_sample * length_ + run.begin;
        const Index before = merged ? 0 : run.begin * lines * part.width;
        kernels::dropout_columns(Cpu{}, merged ? run.count : 1, merged ? lines : run.count * lines,
                                 {part.width, before + part.begin, part.count}, from, to, p, at, accumulate);
        from += run.count * numbers;
        to += run.count * numbers;
      }
  }

  const Ring<Communicator> ring_;
  Index length_;
  Runs runs_;
  std::weak_ptr<void> alive_;
  bool draws_by_place_ = false;
};

}  // namespace chorus::sequence
