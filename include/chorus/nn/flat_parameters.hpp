#pragma once
/// All parameters of a model in one buffer per dtype, and all gradients in another, so that a replica's copy, a
/// gradient bucket and an optimizer step are each a range of memory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::nn {

/// Owns the buffers; the parameters are views of them. Within a dtype those come first that want gradients, in the
/// order in which backward is expected to finish them (the last layer's first), frozen ones last. In front of large
/// ones, on GPUs of all, some zeros may lie, up to an address that suits them (`parameter_place`); they count as the
/// parameter's before.
template <Device D>
class FlatParameters {
 public:
  /// Where one parameter lies, in elements of its group's buffers: `count` of them up to the next parameter.
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
    std::byte* grad(std::size_t element) const {
      return static_cast<std::byte*>(grads.data()) + element * size_of(dtype);
    }
  };

  FlatParameters() = default;

  /// Moves the parameters of `model`, contents included, into new buffers on their device.
  explicit FlatParameters(Module& model);

  /// Lays the parameters out anew: `order[i]` is the present index of the one that becomes number i. Where they lie so
  /// already they stay, for captured graphs know their addresses.
  [[gnu::cold]] void reorder(std::span<const std::size_t> order);

  /// Memory for that many bytes, or none.
  using Allocate = std::function<std::shared_ptr<void>(std::size_t)>;
  /// Moves the buffers into memory that these give, now and at each `reorder`; where one gives none, they stay the
  /// device's.
  void use_memory(Allocate for_values, Allocate for_grads);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Group>& groups() const { return groups_; }

  /// The first parameter that lies elsewhere by now, for another FlatParameters has taken it; null where none does.
  const Entry* taken_away() const {
    for (const Entry& entry : entries_)
      if (entry.parameter().place() != groups_[entry.group].value(entry.begin)) return &entry;
    return nullptr;
  }

  /// Changes with the layout, and with what is made for it, such as buckets: what has kept addresses asks it.
  std::uint64_t generation() const { return generation_; }
  void count_generation() { ++generation_; }

  /// Bytes of all parameters.
  std::size_t bytes() const;

  /// In memory order: an optimizer that keeps it touches memory from front to back.
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
