#pragma once
/// `RingRunner`: runs calls with the algorithms of `ring.hpp` over a Transport.

#include <array>
#include <chorus/comm/abort_reason.hpp>
#include <chorus/comm/in_order.hpp>
#include <chorus/comm/ring.hpp>
#include <chorus/comm/world.hpp>
#include <memory>

namespace chorus::inline CHORUS_ABI::comm {

/// Runs calls over a link, numbers them, and turns what goes wrong into one message: rank, call, peer, why.
class RingRunner {
 public:
  explicit RingRunner(std::unique_ptr<Transport> link) : link_(std::move(link)) {}

  /// Returns how the call failed.
  Failure run(const Call& call, const std::atomic<bool>& caller_waits) {
    const Envelope envelope = number(call);
    if (aborted_) return failed(call, envelope, "");
    if (!failure_.empty()) return failed(call, envelope, cat("this communicator has failed before: ", failure_));
    try {
      link_->check();
      link_->may_spin = &caller_waits;
      start(call, envelope);
      link_->flush();
      return {};
    } catch (const LinkTimeout& error) {
      return failed(call, envelope, error.what(), true);
    } catch (const std::exception& error) {
      return failed(call, envelope, error.what());
    }
  }

  /// Ends the run that goes on, wherever it waits, and fails all later ones.
  void abort(std::string_view why) noexcept {
    if (aborted_.set(why)) link_->abort(aborted_.why());
  }

 private:
  Envelope number(const Call& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    const auto peer = static_cast<std::size_t>(call.peer);
    switch (call.op) {
      case Op::message:
        envelope.sequence = call.receives ? received_[peer]++ : sent_[peer]++;
        return envelope;
      case Op::broadcast:
        envelope.detail = static_cast<std::uint8_t>(call.peer);
        break;
      default:
        envelope.detail = static_cast<std::uint8_t>(call.reduction.op);
    }
    envelope.sequence = collectives_++;
    return envelope;
  }

  [[gnu::cold]] Failure failed(const Call& call, const Envelope& envelope, std::string_view why,
                               bool timed_out = false) {
    const auto direction = call.op != Op::message ? "" : call.receives ? "receiving " : "sending ";
    const auto what = cat("rank ", link_->rank, ": ", direction, envelope, ": ", aborted_ ? "aborted: " : "",
                          aborted_ ? std::string_view(aborted_.why()) : why);
    if (failure_.empty()) {
      failure_ = what;
      link_->abort(what);
    }
    return {what, timed_out};
  }

  void start(const Call& call, const Envelope& envelope) {
    const Ring ring{*link_, envelope, call.reduction, call.traffic};
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    switch (call.op) {
      case Op::all_reduce:
        return ring_all_reduce(ring, out, call.count);
      case Op::broadcast:
        return ring_broadcast(ring, out, call.count, call.peer);
      case Op::all_gather:
        return ring_all_gather(ring, in, out, call.count);
      case Op::reduce_scatter:
        return ring_reduce_scatter(ring, in, out, call.count);
      case Op::barrier:
        return ring_barrier(ring);
      case Op::message:
        return call.receives ? ring_receive(ring, out, call.count, call.peer)
                             : ring_send(ring, in, call.count, call.peer);
    }
  }

  std::unique_ptr<Transport> link_;
  AbortReason aborted_;
  std::string failure_;
  std::uint32_t collectives_ = 0;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // messages, per peer
};

}  // namespace chorus::inline CHORUS_ABI::comm
