#pragma once
/// A model's buffers, such as running statistics, where one copy of the model computes several canonical shares.

#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::canonical {

/// Every share begins with the buffers as they were before the pass, and finds what it has written where it goes on
/// after others; what the first one has written stays: as where each share has a device of its own.
template <Device D>
class ShareBuffers {
 public:
  explicit ShareBuffers(const std::vector<nn::NamedBuffer<D>>& buffers) : buffers_(buffers) {}

  /// Of so many shares. `writes`: whether they may write any: where no layer is in training, none does.
  void begin_pass(std::size_t shares, bool writes) {
    kept_.resize(shares > 1 && writes ? buffers_.size() : 0);
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      kept_[i].of_share.resize(shares);
      copy_out(i, kept_[i].before);
      kept_[i].begun = 0;
      kept_[i].version = buffers_[i].buffer->version();
    }
  }
  /// That share begins, after those before it, or goes on.
  void enter(std::size_t share) {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const bool goes_on = share < kept_[i].begun;
      if (!goes_on) kept_[i].begun = share + 1;
      copy_in(i, goes_on ? kept_[i].of_share[share] : kept_[i].before);
    }
  }
  /// It has ended, or others go on.
  void leave(std::size_t share) {
    for (std::size_t i = 0; i < kept_.size(); ++i) copy_out(i, kept_[i].of_share[share]);
  }
  void end_pass() {
    for (std::size_t i = 0; i < kept_.size(); ++i) copy_in(i, kept_[i].of_share[0]);
  }

 private:
  struct Kept {
    Storage<D> before;
    std::vector<Storage<D>> of_share;
    std::size_t begun = 0;  // shares
    std::uint64_t version = 0;
  };
  void copy_out(std::size_t i, Storage<D>& to) const {
    const auto& buffer = *buffers_[i].buffer;
    if (to.bytes() != buffer.size_bytes()) to = Storage<D>(buffer.where(), buffer.size_bytes());
    copy_bytes(buffer.where(), to.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
  }
  // Who has said that he writes is told of writes: what a graph has saved of the buffer is not what it was.
  void copy_in(std::size_t i, const Storage<D>& from) {
    const auto& buffer = *buffers_[i].buffer;
    copy_bytes(buffer.where(), buffer.memory(), buffer.where(), from.data(), buffer.size_bytes());
    if (buffer.version() == kept_[i].version) return;
    buffer.touch();
    kept_[i].version = buffer.version();
  }

  const std::vector<nn::NamedBuffer<D>>& buffers_;
  std::vector<Kept> kept_;
};

}  // namespace chorus::canonical
