#pragma once
/// `CollectiveRunner`: runs calls over a Transport, with the algorithms of this folder.

#include <chorus/comm/algorithms/barrier.hpp>
#include <chorus/comm/algorithms/selection.hpp>
#include <chorus/comm/engine/call_book.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

class CollectiveRunner {
 public:
  CollectiveRunner(const std::vector<int>& members, std::unique_ptr<Transport> link, Algorithm all_reduce)
      : book_(link->rank, members), link_(std::move(link)), all_reduce_(all_reduce) {}

  /// Returns how the call failed.
  Failure run(const Call& call, const std::atomic<bool>& caller_waits) {
    const auto failure = book_.run(
        call,
        [&](const Envelope& envelope) {
          link_->check();
          link_->may_spin = &caller_waits;
          start(call, envelope);
          link_->flush();
        },
        [&](const std::string& why) { link_->abort(why); });
    if (failure) link_->await_hands_off();
    return failure;
  }

  /// Ends the run that goes on, wherever it waits, and fails all later ones.
  void abort(std::string_view why) noexcept {
    if (book_.abort(why)) link_->abort(book_.aborted().why());
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) { return link_->allocate(bytes); }
  std::chrono::nanoseconds busy() const { return book_.busy(); }
  std::string record() const { return book_.record(); }
  Algorithm all_reduce() const { return all_reduce_; }
  std::string trouble() {
    try {
      link_->check_peers();
    } catch (const LinkError& error) {
      return error.what();
    }
    return {};
  }

 private:
  void start(const Call& call, const Envelope& envelope) {
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    const auto n = call.count, bytes = n * call.reduction.element;
    const bool chosen = call.op == Op::all_reduce && all_reduce_ != Algorithm::automatic;
    const Collective c{*link_, envelope, call.reduction, call.traffic, {}, chosen};
    const auto note = [this](Algorithm algorithm) { book_.note(algorithm); };
    switch (call.op) {
      case Op::all_reduce:
        return chosen ? run_chosen(all_reduce_, c, note, out, n)
                      : run_fastest(detail::all_reduce_rows, c, bytes, note, out, n);
      case Op::all_gather:
        return run_fastest(detail::all_gather_rows, c, bytes, note, in, out, n);
      case Op::reduce_scatter:
        return run_fastest(detail::reduce_scatter_rows, c, bytes, note, in, out, n);
      case Op::broadcast:
        return ring_broadcast(c, out, n, call.peer);
      case Op::barrier:
        return dissemination_barrier(c);
      case Op::monitored_barrier:
        return monitored_barrier(c);
      case Op::message:
        return call.receives ? detail::relay(c, {.from = call.peer, .stores = true, .store = out}, n)
                             : detail::relay(c, {.to = call.peer, .reads = true, .mine = in}, n);
    }
  }

  CallBook book_;
  std::unique_ptr<Transport> link_;
  const Algorithm all_reduce_;
};

}  // namespace chorus::comm
