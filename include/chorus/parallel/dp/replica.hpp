#pragma once
/// A model's copy on another device.

#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Calls `f` with every parameter and buffer handle of a model.
template <class F>
void for_each_handle(nn::Module& model, const F& f) {
  struct Walk final : nn::detail::Walker {
    const F& f;
    explicit Walk(const F& call) : f(call) {}
    void parameter(std::string_view, AnyParameter& handle) override { f(handle); }
    void buffer(std::string_view, AnyBuffer& handle) override { f(handle); }
  };
  Walk(f).walk(model);
}

/// Copies the training flag of every layer of `from` to its counterpart in `to`.
inline void copy_training_flags(nn::Module& from, nn::Module& to) {
  struct Flags final : nn::detail::Walker {
    std::vector<bool> flags;
    std::size_t next = 0;
    bool reads = true;
    void enter(nn::Module& layer) override {
      if (reads)
        flags.push_back(layer.training());
      else
        layer.set_own_training(flags[next++]);
    }
  } flags;
  flags.walk(from);
  flags.reads = false;
  flags.walk(to);
  to.set_own_training(from.training());
}

/// A copy of the model that lives from step to step.
template <class Model>
class Replica {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  using Flat = nn::FlatParameters<D>;

  Replica(const Model& original, D device)
      : model_(detail::copy_to(original, device)),
        flat_(model_),
        buffers_(nn::named_buffers<D>(model_)),
        device_(device),
        seen_(flat_.entries().size()) {
    for_each_handle(model_, [this](auto& handle) { handles_.push_back(handle.shared()); });
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  Model& model() { return model_; }
  const Flat& parameters() const { return flat_; }
  const std::vector<nn::NamedBuffer<D>>& buffers() const { return buffers_; }
  D device() const { return device_; }

  /// Copies the members of the original's layers other than parameters and buffers, such as a rate or the training
  /// flag. If the model's type is not assignable, copies only the training flags.
  void take_members(Model& original) {
    if constexpr (std::is_copy_assignable_v<Model>) {
      model_ = original;
      std::size_t next = 0;
      for_each_handle(model_, [&](auto& handle) { handle.replace(handles_[next++]); });
    } else {
      copy_training_flags(original, model_);
    }
  }

  /// Whether parameter number i of the original has changed since it was sent to this copy.
  bool lacks(const typename Flat::Entry& original, std::size_t i) const {
    return seen_[i] != original.parameter().version();
  }
  /// Records that this copy has the original's values.
  void is_up_to_date(const Flat& original) {
    const auto& entries = original.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& own = flat_.entries()[i].parameter();
      // Values derived from the old parameters, such as a bf16 copy, are invalid.
      if (const auto version = entries[i].parameter().version(); std::exchange(seen_[i], version) != version)
        own.touch();
      own.set_wants_grad(entries[i].parameter().wants_grad());
    }
    end_recording();
  }
  /// The copy's values are unknown: it lacks all parameters.
  void forget() { seen_.assign(seen_.size(), 0); }

  /// Starts or ends treating parameters as copies of the original's on the tape (see recorded.hpp).
  void begin_recording() { recorded_ = true; }
  void end_recording() {
    if (!std::exchange(recorded_, false)) return;
    for (const auto& entry : flat_.entries()) entry.parameter().set_origin({});
  }

 private:
  Model model_;
  std::vector<Ref<Node>> handles_;
  Flat flat_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  D device_;
  std::vector<std::uint64_t> seen_;  // versions of the original's parameters
  bool recorded_ = false;
};

/// The model on the first device and its copies on the others.
template <class Model>
class Replicas {
 public:
  using D = typename Replica<Model>::D;
  using Copies = std::vector<std::shared_ptr<Replica<Model>>>;  // of devices 1, 2, ...

  /// `parameters` and `buffers` of the model must outlive this.
  Replicas(const Model& model, const nn::FlatParameters<D>& parameters, const std::vector<nn::NamedBuffer<D>>& buffers,
           const std::vector<int>& device_ids)
      : parameters_(parameters), buffers_(buffers) {
    for (std::size_t i = 1; i < device_ids.size(); ++i)
      copies_.push_back(std::make_shared<Replica<Model>>(model, D{device_ids[i]}));
  }

  std::size_t size() const { return copies_.size() + 1; }
  const Copies& copies() const { return copies_; }
  /// The copy on device `i`, i at least 1.
  Replica<Model>& operator[](std::size_t i) const { return *copies_[i - 1]; }
  const nn::FlatParameters<D>& parameters(std::size_t i) const {
    return i == 0 ? parameters_ : (*this)[i].parameters();
  }
  const std::vector<nn::NamedBuffer<D>>& buffers(std::size_t i) const {
    return i == 0 ? buffers_ : (*this)[i].buffers();
  }
  D device(std::size_t i) const { return parameters(i).groups().front().values.device(); }

 private:
  const nn::FlatParameters<D>& parameters_;
  const std::vector<nn::NamedBuffer<D>>& buffers_;
  Copies copies_;
};

}  // namespace chorus::dp
