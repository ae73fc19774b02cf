#pragma once
/// How shares' buffers are kept apart and merged.

#include <chorus/nn/module.hpp>
#include <chorus/same_bits/share_buffers.hpp>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace chorus::same_bits {

template <Device D>
void ShareBuffers<D>::begin_pass(std::size_t shares, bool writes) {
  kept_.resize(shares > 1 && writes ? buffers_.size() : 0);
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    kept_[i].of_share.resize(shares);
    copy_out(i, kept_[i].before);
    kept_[i].begun.assign(shares, false);
    kept_[i].version = buffers_[i].buffer->version();
  }
}

template <Device D>
void ShareBuffers<D>::enter(std::size_t share) {
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const bool goes_on = std::exchange(kept_[i].begun[share], true);
    copy_in(i, goes_on ? kept_[i].of_share[share] : kept_[i].before);
  }
}

template <Device D>
void ShareBuffers<D>::leave(std::size_t share) {
  for (std::size_t i = 0; i < kept_.size(); ++i) copy_out(i, kept_[i].of_share[share]);
}

template <Device D>
void ShareBuffers<D>::end_pass() {
  for (std::size_t i = 0; i < kept_.size(); ++i) copy_in(i, kept_[i].of_share[0]);
}

template <Device D>
void ShareBuffers<D>::copy_out(std::size_t i, Storage<D>& to) const {
  const auto& buffer = *buffers_[i].buffer;
  if (to.bytes() != buffer.size_bytes()) to = Storage<D>(buffer.where(), buffer.size_bytes());
  copy_bytes(buffer.where(), to.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
}

template <Device D>
void ShareBuffers<D>::copy_in(std::size_t i, const Storage<D>& from) {
  const auto& buffer = *buffers_[i].buffer;
  copy_bytes(buffer.where(), buffer.memory(), buffer.where(), from.data(), buffer.size_bytes());
  if (buffer.version() == kept_[i].version) return;
  buffer.touch();
  kept_[i].version = buffer.version();
}

}  // namespace chorus::same_bits
