#pragma once
/// How shares meet where a layer asks for sums over the batch.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/same_bits/share_buffers.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <chorus/same_bits/share_turns.hpp>
#include <chorus/same_bits/side_by_side.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

CHORUS_INLINE bool needs_whole_batch(nn::Module& model) {
  struct Look final : nn::detail::Walker {
    bool any = false;
    void enter(nn::Module& layer) override {
      const auto* const layer_that_may = dynamic_cast<const nn::Synchronisable*>(&layer);
      any = any || (layer_that_may != nullptr && layer_that_may->synchronised());
    }
  } look;
  look.walk(model);
  return look.any;
}

template <Device D>
SideBySide<D>::SideBySide(const nn::FlatParameters<D>& flat, ShareBuffers<D>& buffers, std::size_t shares,
                          ShareRange run)
    : buffers_(buffers), shares_(shares), run_(run), turns_(run.count()), values_(run.count()), leaves_(run.count()) {
  for (const auto& entry : flat.entries()) {
    parameters_.push_back(&entry.parameter());
    nodes_.push_back(entry.named.handle.shared().get());
  }
  for (auto& leaves : leaves_)
    for (auto* const parameter : parameters_) {
      leaves.push_back(parameter->make_stand_in());
      number_of_.emplace(leaves.back().get(), leaves.size() - 1);
    }
  for (std::size_t i = 0; i < run.count(); ++i) groups_.push_back(std::make_shared<Group>(*this, i));
}

template <Device D>
SideBySide<D>::~SideBySide() {
  for (const auto& group : groups_) group->shares = nullptr;
}

template <Device D>
void SideBySide<D>::run(std::size_t count, std::size_t used, bool forward, std::shared_ptr<BatchGroup> devices,
                        const std::function<void(std::size_t)>& task) {
  used_ = used;
  devices_ = std::move(devices);
  turns_.run(count, {.task = task,
                     .enter =
                         [this, forward](std::size_t i) {
                           if (forward) buffers_.enter(i);
                           stand_in(leaves_[i]);
                         },
                     .leave =
                         [this, forward](std::size_t i) {
                           stand_in({});
                           if (forward) buffers_.leave(i);
                         }});
}

template <Device D>
void SideBySide<D>::Group::sum(std::span<double> values) {
  check<UsageError>(shares != nullptr, "SyncBatchNorm: the policy that ran the forward pass was destroyed");
  shares->sum(i, values);
}

template <Device D>
void SideBySide<D>::stand_in(std::span<const Ref<Node>> leaves) {
  for (std::size_t p = 0; p < parameters_.size(); ++p)
    parameters_[p]->set_origin(leaves.empty() ? Ref<Node>() : leaves[p]);
}

template <Device D>
void SideBySide<D>::sum(std::size_t i, std::span<double> values) {
  values_[i].assign(values.begin(), values.end());
  turns_.meet(i, [this] { add_up(); });
  check<UsageError>(total_.size() == values.size(), detail::different_layers);
  std::copy(total_.begin(), total_.end(), values.begin());
}

template <Device D>
void SideBySide<D>::add_up() {
  const std::size_t count = values_.front().size();
  std::vector<double> numbers(count * shares_);
  for (std::size_t i = 0; i < used_; ++i) {
    check<UsageError>(values_[i].size() == count, detail::different_layers);
    for (std::size_t n = 0; n < count; ++n) numbers[n * shares_ + run_.begin + i] = values_[i][n];
  }
  if (devices_) {
    const BatchGroupScope as_device(devices_);
    devices_->sum(numbers);
  }
  total_.resize(count);
  for (std::size_t n = 0; n < count; ++n)
    total_[n] = add_shares(std::span<const double>(numbers).subspan(n * shares_, shares_));
}

}  // namespace chorus::same_bits
