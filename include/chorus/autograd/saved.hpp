#pragma once
/// Saved: numbers that an operation keeps for backward, which have to be the same then.

#include <chorus/autograd/node.hpp>
#include <chorus/core/error.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace chorus::detail {

/// Blocks of memory that may be somebody else's.
template <class B>
concept Lendable = requires(const B& block) { block.lent; };

/// Backward functions capture `Saved(tensor)` and call `read` where they need the numbers.
template <AnyTensor X>
class Saved {
 public:
  /// Where nothing is recorded nobody will read it, and no numbers are looked at.
  explicit Saved(X tensor)
      : tensor_(std::move(tensor)), version_(grad_enabled() ? tensor_.storage().version() : 0) {}

  /// Throws UsageError where the tensor has been written since it was saved: a parameter, a buffer, or in place.
  const X& read(const char* operation) const {
    tensor_.storage().touch();
    if (const auto now = tensor_.storage().version(); now != version_) [[unlikely]]
      refuse(operation, now);
    return tensor_;
  }
  /// Whether nobody else has a handle to the numbers, so that they may be written after they were last read.
  bool alone() const {
    const auto* const block = tensor_.storage().block();
    if (block == nullptr || block->home || tensor_.storage().owners() != 1) return false;
    if constexpr (Lendable<std::remove_cvref_t<decltype(*block)>>)
      return block->lent == nullptr;
    else
      return true;
  }
  /// `read`, for the last time: the tensor is the caller's.
  X take(const char* operation) {
    read(operation);
    return std::move(tensor_);
  }
  /// The tensor, for its shape and device.
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
