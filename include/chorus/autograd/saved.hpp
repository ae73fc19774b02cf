#pragma once
/// Saved: a tensor saved for backward, with a check that it has not changed.

#include <chorus/autograd/node.hpp>
#include <chorus/core/error.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace chorus::detail {

/// Memory blocks that may be lent.
template <class B>
concept Lendable = requires(const B& block) { block.lent; };

/// Backward functions capture `Saved(tensor)` and call `read` when they need the values.
template <AnyTensor X>
class Saved {
 public:
  /// Without recording nobody reads it, so the version is not computed.
  explicit Saved(X tensor)
      : tensor_(std::move(tensor)), version_(grad_enabled() ? tensor_.storage().version() : 0) {}

  /// Throws UsageError if the tensor was written since it was saved: a parameter, a buffer, or in place.
  const X& read(const char* operation) const {
    tensor_.storage().touch();
    if (const auto now = tensor_.storage().version(); now != version_) [[unlikely]]
      refuse(operation, now);
    return tensor_;
  }
  /// Whether this is the only handle to the values, so that their memory may be reused after the last read.
  bool alone() const {
    const auto* const block = tensor_.storage().block();
    if (block == nullptr || block->home || tensor_.storage().owners() != 1) return false;
    if constexpr (Lendable<std::remove_cvref_t<decltype(*block)>>)
      return block->lent == nullptr;
    else
      return true;
  }
  /// The last `read`: the caller gets the tensor.
  X take(const char* operation) {
    read(operation);
    return std::move(tensor_);
  }
  /// The tensor, for its shape and device only.
  const X& tensor() const { return tensor_; }

 private:
  [[noreturn, gnu::noinline, gnu::cold]] void refuse(const char* operation, std::uint64_t now) const {
    const auto* const writes = tensor_.storage().writes();
    fail<UsageError>(
        "backward of '", operation, "': it needs ",
        writes == nullptr      ? "a tensor"
        : writes->name.empty() ? "a parameter or buffer"
                               : "'" + writes->name + "'",
        " of shape ", tensor_.shape(), " as it was in the forward pass, at version ", version_,
        ", but it has been written since, and is at version ", now,
        ": call backward before an optimizer steps or numbers are assigned, or run the forward pass again");
  }

  X tensor_;
  std::uint64_t version_;
};

}  // namespace chorus::detail
