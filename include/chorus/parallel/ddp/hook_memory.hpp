#pragma once
/// A communication hook's state per parameter, independent of buckets.

#include <algorithm>
#include <chorus/kernels/copy.hpp>
#include <chorus/optim/state_tensor.hpp>
#include <chorus/parallel/ddp/hook_calls.hpp>
#include <chorus/parallel/ddp/parameter_memory.hpp>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// Carries a hook's state from old buckets to new ones, and in and out of checkpoints. State of parameters that are in
/// no bucket now (frozen or unused) is kept on the host.
template <Device D, class Hook, class Communicator>
class HookMemory final : public ParameterMemory<D> {
  using Traits = HookTraits<Hook, D, Communicator>;

 public:
  HookMemory(Core<D, Communicator>& core, Hook& hook) : core_(core), hook_(hook) {}

  void buckets_will_change() override {
    for (const auto& tensor : in_buckets(false)) aside_[key_of(tensor.name)] = copy_of(tensor);
  }
  void buckets_changed() override {
    forget_buckets();
    restore();
  }

  void forget(const std::string& parameter) override {
    std::erase_if(aside_, [&](const auto& entry) { return entry.first.parameter == parameter; });
  }

  std::vector<optim::StateTensor> state(bool full) override {
    auto all = in_buckets(full);
    for (auto& [key, kept] : aside_)
      all.push_back({cat(key.what, '.', key.parameter), kept.dtype, kept.shape, kept.bytes.data(), true});
    return all;
  }
  void replace(const std::vector<optim::StateTensor>& tensors) override {
    const auto known = in_buckets(true);
    std::map<Key, Kept> copies;
    for (const auto& tensor : tensors)
      if (std::any_of(known.begin(), known.end(),
                      [&](const auto& one) { return key_of(one.name).what == key_of(tensor.name).what; }))
        copies[key_of(tensor.name)] = copy_of(tensor);
    aside_ = std::move(copies);  // last: `tensors` may point into the old ones
    forget_buckets();
    restore();
  }
  void scale_rest(double factor) override {
    const auto scale = [factor]<class T>(auto device, std::span<const Index> shape, T* numbers) {
      kernels::scale(device, numel(shape), static_cast<T>(factor), numbers);
    };
    for_each(
        [](const auto&) { return false; },
        [&](std::string_view what, const GradBucketPart&, std::span<const Index> shape, auto device, auto* numbers) {
          if (what == "rest") scale(device, shape, numbers);
        });
    for (auto& [key, kept] : aside_)
      if (key.what == "rest")
        with_type(kept.dtype, kept.bytes.data(),
                  [&, &shape = kept.shape](auto* numbers) { scale(Cpu{}, shape, numbers); });
  }

 private:
  struct Key {
    std::string parameter, what;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Kept {
    DType dtype;
    std::vector<Index> shape;
    std::vector<std::byte> bytes;
  };

  static Key key_of(const std::string& name) {
    const auto dot = name.find('.');
    return {name.substr(dot + 1), name.substr(0, dot)};
  }

  // Calls `visit(what, part, shape, device, numbers)` for the buckets' state; creates it if `make(bucket)`.
  template <class Make, class Visit>
  void for_each(const Make& make, const Visit& visit) {
    if constexpr (Traits::remembers_parameters)
      for (const Bucket& bucket : core_.buckets.all())
        as_hooks_see(core_, bucket, [&](const auto& view) { hook_.remembered(view, make(view), visit); });
  }
  std::vector<optim::StateTensor> in_buckets(bool full) {
    std::vector<optim::StateTensor> all;
    for_each(
        [full](const auto&) { return full; },
        [&]<class T, Device Where>(std::string_view what, const GradBucketPart& part, std::span<const Index> shape,
                                   Where, T* numbers) {
          all.push_back(
              {cat(what, '.', part.name), dtype<T>, {shape.begin(), shape.end()}, numbers, !std::is_same_v<Where, D>});
        });
    return all;
  }
  Kept copy_of(const optim::StateTensor& tensor) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(numel(tensor.shape)) * size_of(tensor.dtype));
    if (tensor.on_host)
      copy_bytes(Cpu{}, bytes.data(), Cpu{}, tensor.data, bytes.size());
    else
      copy_bytes(Cpu{}, bytes.data(), core_.parameter(0).where(), tensor.data, bytes.size());
    return {tensor.dtype, tensor.shape, std::move(bytes)};
  }
  void forget_buckets() {
    if constexpr (Traits::resets) hook_.reset();
  }
  // Moves the state kept aside into the buckets of its parameters.
  void restore() {
    if (aside_.empty()) return;
    const auto any_aside = [&](const auto& bucket) {
      return std::any_of(bucket.parts.begin(), bucket.parts.end(), [&](const GradBucketPart& part) {
        const auto found = aside_.lower_bound({part.name, ""});
        return found != aside_.end() && found->first.parameter == part.name;
      });
    };
    for_each(any_aside, [&]<class T>(std::string_view what, const GradBucketPart& part, std::span<const Index> shape,
                                     auto device, T* numbers) {
      const auto found = aside_.find({part.name, std::string(what)});
      if (found == aside_.end()) return;
      const Kept& kept = found->second;
      if (kept.dtype == dtype<T> && std::equal(shape.begin(), shape.end(), kept.shape.begin(), kept.shape.end()))
        copy_bytes(device, numbers, Cpu{}, kept.bytes.data(), kept.bytes.size());
      aside_.erase(found);
    });
  }

  Core<D, Communicator>& core_;
  Hook& hook_;
  std::map<Key, Kept> aside_;
};

}  // namespace chorus::ddp
