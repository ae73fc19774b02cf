#pragma once
/// Stores all parameters of a dtype in one buffer, and all gradients in another. A replica's copy, a gradient bucket
/// and an optimizer step are then ranges of memory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::nn {

/// Owns the buffers; parameters are views of them. Within a dtype, trainable parameters come first, in the order in
/// which backward is expected to finish them (last layer first), then frozen ones. Large parameters, and on GPUs all,
/// are aligned (`parameter_place`): zeros before them count as part of the previous parameter.
template <Device D>
class FlatParameters {
 public:
  /// The place of one parameter, in elements of its group's buffers: `count` elements up to the next parameter.
  struct Entry {
    NamedParameter<D> named;
    std::size_t group, begin, count;
    ParameterOn<D>& parameter() const { return *named.parameter; }
  };
  /// The parameters of one dtype.
  struct Group {
    DType dtype;
    Storage<D> values, grads;
    std::size_t count = 0;      // total elements
    std::size_t trainable = 0;  // elements of trainable parameters, at the front
    std::byte* value(std::size_t element) const {
      return static_cast<std::byte*>(values.data()) + element * size_of(dtype);
    }
    std::byte* grad(std::size_t element) const {
      return static_cast<std::byte*>(grads.data()) + element * size_of(dtype);
    }
  };

  FlatParameters() = default;

  /// Moves the parameters of `model`, contents included, into new buffers on their device.
  explicit FlatParameters(Module& model);

  /// Changes the layout: `order[i]` is the current index of the parameter that becomes number i. Does nothing if the
  /// order is the same, since captured graphs know the addresses.
  [[gnu::cold]] void reorder(std::span<const std::size_t> order);

  /// Allocates that many bytes, or returns null.
  using Allocate = std::function<std::shared_ptr<void>(std::size_t)>;
  /// Moves the buffers into memory from these functions, now and at each `reorder`. If one returns null, the device
  /// allocates.
  void use_memory(Allocate for_values, Allocate for_grads);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Group>& groups() const { return groups_; }

  /// The first parameter that another FlatParameters has moved away; null if there is none.
  const Entry* taken_away() const {
    for (const Entry& entry : entries_)
      if (const Group& group = groups_[entry.group]; group.values)
        if (entry.parameter().place() != group.value(entry.begin)) return &entry;
    return nullptr;
  }
  /// Drops the buffers: their user has moved the parameters elsewhere.
  void leave_memory() {
    for (Group& group : groups_) group.values = group.grads = {};
  }

  /// Changes with the layout, and with data that depends on it, such as buckets. Users of cached addresses compare it.
  std::uint64_t generation() const { return generation_; }
  void count_generation() { ++generation_; }

  /// Bytes of all parameters.
  std::size_t bytes() const;

  /// In memory order, so that an optimizer accesses memory sequentially.
  std::vector<NamedParameter<D>> parameters() const;

 private:
  [[gnu::cold]] void lay_out(std::vector<NamedParameter<D>> parameters);

  Allocate allocate_values_, allocate_grads_;
  std::vector<Entry> entries_;
  std::vector<Group> groups_;
  std::uint64_t generation_ = 0;
};

}  // namespace chorus::nn

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/nn/flat_parameters_impl.hpp>
#endif
