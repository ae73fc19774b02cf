#pragma once
/// Stash and Pop: skip connections in a chain of layers, over any number of layers and pipeline stages.

#include <algorithm>
#include <chorus/autograd/activation.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace detail {

/// The stashed values of this thread's pass, in order.
template <Device D>
class Stashes {
 public:
  struct Entry {
    std::string name;
    std::shared_ptr<pipeline::AnyActivation<D>> value;
  };
  /// Starts a pass with the values stashed in earlier stages, or with none.
  explicit Stashes(std::vector<Entry> entries = {})
      : entries_(std::move(entries)), before_(std::exchange(of_thread(), this)) {}
  ~Stashes() { of_thread() = before_; }
  Stashes(const Stashes&) = delete;
  Stashes& operator=(const Stashes&) = delete;

  /// Throws UsageError outside of a model with CHORUS_PIPELINE.
  static Stashes& current(std::string_view who) {
    check<UsageError>(of_thread() != nullptr, who, ": expected a layer of a model with CHORUS_PIPELINE");
    return *of_thread();
  }

  void stash(std::string_view name, std::shared_ptr<pipeline::AnyActivation<D>> value) {
    check<UsageError>(find(name) == entries_.end(), "nn::Stash<\"", name,
                      "\">: the previous value of that name was not popped");
    entries_.push_back({std::string(name), std::move(value)});
  }
  std::shared_ptr<pipeline::AnyActivation<D>> pop(std::string_view name) {
    const auto entry = find(name);
    check<UsageError>(entry != entries_.end(), "nn::Pop<\"", name, "\">: nothing was stashed under that name");
    auto value = std::move(entry->value);
    entries_.erase(entry);
    return value;
  }
  const std::vector<Entry>& entries() const { return entries_; }
  /// Returns the pass's result; all stashed values must have been popped.
  template <class Y>
  Y checked(Y y) const {
    check<UsageError>(entries_.empty(), "nn::Stash<\"", entries_.empty() ? "" : entries_.front().name,
                      "\">: no layer pops it");
    return y;
  }

 private:
  static Stashes*& of_thread() {
    thread_local Stashes* current = nullptr;
    return current;
  }
  auto find(std::string_view name) {
    return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.name == name; });
  }

  std::vector<Entry> entries_;
  Stashes* before_;
};

/// A string as a template argument.
template <std::size_t N>
struct StashName {
  static_assert(N <= 22, "nn::Stash: a name has at most 21 characters");
  char text[N];
  constexpr StashName(const char (&name)[N]) { std::copy_n(name, N, text); }  // NOLINT: converts from text
};

/// The Variable type of an operand.
template <Operand X>
using VariableLike =
    Variable<typename tensor_of<X>::value_type, tensor_of<X>::rank, typename tensor_of<X>::device_type>;

}  // namespace detail

/// `stash(x)` returns x and keeps it for the `nn::Pop` of that name in a later layer of a model with CHORUS_PIPELINE,
/// in any stage: `nn::Stash<"skip"> stash;`. Throws UsageError if a value of that name is already stashed, and at the
/// end of the model if no layer has popped it.
template <detail::StashName Name>
struct Stash : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    using V = detail::VariableLike<X>;
    using D = typename V::device_type;
    detail::Stashes<D>::current("nn::Stash").stash(Name.text, std::make_shared<pipeline::Activation<V>>(value(x)));
    return x;
  }
  std::string describe() const override { return cat("Stash(", static_cast<const char*>(Name.text), ")"); }

 private:
  template <Operand X>
  static auto value(const X& x) {
    if constexpr (AnyTensor<X>)
      return detail::VariableLike<X>(x);
    else
      return chorus::detail::variable_of(x);
  }
};

/// `pop(x)` returns x + the stashed value; `pop(x, combine)` returns `combine(x, stashed)`. Throws UsageError if
/// nothing is stashed under that name, or if its scalar type or rank is not x's.
template <detail::StashName Name>
struct Pop : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    return (*this)(x, [](const auto& a, const auto& b) { return a + b; });
  }
  template <Operand X, class Combine>
  auto operator()(const X& x, const Combine& combine) const {
    using V = detail::VariableLike<X>;
    using D = typename V::device_type;
    const auto stashed = detail::Stashes<D>::current("nn::Pop").pop(Name.text);
    if (auto* const raw = dynamic_cast<pipeline::RawActivation<D>*>(stashed.get()))
      return combine(x, raw->template pop<V>());
    const auto* const own = dynamic_cast<const pipeline::Activation<V>*>(stashed.get());
    check<UsageError>(own != nullptr, "nn::Pop<\"", static_cast<const char*>(Name.text), "\">: expected ",
                      dtype<typename V::value_type>, " with ", V::rank, " axes, got ", stashed->header().dtype,
                      " with ", int{stashed->header().rank});
    return combine(x, own->value);
  }
  std::string describe() const override { return cat("Pop(", static_cast<const char*>(Name.text), ")"); }
};

}  // namespace chorus::nn
