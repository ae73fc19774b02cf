#pragma once
/// A model's buffers, such as running statistics, if one copy of the model computes several canonical shares.

#include <chorus/core/config.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::same_bits {

/// Every share begins with the buffers as they were before the pass, and keeps its own writes while other shares run.
/// The first share's writes remain: the same as with one device per share.
template <Device D>
class ShareBuffers {
 public:
  explicit ShareBuffers(const std::vector<nn::NamedBuffer<D>>& buffers) : buffers_(buffers) {}

  /// `shares`: their number. `writes`: whether they may write buffers; they don't if no layer is in training.
  void begin_pass(std::size_t shares, bool writes);
  /// That share begins, or continues.
  void enter(std::size_t share);
  /// The share has ended, or others continue.
  void leave(std::size_t share);
  void end_pass();

 private:
  struct Kept {
    Storage<D> before;
    std::vector<Storage<D>> of_share;
    std::vector<char> begun;  // by share
    std::uint64_t version = 0;
  };
  void copy_out(std::size_t i, Storage<D>& to) const;
  // Code that records writes is notified: values saved by a graph are out of date.
  void copy_in(std::size_t i, const Storage<D>& from);

  const std::vector<nn::NamedBuffer<D>>& buffers_;
  std::vector<Kept> kept_;
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/share_buffers_impl.hpp>
#endif
