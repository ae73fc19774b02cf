#pragma once
/// How the gradients of shares are added up as they arrive.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace chorus::same_bits {

template <Device D>
GradientCopy<D>::GradientCopy(const nn::FlatParameters<D>& flat) {
  const MemoryScope scope(trace::Memory::gradients);
  for (const auto& group : flat.groups()) {
    const std::size_t bytes = group.count * size_of(group.dtype);
    groups_.emplace_back(group.grads.device(), bytes);
    zero_bytes(group.grads.device(), groups_.back().data(), bytes);
  }
}

template <Device D>
std::byte* GradientCopy<D>::at(std::size_t group, std::size_t element, DType dtype) const {
  return static_cast<std::byte*>(groups_[group].data()) + element * size_of(dtype);
}

template <Device D>
void GradientTree<D>::begin(ShareRange run, std::size_t shares) {
  if (generation_ != flat_.generation() || entry_of_.empty()) begin_anew();
  taken_.assign(taken_.size(), 0);
  for (Copy& copy : copies_) copy.has.assign(copy.has.size(), false);
  tree_ = {};
  steps_.clear();
  std::size_t copies = 0;
  for (std::size_t share = run.begin; share < run.end; ++share) {
    std::size_t carries = 0;
    const auto carry = [&](std::size_t) { ++carries; };
    tree_.push({share, share + 1}, carry);
    const bool last = share + 1 == run.end;
    if (last && run == ShareRange{0, shares}) tree_.finish(carry);
    steps_.push_back({carries, tree_.sums().size() - 1, last});
    copies = std::max(copies, steps_.back().depth + std::max<std::size_t>(carries, last ? 0 : 1));
  }
  while (copies_.size() < copies)
    copies_.push_back({GradientCopy<D>(flat_), std::vector<char>(flat_.entries().size())});
}

template <Device D>
void GradientTree<D>::gradient_arrived(std::size_t i, std::size_t share, const void* gradient) {
  auto& p = flat_.entries()[i].parameter();
  check<UsageError>(taken_[i] <= share, "canonical shares: ", flat_.entries()[i].named.name,
                    " received its gradient in several parts in one backward pass (backward within backward)");
  while (taken_[i] < share) carry_none(i, taken_[i]++);
  if (gradient != p.grad_place()) copy_bytes(p.where(), p.grad_place(), p.where(), gradient, p.size_bytes());
  carry(i, taken_[i]++);
}

template <Device D>
std::byte* GradientTree<D>::sum(std::size_t k, std::size_t group, std::size_t element) const {
  const auto& flat = flat_.groups()[group];
  return k + 1 == tree_.sums().size() ? flat.grad(element) : copies_[k].numbers.at(group, element, flat.dtype);
}

template <Device D>
const std::size_t* GradientTree<D>::entry_of(const Node& leaf) {
  const auto found = entry_of_.find(&leaf);
  return found == entry_of_.end() ? nullptr : &found->second;
}

template <Device D>
void GradientTree<D>::begin_anew() {
  generation_ = flat_.generation();
  copies_.clear();
  taken_.assign(flat_.entries().size(), 0);
  entry_of_.clear();
  for (std::size_t i = 0; i < flat_.entries().size(); ++i)
    entry_of_.emplace(flat_.entries()[i].named.handle.shared().get(), i);
}

template <Device D>
std::byte* GradientTree<D>::place(const Copy& copy, std::size_t i) const {
  const auto& entry = flat_.entries()[i];
  return copy.numbers.at(entry.group, entry.begin, entry.parameter().dtype());
}

template <Device D>
void GradientTree<D>::carry(std::size_t i, std::size_t share) {
  const auto [carries, depth, last] = steps_[share];
  auto& p = flat_.entries()[i].parameter();
  const D device = p.where();
  const auto count = static_cast<std::size_t>(p.count());
  auto* const gradient = static_cast<std::byte*>(p.grad_place());
  for (std::size_t c = depth + carries; c-- > depth;) {
    Copy& left = copies_[c];
    if (!std::exchange(left.has[i], false)) zero_bytes(device, place(left, i), p.size_bytes());
    if (c == depth && !last)
      add_numbers(device, p.dtype(), count, gradient, place(left, i));
    else
      add_numbers(device, p.dtype(), count, place(left, i), gradient);
  }
  if (last) {
    fill_sums(i, depth);
    return p.set_grad_arrived(true);
  }
  Copy& sum = copies_[depth];
  if (carries == 0) copy_bytes(device, place(sum, i), device, gradient, p.size_bytes());
  sum.has[i] = true;
  p.set_grad_arrived(false);
}

template <Device D>
bool GradientTree<D>::carry_none(std::size_t i, std::size_t share) {
  const auto [carries, depth, last] = steps_[share];
  auto& p = flat_.entries()[i].parameter();
  bool any = false;
  for (std::size_t c = last ? 0 : depth; c < depth + carries; ++c) any = any || copies_[c].has[i];
  if (!any && last) fill_sums(i, depth);
  if (!any) return false;
  zero_bytes(p.where(), p.grad_place(), p.size_bytes());
  carry(i, share);
  return true;
}

template <Device D>
void GradientTree<D>::fill_sums(std::size_t i, std::size_t depth) {
  for (std::size_t c = 0; c < depth; ++c)
    if (!std::exchange(copies_[c].has[i], false))
      zero_bytes(flat_.entries()[i].parameter().where(), place(copies_[c], i),
                 flat_.entries()[i].parameter().size_bytes());
}

}  // namespace chorus::same_bits
