#pragma once
/// The layout of FlatParameters.

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>

#include <chorus/nn/flat_parameters.hpp>

namespace chorus::nn {

template <Device D>
FlatParameters<D>::FlatParameters(Module& model) {
  auto parameters = named_parameters<D>(model);
  for (const auto& named : parameters)
    check<UsageError>(named.parameter->where() == parameters.front().parameter->where(),
                      "policy: expected a model on one device: its parameter '", named.name, "' is on ",
                      named.parameter->where(), ", '", parameters.front().name, "' on ",
                      parameters.front().parameter->where());
  std::vector<NamedParameter<D>> backwards;
  for (const bool wanted : {true, false})
    for (std::size_t i = parameters.size(); i-- > 0;)
      if (parameters[i].parameter->wants_grad() == wanted) backwards.push_back(std::move(parameters[i]));
  lay_out(std::move(backwards));
}

template <Device D>
void FlatParameters<D>::reorder(std::span<const std::size_t> order) {
  check<UsageError>(order.size() == entries_.size(), "FlatParameters::reorder: ", order.size(), " indices for ",
                    entries_.size(), " parameters");
  if (std::is_sorted(order.begin(), order.end()) && taken_away() == nullptr) return;
  std::vector<NamedParameter<D>> parameters;
  for (const std::size_t index : order) parameters.push_back(entries_.at(index).named);
  lay_out(std::move(parameters));
}

template <Device D>
void FlatParameters<D>::use_memory(Allocate for_values, Allocate for_grads) {
  allocate_values_ = std::move(for_values);
  allocate_grads_ = std::move(for_grads);
  lay_out(parameters());
}

template <Device D>
std::size_t FlatParameters<D>::bytes() const {
  return std::accumulate(groups_.begin(), groups_.end(), std::size_t{0},
                         [](std::size_t sum, const Group& group) { return sum + group.count * size_of(group.dtype); });
}

template <Device D>
std::vector<NamedParameter<D>> FlatParameters<D>::parameters() const {
  std::vector<NamedParameter<D>> out;
  for (const Entry& entry : entries_) out.push_back(entry.named);
  return out;
}

template <Device D>
void FlatParameters<D>::lay_out(std::vector<NamedParameter<D>> parameters) {
  std::vector<Group> groups;
  std::vector<Entry> entries;
  for (auto& named : parameters) {
    const DType type = named.parameter->dtype();
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.dtype == type; });
    if (group == groups.end()) group = groups.insert(groups.end(), Group{type, {}, {}});
    const auto count = static_cast<std::size_t>(named.parameter->count()), size = size_of(type);
    const auto number = static_cast<std::size_t>(group - groups.begin());
    const auto begin = parameter_place<D>(group->count, count, size);
    const auto last = std::find_if(entries.rbegin(), entries.rend(), [&](const Entry& e) { return e.group == number; });
    if (last != entries.rend()) last->count = begin - last->begin;
    entries.push_back({std::move(named), number, begin, padded_count<D>(count, size)});
    group->count = begin + entries.back().count;
    if (entries.back().parameter().wants_grad()) group->trainable = group->count;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Group& group = groups[g];
    const auto first = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.group == g; });
    const D device = first->parameter().where();
    const std::size_t bytes = group.count * size_of(group.dtype);
    const auto lent_by = [&](const Allocate& allocate) {
      // Only host memory can be lent.
      return std::is_same_v<D, Cpu> && allocate ? allocate(bytes) : std::shared_ptr<void>();
    };
    const auto memory = [&](trace::Memory kind, std::shared_ptr<void> lent) {
      const MemoryScope scope(kind);
      if constexpr (std::is_same_v<D, Cpu>) {
        if (lent) return Storage<D>(device, std::move(lent), bytes);
        if (PromisedNumbers::current() != nullptr) return untouched_memory(bytes);  // no values to store
      }
      return Storage<D>(device, bytes);
    };
    group.values = memory(trace::Memory::parameters, lent_by(allocate_values_));
    group.grads = memory(trace::Memory::gradients, lent_by(allocate_grads_));
  }
  for (const Entry& entry : entries) {
    const Group& group = groups[entry.group];
    const auto used = static_cast<std::size_t>(entry.parameter().count());
    if (const std::size_t gap = (entry.count - used) * size_of(group.dtype); gap > 0) {
      zero_bytes(entry.parameter().where(), group.value(entry.begin + used), gap);
      zero_bytes(entry.parameter().where(), group.grad(entry.begin + used), gap);
    }
    entry.parameter().bind(group.values, group.value(entry.begin), group.grads, group.grad(entry.begin));
  }
  groups_ = std::move(groups);
  entries_ = std::move(entries);
  count_generation();
}

}  // namespace chorus::nn
