#pragma once
/// `State`: all that a rank needs to take another one's place, in memory: what `save_checkpoint` writes.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/ranks_own.hpp>
#include <chorus/io/tensor_place.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::elastic {

/// The state of a model and of the objects that its program steps. Objects are referred to: they must live as long as
/// this is used.
template <Device D>
class State {
  using Place = io::detail::TensorPlace<D>;

 public:
  /// The model; again after it has moved.
  void set_model(nn::Module& model) {
    model_ = &model;
    buffers_ = nn::named_buffers<D>(model);
  }

  /// An optimizer, a GradScaler, a ParameterAverage, a schedule: whatever save_checkpoint takes.
  template <class X>
  void keep(X& x) {
    objects_.push_back(std::make_unique<KeptOf<X>>(x));
    if constexpr (std::is_base_of_v<optim::HasLearningRate, X>)
      objects_.push_back(std::make_unique<KeptOf<io::detail::KeptRate>>(x));
    if constexpr (std::is_base_of_v<optim::Optimizer<D>, X>)
      optimizers_.push_back(static_cast<const optim::Optimizer<D>*>(&x));
    else if constexpr (requires { x.step(); })
      made_of_several_ = true;
  }
  /// Whether that optimizer, or one that may have it inside, is kept.
  bool keeps(const void* optimizer) const {
    return made_of_several_ || std::find(optimizers_.begin(), optimizers_.end(), optimizer) != optimizers_.end();
  }

  /// `all`; else what a step changes even if there is no gradient: buffers, numbers, averages.
  std::vector<std::byte> copy(bool all) {
    std::vector<std::byte> bytes;
    for_each(all, [&](const Place& place) {
      const auto begin = bytes.size();
      bytes.resize(begin + place.bytes());
      place.copy_to(bytes.data() + begin);
    });
    return bytes;
  }
  /// The numbers of `copy`, of this or another rank's. Throws UsageError if they don't fit.
  void restore(std::span<const std::byte> bytes, bool all) {
    std::size_t begin = 0;
    for_each(all, [&](const Place& place) {
      check<UsageError>(begin + place.bytes() <= bytes.size(), "Elastic: expected a state with ", place.name, ", got ",
                        bytes.size(), " bytes with ", begin, " of earlier tensors");
      place.fill(bytes.data() + begin);
      begin += place.bytes();
    });
    check<UsageError>(begin == bytes.size(), "Elastic: expected a state of ", begin, " bytes, got ", bytes.size());
    for (const auto& object : objects_) object->take();
    for (const auto& named : nn::named_parameters<D>(*model_)) named.parameter->touch();
    for (const auto& named : buffers_) named.buffer->touch();
  }

 private:
  struct Kept {
    virtual ~Kept() = default;
    virtual std::vector<Place> places() = 0;
    virtual void take() = 0;                ///< gives the numbers back to the object
    virtual bool needs_gradient() const = 0;  ///< without gradients a step leaves it as it is
  };
  template <class X>
  struct KeptOf final : Kept {
    explicit KeptOf(X& object) requires(!std::is_same_v<X, io::detail::KeptRate>) : x(object) {}
    explicit KeptOf(optim::HasLearningRate& optimizer) requires(std::is_same_v<X, io::detail::KeptRate>)
        : x(optimizer) {}
    std::vector<Place> places() override {
      numbers = io::detail::numbers_of(get());
      return io::detail::places_of<D>(get(), numbers);
    }
    void take() override {
      if constexpr (requires { get().keep(numbers); }) get().keep(numbers);
    }
    bool needs_gradient() const override { return std::is_base_of_v<optim::Optimizer<D>, X>; }
    X& get() { return x; }
    std::conditional_t<std::is_same_v<X, io::detail::KeptRate>, X, X&> x;
    decltype(io::detail::numbers_of(std::declval<const X&>())) numbers{};
  };

  template <class F>
  void for_each(bool all, const F& f) {
    if (all) {
      for (const auto& place : io::detail::model_places<D>(*model_)) f(place);
    } else {
      for (const auto& named : buffers_) {
        const auto extents = named.buffer->extents();
        f(Place{named.name, named.buffer->dtype(), {extents.begin(), extents.end()}, named.buffer->where(),
                named.buffer->memory()});
      }
    }
    for (const auto& object : objects_)
      if (all || !object->needs_gradient())
        for (const auto& place : object->places()) f(place);
  }

  nn::Module* model_ = nullptr;
  std::vector<nn::NamedBuffer<D>> buffers_;  // of the model: read after each step
  std::vector<std::unique_ptr<Kept>> objects_;
  std::vector<const void*> optimizers_;
  bool made_of_several_ = false;
};

}  // namespace chorus::elastic
