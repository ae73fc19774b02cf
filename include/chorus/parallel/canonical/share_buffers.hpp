#pragma once
/// A model's buffers, such as running statistics, where one copy of the model computes several canonical shares.

#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::canonical {

/// Every share finds the buffers as they were before the pass, and what the first one has written into them stays: as
/// where each share has a device of its own. A layer need not say that it has written (BatchNorm does not), so all are
/// kept, wherever a device has several shares.
template <Device D>
class ShareBuffers {
 public:
  explicit ShareBuffers(const std::vector<nn::NamedBuffer<D>>& buffers) : buffers_(buffers) {}

  /// Of so many shares.
  void begin_pass(std::size_t shares) {
    kept_.resize(shares > 1 ? buffers_.size() : 0);
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      copy_out(i, kept_[i].before);
      kept_[i].version = buffers_[i].buffer->version();
    }
  }
  /// Share `i` of this device has come to its end.
  void end_share(std::size_t share) {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (share == 0) copy_out(i, kept_[i].after_first);
      copy_in(i, kept_[i].before);
    }
  }
  void end_pass() {
    for (std::size_t i = 0; i < kept_.size(); ++i) copy_in(i, kept_[i].after_first);
  }

 private:
  struct Kept {
    Storage<D> before, after_first;
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
