#pragma once
/// `RingRunner`: runs calls with the algorithms of `ring.hpp` and its like over a Transport.

#include <chorus/comm/algorithms/direct.hpp>
#include <chorus/comm/algorithms/hierarchical.hpp>
#include <chorus/comm/algorithms/in_place.hpp>
#include <chorus/comm/algorithms/ring.hpp>
#include <chorus/comm/engine/call_book.hpp>
#include <memory>
#include <vector>

namespace chorus::comm {

class RingRunner {
 public:
  RingRunner(const std::vector<int>& members, std::unique_ptr<Transport> link)
      : book_(link->rank, members), link_(std::move(link)) {}

  /// Returns how the call failed.
  Failure run(const Call& call, const std::atomic<bool>& caller_waits) {
    const Envelope envelope = book_.begin(call);
    if (book_.broken()) return failed("");
    try {
      link_->check();
      link_->may_spin = &caller_waits;
      start(call, envelope);
      link_->flush();
      book_.end();
      return {};
    } catch (const LinkTimeout& error) {
      return failed(error.what(), true);
    } catch (const std::exception& error) {
      return failed(error.what());
    }
  }

  /// Ends the run that goes on, wherever it waits, and fails all later ones.
  void abort(std::string_view why) noexcept {
    if (book_.abort(why)) link_->abort(book_.aborted().why());
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) { return link_->allocate(bytes); }
  std::chrono::nanoseconds busy() const { return book_.busy(); }
  std::string record() const { return book_.record(); }
  std::string trouble() {
    try {
      link_->check_peers();
    } catch (const LinkError& error) {
      return error.what();
    }
    return {};
  }

 private:
  [[gnu::cold]] Failure failed(std::string_view why, bool timed_out = false) {
    const bool first = !book_.broken();
    const auto failure = book_.fail(why, timed_out);
    if (first) link_->abort(failure.what);
    link_->await_hands_off();
    return failure;
  }

  void start(const Call& call, const Envelope& envelope) {
    const Ring ring{*link_, envelope, call.reduction, call.traffic};
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    switch (call.op) {
      case Op::all_reduce:
        if (!link_->machines().empty()) return hierarchical_all_reduce(ring, out, call.count);
        if (in_place_all_reduce(ring, out, call.count)) return;
        return exchanges_directly(*link_, call.count * call.reduction.element)
                   ? direct_all_reduce(ring, out, call.count)
                   : ring_all_reduce(ring, out, call.count);
      case Op::broadcast:
        return ring_broadcast(ring, out, call.count, call.peer);
      case Op::all_gather:
        if (in_place_all_gather(ring, in, out, call.count)) return;
        return ring_all_gather(ring, in, out, call.count);
      case Op::reduce_scatter:
        if (in_place_reduce_scatter(ring, in, out, call.count)) return;
        return ring_reduce_scatter(ring, in, out, call.count);
      case Op::barrier:
        return ring_barrier(ring);
      case Op::monitored_barrier:
        return monitored_barrier(ring);
      case Op::message:
        return call.receives ? ring_receive(ring, out, call.count, call.peer)
                             : ring_send(ring, in, call.count, call.peer);
    }
  }

  CallBook book_;
  std::unique_ptr<Transport> link_;
};

}  // namespace chorus::comm
