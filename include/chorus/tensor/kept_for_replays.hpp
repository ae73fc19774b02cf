#pragma once
/// Keeps memory alive for replays of a captured step.

#include <chorus/tensor/allocator.hpp>
#if CHORUS_USE_CUDA
#include <chorus/tensor/cuda/replay.hpp>
#endif
#include <type_traits>

namespace chorus::detail {

/// In a capture: keeps `storage` as long as the graph may be replayed.
template <Device D>
void keep_for_replays([[maybe_unused]] const Storage<D>& storage) {
#if CHORUS_USE_CUDA
  if constexpr (std::is_same_v<D, Cuda>)
    if (auto* numbers = cuda::replay_numbers()) numbers->keep(storage);
#endif
}

}  // namespace chorus::detail
