#pragma once
/// Copies of a model on several devices, for DataParallel.

#include <chorus/kernels/pointwise.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/dp/recorded_copies.hpp>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::detail {

/// A model's handles, to be given back to it.
class Handles final : public nn::detail::Walker {
 public:
  explicit Handles(nn::Module& model) {
    walk(model);
    kept_ = true;
  }
  /// Of one that has as many.
  void put_into(nn::Module& model) {
    next_ = 0;
    walk(model);
  }
  void parameter(std::string_view, AnyParameter& handle) override { take_or_give(handle); }
  void buffer(std::string_view, AnyBuffer& handle) override { take_or_give(handle); }

 private:
  void take_or_give(auto& handle) {
    if (kept_)
      handle.replace(nodes_[next_++]);
    else
      nodes_.push_back(handle.shared());
  }
  std::vector<Ref<Node>> nodes_;
  std::size_t next_ = 0;
  bool kept_ = false;
};

/// Gives every module of `to` the training flag that its counterpart in `from` has.
inline void copy_training_flags(nn::Module& from, nn::Module& to) {
  struct Read final : nn::detail::Walker {
    std::vector<bool> flags;
    void enter(nn::Module& module) override { flags.push_back(module.training()); }
  } read;
  struct Write final : nn::detail::Walker {
    const std::vector<bool>* flags = nullptr;
    std::size_t next = 0;
    void enter(nn::Module& module) override { module.set_own_training((*flags)[next++]); }
  } write;
  read.walk(from);
  write.flags = &read.flags;
  write.walk(to);
  to.set_own_training(from.training());
}

/// Calls `use(group, begin, count)` for each range of a flat buffer that is taken up by neighbours for which
/// `wanted(entry number)`.
template <class Entry, class Wanted, class Use>
void for_each_run(const std::vector<Entry>& entries, const Wanted& wanted, const Use& use) {
  for (std::size_t i = 0; i < entries.size();) {
    const std::size_t first = i, group = entries[i].group, begin = entries[i].begin;
    std::size_t count = 0;
    while (i < entries.size() && entries[i].group == group && entries[i].begin == begin + count && wanted(i))
      count += entries[i++].count;
    if (i == first) ++i;
    if (count > 0) use(group, begin, count);
  }
}

/// A model's copy on one device, kept from step to step, that follows the original.
template <class Model>
class Replica {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  using Flat = nn::FlatParameters<D>;

  Replica(const Model& original, D device)
      : model_(copy_to(original, device)),
        handles_(model_),
        flat_(model_),
        buffers_(nn::named_buffers<D>(model_)),
        device_(device) {
    seen_.resize(flat_.entries().size());
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  Model& model() { return model_; }
  const Flat& flat() const { return flat_; }
  D device() const { return device_; }

  /// Takes over what the original's layers have beside parameters and buffers, as a rate or the training flag. Of a
  /// model that can't be assigned to, since it has a member that can't, that is the training flags alone.
  void take_members(Model& original) {
    if constexpr (std::is_copy_assignable_v<Model>) {
      model_ = original;
      handles_.put_into(model_);
    } else {
      copy_training_flags(original, model_);
    }
  }

  /// Fetches the parameters that have changed since the last call, all buffers, and nothing else; freezes what is
  /// frozen.
  void follow(const Flat& original, const std::vector<nn::NamedBuffer<D>>& buffers, D source) {
    const auto& entries = original.entries();
    for_each_run(
        entries, [&](std::size_t i) { return lacks(entries[i], i); },
        [&](std::size_t group, std::size_t begin, std::size_t count) {
          const auto& from = original.groups()[group];
          const std::size_t bytes = count * size_of(from.dtype);
          copy_bytes(device_, flat_.groups()[group].value(begin), source, from.value(begin), bytes);
          trace::sent(source.index, trace::Traffic::parameters, bytes);
        });
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto& from = *buffers[i].buffer;
      copy_bytes(device_, buffers_[i].buffer->memory(), source, from.memory(), from.size_bytes());
      trace::sent(source.index, trace::Traffic::buffers, from.size_bytes());
    }
    has_followed(original);
  }

  /// Whether this copy has yet to fetch the original's parameter number i.
  bool lacks(const typename Flat::Entry& original, std::size_t i) const {
    return seen_[i] != original.parameter().version();
  }
  const std::vector<nn::NamedBuffer<D>>& buffers() const { return buffers_; }

  /// After this copy has got what it lacked, by whatever way: what follows from it.
  void has_followed(const Flat& original) {
    const auto& entries = original.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& own = flat_.entries()[i].parameter();
      // What was made of the old numbers, as a copy in bf16, is no good.
      if (const auto version = entries[i].parameter().version(); std::exchange(seen_[i], version) != version)
        own.touch();
      own.set_wants_grad(entries[i].parameter().wants_grad());
    }
    end_recording();
  }
  /// Nobody knows what this copy has: it will fetch everything.
  void forget() { seen_.assign(seen_.size(), 0); }

  /// After `follow`: until `end_recording` or the next `follow`, this copy's parameters stand on the tape for copies of
  /// the original's.
  void record_copies(const Flat& original) {
    recorded_ = true;
    for (std::size_t i = 0; i < original.entries().size(); ++i)
      record_parameter_copy(original.entries()[i].parameter(), flat_.entries()[i].parameter());
  }

  /// They stand for themselves again, as for what a plain pass computes anew in backward.
  void end_recording() {
    if (!std::exchange(recorded_, false)) return;
    for (const auto& entry : flat_.entries()) entry.parameter().set_origin({});
  }

 private:
  Model model_;
  Handles handles_;
  Flat flat_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  D device_;
  std::vector<std::uint64_t> seen_;  // versions of the original's parameters
  bool recorded_ = false;
};

}  // namespace chorus::detail
