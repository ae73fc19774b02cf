#pragma once
/// A model's buffers, such as running statistics, where one copy of the model computes several canonical shares.

#include <chorus/core/config.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::same_bits {

/// Every share begins with the buffers as they were before the pass, and finds what it has written where it goes on
/// after others; what the first one has written stays: as where each share has a device of its own.
template <Device D>
class ShareBuffers {
 public:
  explicit ShareBuffers(const std::vector<nn::NamedBuffer<D>>& buffers) : buffers_(buffers) {}

  /// Of so many shares. `writes`: whether they may write any: where no layer is in training, none does.
  void begin_pass(std::size_t shares, bool writes);
  /// That share begins, after those before it, or goes on.
  void enter(std::size_t share);
  /// It has ended, or others go on.
  void leave(std::size_t share);
  void end_pass();

 private:
  struct Kept {
    Storage<D> before;
    std::vector<Storage<D>> of_share;
    std::size_t begun = 0;  // shares
    std::uint64_t version = 0;
  };
  void copy_out(std::size_t i, Storage<D>& to) const;
  // Who has said that he writes is told of writes: what a graph has saved of the buffer is not what it was.
  void copy_in(std::size_t i, const Storage<D>& from);

  const std::vector<nn::NamedBuffer<D>>& buffers_;
  std::vector<Kept> kept_;
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/share_buffers_impl.hpp>
#endif
