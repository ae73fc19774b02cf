#pragma once
/// `TransportCommunicator`: chorus' own collectives over a Transport.

#include <chorus/comm/algorithms/barrier.hpp>
#include <chorus/comm/algorithms/selection.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/queued_engine.hpp>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

namespace detail {

/// Executes one call of this rank with the chosen algorithm, and passes that to `note`. `names`: the ranks' numbers in
/// the job, see Collective; `all_reduce`: see World.
template <class Note>
void run_call(Transport& link, std::span<const int> names, const Call& call, const Envelope& envelope,
              Algorithm all_reduce, const Note& note) {
  const auto in = static_cast<const std::byte*>(call.in);
  const auto out = static_cast<std::byte*>(call.out);
  const auto n = call.count, bytes = n * call.reduction.element;
  const auto asked = call.op == Op::all_reduce ? all_reduce : Algorithm::automatic;
  const Collective c{.link = link,
                     .call = envelope,
                     .reduction = call.reduction,
                     .traffic = call.traffic,
                     .chosen = asked != Algorithm::automatic,
                     .names = names,
                     .data = call.op == Op::reduce_scatter || out == nullptr ? in : out,
                     .extent = call.op == Op::reduce_scatter || call.op == Op::all_gather
                                   ? bytes * static_cast<std::size_t>(link.size)
                                   : bytes,
                     .lane = call.lane()};
  switch (call.op) {
    case Op::all_reduce:
      return run_fastest(all_reduce_rows, asked, c, bytes, note, out, n);
    case Op::all_gather:
      return run_fastest(all_gather_rows, asked, c, bytes, note, in, out, n);
    case Op::reduce_scatter:
      return run_fastest(reduce_scatter_rows, asked, c, bytes, note, in, out, n);
    case Op::broadcast:
      return ring_broadcast(c, out, n, call.peer);
    case Op::barrier:
      return dissemination_barrier(c);
    case Op::monitored_barrier:
      return monitored_barrier(c);
    case Op::message:
      return call.receives ? relay(c, {.from = call.peer, .store = out}, n)
                           : relay(c, {.to = call.peer, .mine = in}, n);
  }
}

/// Runs each call with the chosen algorithm of this folder.
class TransportEngine final : public QueuedEngine {
 public:
  TransportEngine(std::string_view name, std::unique_ptr<Transport> link, const std::vector<int>& names,
                  Algorithm all_reduce, std::string axis)
      : QueuedEngine(link->rank, link->size, names, name, std::move(axis)),
        link_(std::move(link)),
        all_reduce_(all_reduce) {
    check_all_reduce(all_reduce, *link_, name);
    link_->set_names(names);
    link_->may_spin = &calls().caller_waits();
  }
  ~TransportEngine() override { stop(); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return link_->allocate(bytes); }
  Algorithm all_reduce() const override { return all_reduce_; }
  std::string trouble() override {
    return calls().when_idle([this]() -> std::string {
      try {
        link_->check_peers();
        return {};
      } catch (const LinkError& error) {
        return error.what();
      }
    });
  }

 private:
  void run(const Call& call, const Envelope& envelope) override {
    link_->check();
    run_call(*link_, members, call, envelope, all_reduce_, [this](Algorithm algorithm) { note(algorithm); });
    link_->flush();
  }
  void give_up(const std::string& why) noexcept override { link_->abort(why); }
  void has_failed() noexcept override { link_->await_hands_off(); }

  const std::unique_ptr<Transport> link_;
  const Algorithm all_reduce_;
};

}  // namespace detail

/// A Communicator over shared memory, TCP or threads.
class TransportCommunicator : public AnyCommunicator {
 public:
  /// For the rank of `link`; `members`, `all_reduce`, `axis`: see World. Throws UsageError, on all ranks, for an
  /// all-reduce algorithm that is impossible there.
  explicit TransportCommunicator(std::string_view name, std::unique_ptr<Transport> link,
                                 const std::vector<int>& members = {}, Algorithm all_reduce = Algorithm::automatic,
                                 std::string axis = {})
      : AnyCommunicator(std::make_shared<detail::TransportEngine>(name, std::move(link), members, all_reduce,
                                                                  std::move(axis))) {}
};

static_assert(Communicator<TransportCommunicator>);

}  // namespace chorus::comm
