#pragma once
/// `RingCommunicator`: the collectives of `ring.hpp` over a Transport, with checks, order, and errors that stay.

#include <chorus/comm/ring_call.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// A Communicator over shared memory, TCP or threads; made by `connect` or `thread_group`. Blocking calls run in the
/// caller's thread, asynchronous ones in one thread of the communicator. Call it from one thread at a time, so that all
/// ranks see one order. Wrong sizes, roots and peers throw UsageError before anything moves; failures of the group
/// throw CommError, which names this rank, the call, the peer and why.
class RingCommunicator {
 public:
  /// The rank that `link` stands for; without a link, a group of one, in which nothing moves.
  explicit RingCommunicator(std::unique_ptr<Transport> link = nullptr)
      : rank_(link ? link->rank : 0),
        size_(link ? link->size : 1),
        runner_(std::move(link)),
        calls_(std::make_shared<InOrder<RingCall>>(&run, &runner_)) {}
  RingCommunicator(const RingCommunicator&) = delete;
  RingCommunicator& operator=(const RingCommunicator&) = delete;
  /// Finishes what was called, and leaves the group.
  ~RingCommunicator() { calls_->stop(); }

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// data := the reduction of every rank's scale * data.
  template <Scalar T, std::size_t E>
  void all_reduce(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    calls_->now(reduces<T>(Op::all_reduce, data, data, data.size(), op, options));
  }
  template <Scalar T, std::size_t E>
  Work all_reduce_async(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    return later(reduces<T>(Op::all_reduce, data, data, data.size(), op, options));
  }

  /// data := root's data.
  template <Scalar T, std::size_t E>
  void broadcast(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    calls_->now(moves<T>(Op::broadcast, data, data, data.size(), root, options));
  }
  template <Scalar T, std::size_t E>
  Work broadcast_async(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    return later(moves<T>(Op::broadcast, data, data, data.size(), root, options));
  }

  /// all := every rank's `mine`, in the order of ranks; all.size() is size() * mine.size(). `mine` may be its own
  /// place.
  template <Scalar T, std::size_t E>
  void all_gather(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all, CollectiveOptions options = {}) {
    check_parts("all_gather", all.size(), mine.size());
    calls_->now(moves<T>(Op::all_gather, mine, all, mine.size(), rank_, options));
  }
  template <Scalar T, std::size_t E>
  Work all_gather_async(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all,
                        CollectiveOptions options = {}) {
    check_parts("all_gather", all.size(), mine.size());
    return later(moves<T>(Op::all_gather, mine, all, mine.size(), rank_, options));
  }

  /// mine := this rank's part of the reduction of every rank's scale * all; all.size() is size() * mine.size().
  template <Scalar T, std::size_t E>
  void reduce_scatter(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine, ReduceOp op = ReduceOp::sum,
                      CollectiveOptions options = {}) {
    check_parts("reduce_scatter", all.size(), mine.size());
    calls_->now(reduces<T>(Op::reduce_scatter, all, mine, mine.size(), op, options));
  }
  template <Scalar T, std::size_t E>
  Work reduce_scatter_async(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine,
                            ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    check_parts("reduce_scatter", all.size(), mine.size());
    return later(reduces<T>(Op::reduce_scatter, all, mine, mine.size(), op, options));
  }

  /// Messages between two ranks arrive in the order in which they were sent. `send` returns when `data` may be reused:
  /// before the peer has received it, if the link's queue has room. Two ranks that send each other much at once, and
  /// only then receive, wait for each other until the timeout.
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>>
  void send(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    calls_->now(message<std::remove_const_t<T>>(data, {}, false, peer, options));
  }
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>> Work send_async(std::span<T, E> data, int peer,
                                                          CollectiveOptions options = {}) {
    return later(message<std::remove_const_t<T>>(data, {}, false, peer, options));
  }
  template <Scalar T, std::size_t E>
  void recv(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    calls_->now(message<T>({}, data, true, peer, options));
  }
  template <Scalar T, std::size_t E>
  Work recv_async(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    return later(message<T>({}, data, true, peer, options));
  }

  /// Returns when every rank has called it.
  void barrier() { calls_->now(RingCall{}); }
  Work barrier_async() { return later(RingCall{}); }

 private:
  static Failure run(void* runner, const RingCall& call, const std::atomic<bool>& caller_waits) {
    return static_cast<RingRunner*>(runner)->run(call, caller_waits);
  }

  Work later(const RingCall& call) { return {calls_, calls_->later(call)}; }

  template <class T>
  RingCall reduces(Op op, std::span<const T> in, std::span<T> out, std::size_t count, ReduceOp how,
                   const CollectiveOptions& options) const {
    return {op, reduction<T>(how, options.scale), options.traffic, count, in.data(), out.data()};
  }

  template <class T>
  RingCall moves(Op op, std::span<const T> in, std::span<T> out, std::size_t count, int peer,
                 const CollectiveOptions& options) const {
    check<UsageError>(options.scale == 1, name(op), ": scale ", options.scale, " needs an operation that reduces");
    check<UsageError>(peer >= 0 && peer < size_, name(op), ": rank ", peer, " is not in [0, ", size_, ")");
    return {op, reduction<T>(ReduceOp::sum, 1), options.traffic, count, in.data(), out.data(), peer};
  }

  template <class T>
  RingCall message(std::span<const T> in, std::span<T> out, bool receives, int peer,
                   const CollectiveOptions& options) const {
    check<UsageError>(peer != rank_, receives ? "recv" : "send", ": rank ", peer, " is this rank itself");
    auto call = moves<T>(Op::message, in, out, in.size() + out.size(), peer, options);
    call.receives = receives;
    return call;
  }

  void check_parts(std::string_view what, std::size_t all, std::size_t mine) const {
    check<UsageError>(all == mine * static_cast<std::size_t>(size_), what, ": all has ", all, " numbers, expected ",
                      size_, " ranks x ", mine);
  }

  int rank_, size_;
  RingRunner runner_;
  std::shared_ptr<InOrder<RingCall>> calls_;
};

static_assert(Communicator<RingCommunicator>);

}  // namespace chorus::inline CHORUS_ABI::comm
