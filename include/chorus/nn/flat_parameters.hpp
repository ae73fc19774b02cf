#pragma once
/// All parameters of a model in one buffer per dtype, and all gradients in another, so that a replica's copy, a gradient
/// bucket and an optimizer step are each a range of memory.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::inline CHORUS_ABI::nn {

/// Owns the buffers; the parameters are views of them. Within a dtype parameters lie without gaps: those that want
/// gradients first, in the order in which backward is expected to finish them (the last layer's first), frozen ones behind.
template <Device D>
class FlatParameters {
 public:
  /// Where one parameter lies, in elements of its group's buffers.
  struct Entry {
    NamedParameter<D> named;
    std::size_t group, begin, count;
    ParameterOn<D>& parameter() const { return *named.parameter; }
  };
  /// The parameters of one dtype.
  struct Group {
    DType dtype;
    Storage<D> values, grads;
    std::size_t count = 0;      // elements in all
    std::size_t trainable = 0;  // elements at the front that want gradients
    std::byte* value(std::size_t element) const {
      return static_cast<std::byte*>(values.data()) + element * size_of(dtype);
    }
    std::byte* grad(std::size_t element) const { return static_cast<std::byte*>(grads.data()) + element * size_of(dtype); }
  };

  FlatParameters() = default;

  /// Moves the parameters of `model`, contents included, into new buffers on their device.
  explicit FlatParameters(Module& model) {
    auto parameters = named_parameters<D>(model);
    std::reverse(parameters.begin(), parameters.end());
    std::stable_partition(parameters.begin(), parameters.end(),
                          [](const auto& named) { return named.parameter->wants_grad(); });
    lay_out(std::move(parameters));
  }

  /// Lays the parameters out anew: `order[i]` is the present index of the one that becomes number i.
  void reorder(std::span<const std::size_t> order) {
    check<UsageError>(order.size() == entries_.size(), "FlatParameters::reorder: ", order.size(), " indices for ",
                      entries_.size(), " parameters");
    std::vector<NamedParameter<D>> parameters;
    for (const std::size_t index : order) parameters.push_back(entries_.at(index).named);
    lay_out(std::move(parameters));
  }

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Group>& groups() const { return groups_; }

  /// Bytes of all parameters.
  std::size_t bytes() const {
    return std::accumulate(groups_.begin(), groups_.end(), std::size_t{0},
                           [](std::size_t sum, const Group& group) { return sum + group.count * size_of(group.dtype); });
  }

  /// In memory order: an optimizer that keeps it touches memory from front to back.
  std::vector<NamedParameter<D>> parameters() const {
    std::vector<NamedParameter<D>> out;
    for (const Entry& entry : entries_) out.push_back(entry.named);
    return out;
  }

 private:
  void lay_out(std::vector<NamedParameter<D>> parameters) {
    std::vector<Group> groups;
    std::vector<Entry> entries;
    for (auto& named : parameters) {
      const DType type = named.parameter->dtype();
      auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.dtype == type; });
      if (group == groups.end()) group = groups.insert(groups.end(), Group{type, {}, {}});
      const auto count = static_cast<std::size_t>(named.parameter->count());
      entries.push_back({std::move(named), static_cast<std::size_t>(group - groups.begin()), group->count, count});
      group->count += count;
      if (entries.back().parameter().wants_grad()) group->trainable = group->count;
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      Group& group = groups[g];
      const auto first = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.group == g; });
      const D device = first->parameter().where();
      const std::size_t bytes = group.count * size_of(group.dtype);
      {
        const MemoryScope scope(trace::Memory::parameters);
        group.values = Storage<D>(device, bytes);
      }
      const MemoryScope scope(trace::Memory::gradients);
      group.grads = Storage<D>(device, bytes);
    }
    for (const Entry& entry : entries) {
      const Group& group = groups[entry.group];
      entry.parameter().bind(group.values, group.value(entry.begin), group.grads, group.grad(entry.begin));
    }
    groups_ = std::move(groups);
    entries_ = std::move(entries);
  }

  std::vector<Entry> entries_;
  std::vector<Group> groups_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
