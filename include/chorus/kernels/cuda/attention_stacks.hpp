#pragma once
/// Attention on GPUs by stacks of matrix products, a few heads at a time, whose scores stay in the GPU's cache.
/// Queries, keys and values are read where they lie; scores are computed again in backward.

#include <algorithm>
#include <chorus/kernels/cuda/attention_tiles.hpp>
#include <chorus/kernels/cuda/lines.hpp>
#include <chorus/kernels/cuda/softmax.hpp>
#include <chorus/kernels/gemm.hpp>
#include <cmath>
#include <limits>

namespace chorus::kernels::cuda {

/// Heads whose scores are in memory at once, and whose matrices have one stride: of one sample, or one of several
/// samples.
struct AttentionStack {
  Index sample, head, count;
  bool of_samples;

  Index first(const AttentionPitch& at) const { return sample * at.sample + head * at.head; }
  Index step(const AttentionPitch& at) const { return of_samples ? at.sample : at.head; }
  CHORUS_HD Index matrix(Index heads, Index i) const {
    return of_samples ? (sample + i) * heads + head : sample * heads + head + i;
  }
};

/// Bytes of scores at once: twice that, for backward, fits into an H100's L2 cache.
inline constexpr Index attention_stack_bytes = Index{24} << 20;

/// The stacks of an attention, of `most` heads each. There are as few as possible.
struct AttentionStacks {
  Index heads, samples, most;
  bool of_samples;

  template <class T>
  static AttentionStacks of(const AttentionShape& s, const AttentionPitches& at) {
    const Index at_once = std::min(attention_stack_bytes, static_cast<Index>(attention_scores_limit().load()));
    const Index most = std::max(Index{1}, at_once / (s.queries * s.keys * static_cast<Index>(sizeof(T))));
    const auto dense = [&](const AttentionPitch& p) { return p.sample == s.heads * p.head; };
    if (s.samples == 1 || (dense(at.q) && dense(at.k) && dense(at.v) && dense(at.y)))
      return {s.batch(), 1, most, false};
    return {s.heads, s.samples, most, s.heads * divide_up(s.samples, most) < s.samples * divide_up(s.heads, most)};
  }
  Index along() const { return of_samples ? samples : heads; }
  /// The largest number of heads in a stack: all have about the same.
  Index each() const { return divide_up(along(), divide_up(along(), most)); }

  template <class F>
  void operator()(const F& f) const {
    for (Index run = 0; run < (of_samples ? heads : samples); ++run)
      for (Index i = 0; i < along(); i += each()) {
        const Index count = std::min(each(), along() - i);
        f(of_samples ? AttentionStack{i, run, count, true} : AttentionStack{run, i, count, false});
      }
  }
};

/// The parts of one line of scores.
template <class T>
struct AttentionScores {
  using C = compute_type<T>;
  AttentionShape s;
  AttentionStack stack;
  const T* mask;

  struct Row {
    Index matrix, query;
    Line seen;  ///< the line up to the last key that the query attends to
    const T* mask;
  };
  /// How many of `n` keys from `i` the query attends to.
  static __device__ int seen(const Row& row, Index i, int n) {
    const Index left = row.seen.length - i;
    return left >= n ? n : left > 0 ? static_cast<int>(left) : 0;
  }
  __device__ Row row(const Line& line) const {
    const Index i = line.result / s.queries, query = line.result - i * s.queries, matrix = stack.matrix(s.heads, i);
    Line seen = line;
    if (s.causal && query + 1 < line.length) seen.length = query + 1;
    return {matrix, query, seen, mask == nullptr ? nullptr : mask + matrix * s.mask_pitch + query * s.keys};
  }
  static __device__ C score(const Row& row, const Vector<T>& x, Index i, int l) {
    const auto score = static_cast<C>(x.v[l]);
    return row.mask == nullptr ? score : score + get(row.mask, i + l);
  }
};

/// Dropout's factors of a line of weights, where adjacent ones share a draw of four words.
template <class C>
struct AttentionKept {
  const AttentionShape& s;
  Index sample, line;
  Index drawn = -1;
  PhiloxWords words{};

  __device__ AttentionKept(const AttentionShape& shape, Index matrix, Index query) : s(shape) {
    sample = matrix / s.heads;
    line = ((matrix - sample * s.heads) * s.queries + query) * s.keys;
  }
  __device__ C operator()(Index key) {
    if (s.dropout == 0) return C(1);
    const Index place = line + key;
    if (place / 4 != drawn)
      words = philox(s.key.seed, dropout_counter(s.key, s.key.first_sample + sample, drawn = place / 4));
    const std::uint32_t even = place % 4 == 0 ? words[0] : words[2], odd = place % 4 == 1 ? words[1] : words[3];
    const bool keeps = dropout_keeps(place % 2 == 0 ? even : odd, dropout_threshold(s.dropout));
    return keeps ? static_cast<C>(dropout_scale(s.dropout)) : C(0);
  }
};

/// Turns lines of scores into weights, after dropout, in place; with the log of each line's denominator.
template <class T>
struct AttentionWeights : AttentionScores<T> {
  using C = compute_type<T>;
  T* scores;
  C* log_sums;
  __device__ void operator()(const Line& line) const {
    constexpr int width = Vector<T>::width;
    const auto row = this->row(line);
    auto mine = SumBelow<C>::none();
    each_vector(row.seen, scores, true, [&](Index i, int n, const Vector<T>& x) {
      mine.template add<width>(n, [&](int l) { return this->score(row, x, i, l); });
    });
    const auto all = combine_lanes(line.plan, line.lane, line.line, mine, JoinSums<C>{});
    if (!line.exists) return;
    const bool none = all.sum == 0;
    const C shift = none ? C(0) : all.largest, factor = none ? C(0) : static_cast<C>(1 / all.sum);
    if (line.first())
      log_sums[row.matrix * this->s.queries + row.query] =
          none ? std::numeric_limits<C>::infinity() : shift + static_cast<C>(std::log(all.sum));
    AttentionKept<C> kept(this->s, row.matrix, row.query);
    each_place(line, scores, true, [&](Index i, int n) {
      const int seen = this->seen(row, i, n);
      T* const to = scores + line.at + i;
      Vector<T> x = load_vector(to, seen, true);
#pragma unroll
      for (int l = 0; l < width; ++l)
        x.v[l] = static_cast<T>(l < seen ? std::exp(this->score(row, x, i, l) - shift) * factor * kept(i + l) : C(0));
      store_vector(to, x, n, true);
    });
  }
};

/// Turns lines of scores into weights, after dropout, and the gradients w.r.t. these, unless null, into gradients
/// w.r.t. the scores. The sums of a line are of the same rounded numbers as the rest, so that errors of a weight near 1
/// cancel.
template <class T>
struct AttentionWeightGradients : AttentionScores<T> {
  using C = compute_type<T>;
  T *scores, *gradients;
  const C* log_sums;
  __device__ void operator()(const Line& line) const {
    constexpr int width = Vector<T>::width;
    const auto row = this->row(line);
    const C log_sum = line.exists ? log_sums[row.matrix * this->s.queries + row.query] : C(0);
    AttentionKept<C> kept(this->s, row.matrix, row.query);
    Pair mine{0, 0};
    each_vector(row.seen, scores, true, [&](Index i, int n, const Vector<T>& x) {
      Vector<T> g;
      if (gradients != nullptr) g = load_vector(gradients + line.at + i, n, true);
      C sum = 0, total = 0;
#pragma unroll
      for (int l = 0; l < width; ++l) {
        if (l >= n) continue;
        const C weight = std::exp(this->score(row, x, i, l) - log_sum);
        total += weight;
        if (gradients != nullptr) sum += weight * (static_cast<C>(g.v[l]) * kept(i + l));
      }
      mine = mine + Pair{static_cast<double>(sum), static_cast<double>(total)};
    });
    const auto all = combine_lanes(line.plan, line.lane, line.line, mine, Plus{});
    const C scale = all.b == 0 ? C(0) : static_cast<C>(1 / all.b), dot = static_cast<C>(all.a) * scale;
    each_place(line, scores, true, [&](Index i, int n) {
      const int seen = this->seen(row, i, n);
      T *const to = scores + line.at + i, *const by = gradients == nullptr ? nullptr : gradients + line.at + i;
      Vector<T> x = load_vector(to, seen, true), g;
      if (by != nullptr) g = load_vector(by, seen, true);
#pragma unroll
      for (int l = 0; l < width; ++l) {
        const C weight = l < seen ? std::exp(this->score(row, x, i, l) - log_sum) * scale : C(0);
        const C factor = l < seen ? kept(i + l) : C(0);
        x.v[l] = static_cast<T>(weight * factor);
        if (by != nullptr) g.v[l] = static_cast<T>(l < seen ? weight * (static_cast<C>(g.v[l]) * factor - dot) : C(0));
      }
      store_vector(to, x, n, true);
      if (by != nullptr) store_vector(by, g, n, true);
    });
  }
};

/// The threads for lines of scores, of which each reads vectors.
template <class T>
LinePlan attention_lines(const AttentionShape& s) {
  return plan_lines(divide_up(s.keys, Vector<T>::width), 1);
}

inline constexpr const char* attention_product = "attention product";

template <class T>
void attention_forward_in_stacks(Cuda device, const AttentionShape& s, const AttentionPitches& at,
                                 const AttentionStacks& stacks, const T* q, const T* k, const T* v, const T* mask, T* y,
                                 compute_type<T>* log_sums) {
  const Index all = s.queries * s.keys;
  const Scratch<T> memory(device, stacks.each() * all);
  T* const scores = memory.data();
  stacks([&](const AttentionStack& stack) {
    const auto of = [&](const AttentionPitch& p, auto* data) { return data + stack.first(p); };
    gemm_stack(device, {stack.count, stack.step(at.q), stack.step(at.k), all}, Trans::no, Trans::yes, s.queries, s.keys,
               s.features, of(at.q, q), at.q.row, of(at.k, k), at.k.row, scores, s.keys, false, s.scale,
               attention_product);
    for_lines(device, "attention weights", AxisShape{stack.count * s.queries, s.keys, 1},
              AttentionWeights<T>{{s, stack, mask}, scores, log_sums}, attention_lines<T>(s));
    gemm_stack(device, {stack.count, all, stack.step(at.v), stack.step(at.y)}, Trans::no, Trans::no, s.queries,
               s.values, s.keys, static_cast<const T*>(scores), s.keys, of(at.v, v), at.v.row, of(at.y, y), at.y.row,
               false, 1.0, attention_product);
  });
}

template <class T>
void attention_backward_in_stacks(Cuda device, const AttentionShape& s, const AttentionPitches& at,
                                  const AttentionStacks& stacks, const AttentionAdds& adds, const T* q, const T* k,
                                  const T* v, const T* mask, const compute_type<T>* log_sums, const T* dy, T* dq, T* dk,
                                  T* dv) {
  const Index all = s.queries * s.keys;
  const bool by_scores = dq != nullptr || dk != nullptr;
  const Scratch<T> memory(device, stacks.each() * all), other(device, by_scores ? stacks.each() * all : 0);
  T *const scores = memory.data(), *const gradients = by_scores ? other.data() : nullptr;
  stacks([&](const AttentionStack& stack) {
    const auto of = [&](const AttentionPitch& p, auto* data) { return data + stack.first(p); };
    const auto product = [&](Trans ta, Trans tb, Index m, Index n, Index depth, const T* a, Index step_a, Index lda,
                             const T* b, Index step_b, Index ldb, T* c, Index step_c, Index ldc, bool add,
                             double scale) {
      gemm_stack(device, {stack.count, step_a, step_b, step_c}, ta, tb, m, n, depth, a, lda, b, ldb, c, ldc, add, scale,
                 attention_product);
    };
    product(Trans::no, Trans::yes, s.queries, s.keys, s.features, of(at.q, q), stack.step(at.q), at.q.row, of(at.k, k),
            stack.step(at.k), at.k.row, scores, all, s.keys, false, s.scale);
    if (by_scores)
      product(Trans::no, Trans::yes, s.queries, s.keys, s.values, of(at.y, dy), stack.step(at.y), at.y.row, of(at.v, v),
              stack.step(at.v), at.v.row, gradients, all, s.keys, false, 1);
    for_lines(device, "attention weights gradient", AxisShape{stack.count * s.queries, s.keys, 1},
              AttentionWeightGradients<T>{{s, stack, mask}, scores, gradients, log_sums}, attention_lines<T>(s));
    if (dv != nullptr)
      product(Trans::yes, Trans::no, s.keys, s.values, s.queries, scores, all, s.keys, of(at.y, dy), stack.step(at.y),
              at.y.row, of(at.v, dv), stack.step(at.v), at.v.row, adds.v, 1);
    if (dq != nullptr)
      product(Trans::no, Trans::no, s.queries, s.features, s.keys, gradients, all, s.keys, of(at.k, k),
              stack.step(at.k), at.k.row, of(at.q, dq), stack.step(at.q), at.q.row, adds.q, s.scale);
    if (dk != nullptr)
      product(Trans::yes, Trans::no, s.keys, s.features, s.queries, gradients, all, s.keys, of(at.q, q),
              stack.step(at.q), at.q.row, of(at.k, dk), stack.step(at.k), at.k.row, adds.k, s.scale);
  });
}

}  // namespace chorus::kernels::cuda
