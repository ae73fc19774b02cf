#pragma once
/// The ranks that share the tokens of each sample (SequenceParallel), for operators that need a token's place, or the
/// tokens of other ranks.

#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/tensor_group.hpp>
#include <memory>
#include <span>

namespace chorus {

namespace kernels {
struct AttentionShape;
}

/// Of `width` neighbouring numbers of a value, a rank has `count`; 0: it has all.
struct ColumnsOfPlaces {
  Index width = 0, begin = 0, count = 0;
};

/// The places of one forward pass: a rank has `own()` of each sample's `length()`, in ascending runs. All members that
/// compute need the same call on each rank, in the same order, and throw CommError if a rank is lost.
class SharedPlaces : public std::enable_shared_from_this<SharedPlaces> {
 public:
  virtual ~SharedPlaces() = default;

  virtual Index length() const = 0;
  virtual const std::array<AxisPart, 2>& runs() const = 0;
  /// Sums over the ranks that share the samples, in place; all get the same bits.
  virtual void sum(std::span<double> numbers) const = 0;
  Index own() const { return runs()[0].count + runs()[1].count; }

  /// The key of an operation that draws a number for each place; `rows`: see next_random_key.
  virtual RandomKey next_key(Index rows) = 0;
  /// The same for dropout of a value of this shape. Throws UsageError if `plain` is false (a kind of value that is not
  /// supported), and unless the shape tells the value's places.
  virtual RandomKey next_key_of_dropout(std::span<const Index> shape, bool plain) = 0;
  /// Dropout with that key, and its backward, of a pass of `samples`: [rows, inner] on the CPU.
  virtual void dropout(DType type, Index samples, Index rows, Index inner, double p, const RandomKey& key,
                       const void* in, void* out, bool accumulate, ColumnsOfPlaces part = {}) const = 0;

  /// The sizes of the whole matrix of scores, for masks. Throws UsageError unless there is one key for each query.
  virtual void widen(Index& queries, Index& keys) const = 0;
  /// See kernels::attention_forward and attention_backward. q, k, v and results: of this rank's places; `mask`: of all.
  virtual void attention_forward(const kernels::AttentionShape& s, const float* q, const float* k, const float* v,
                                 const float* mask, float* y, float* log_sums) = 0;
  virtual void attention_forward(const kernels::AttentionShape& s, const double* q, const double* k, const double* v,
                                 const double* mask, double* y, double* log_sums) = 0;
  virtual void attention_backward(const kernels::AttentionShape& s, const float* q, const float* k, const float* v,
                                  const float* mask, const float* y, const float* log_sums, const float* dy, float* dq,
                                  float* dk, float* dv) = 0;
  virtual void attention_backward(const kernels::AttentionShape& s, const double* q, const double* k, const double* v,
                                  const double* mask, const double* y, const double* log_sums, const double* dy,
                                  double* dq, double* dk, double* dv) = 0;
};

namespace detail {
/// This thread's places; null if each rank has whole samples.
inline thread_local constinit SharedPlaces* shared_places = nullptr;

inline std::shared_ptr<SharedPlaces> places_here() {
  return shared_places == nullptr ? nullptr : shared_places->shared_from_this();
}
/// The samples of the pass, or of the part of it that runs.
inline Index samples_here() { return random_context() == nullptr ? 0 : random_context()->samples; }
/// The number of places of a sample of which this rank has `own`.
inline Index whole_length(Index own) { return shared_places == nullptr ? own : shared_places->length(); }
}  // namespace detail

/// While it lives, this thread's operators work on these places.
struct SharedPlacesScope : detail::Replaced<SharedPlaces*> {
  explicit SharedPlacesScope(SharedPlaces* places) : Replaced(detail::shared_places, places) {}
};

}  // namespace chorus
