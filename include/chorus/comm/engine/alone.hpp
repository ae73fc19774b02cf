#pragma once
/// The engine of a group of one.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/abort_reason.hpp>
#include <cstring>

namespace chorus::comm {

namespace detail {

/// Nothing moves, but results are where, and what, they would be.
class Alone final : public Engine {
 public:
  Alone() : Engine(0, 1) {}

  void now(const Call& call) override {
    if (aborted_) fail<CommError>("rank 0: ", comm::name(call.op), ": aborted: ", aborted_.why());
    if (call.out == nullptr || call.count == 0) return;
    if (call.reduction.scaled != nullptr) {
      call.reduction.scaled(call.out, call.in, call.count, call.reduction.scale);
    } else if (call.out != call.in) {
      std::memcpy(call.out, call.in, call.count * call.reduction.element);
    }
  }
  Work later(const Call& call) override {
    now(call);
    return {};
  }
  void abort(std::string_view why) noexcept override { aborted_.set(why); }
  std::string_view name() const override { return "alone"; }

 private:
  AbortReason aborted_;
};

}  // namespace detail

CHORUS_INLINE std::shared_ptr<Engine> alone() { return std::make_shared<detail::Alone>(); }

}  // namespace chorus::comm
