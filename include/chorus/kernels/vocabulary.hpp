#pragma once
/// Cross entropy over sharded classes, in steps between which ranks sum.

#include <chorus/kernels/cpu/vocabulary.hpp>

#if CHORUS_USE_CUDA
namespace chorus::kernels {

/// Not available on GPUs: use gather_columns.
template <class T>
void vocabulary_maximum(Cuda, Index, const Vocabulary&, const T*, T*) {
  fail<UsageError>("cross_entropy: classes that are split over ranks need the CPU; use gather_columns(logits)");
}
template <class T>
void vocabulary_sums(Cuda, Index, const Vocabulary&, const T*, const std::int64_t*, const CrossEntropyOptions&,
                     const T*, T*) {}
template <class T>
void vocabulary_loss(Cuda, Index, const Vocabulary&, const std::int64_t*, const CrossEntropyOptions&, const T*, T*) {}
template <class T>
void vocabulary_backward(Cuda, Index, const Vocabulary&, const T*, const std::int64_t*, const CrossEntropyOptions&,
                         const T*, const T*, const T*, T*, bool) {}

}  // namespace chorus::kernels
#endif
