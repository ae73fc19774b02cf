#pragma once
/// `AnyCommunicator`: a communicator whose engine is chosen at run time.

#include <chorus/comm/engine/engine.hpp>
#include <memory>
#include <type_traits>

namespace chorus::comm {

/// A Communicator over any Engine, made by `connect` and `thread_group`. Call it from one thread at a time, so that all
/// ranks see one order; only `abort` may be called from any thread. Wrong sizes, roots and peers throw UsageError
/// before data moves. Failures of the group throw CommError, which names this rank, the call, the peer and the reason.
class AnyCommunicator {
 public:
  /// A group of one.
  AnyCommunicator() : AnyCommunicator(alone()) {}
  explicit AnyCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  /// A moved-from communicator can only be assigned to or destroyed.
  AnyCommunicator(AnyCommunicator&&) noexcept = default;
  AnyCommunicator& operator=(AnyCommunicator&&) noexcept = default;

  int rank() const { return engine_->rank; }
  int size() const { return engine_->size; }
  /// The carrier of bytes: `shm`, `tcp`, `mpi`, ...
  std::string_view backend() const { return engine_->name(); }
  /// Runs `start`, which launches a captured step with calls of this communicator, and watches it as one call. `what`,
  /// for messages, must outlive the call.
  void launch(const char* what, const std::function<void()>& start) { engine_->launch(what, start); }
  /// Memory for data that many calls of this communicator use: ranks read and write each other's data in it directly,
  /// without copies. Any rank may allocate at any time. Zeroed, aligned to 4096 bytes; null if other memory is as good.
  /// It may outlive the communicator.
  std::shared_ptr<std::byte> allocate(std::size_t bytes) { return engine_->allocate(bytes); }
  /// The total time of this rank's calls, on any thread; negative for engines that do not know it, such as NCCL.
  std::chrono::nanoseconds busy() const { return engine_->busy(); }
  /// This rank's clock: the virtual time of an engine that has one.
  Clock::time_point time() const { return engine_->time(); }
  bool takes_device_memory() const { return engine_->takes_device_memory(); }

  /// data := the reduction of every rank's scale * data.
  template <Scalar T, std::size_t E>
  void all_reduce(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    engine_->now(reduces<T>(Op::all_reduce, data.data(), data.data(), data.size(), op, options));
  }
  template <Scalar T, std::size_t E>
  Work all_reduce_async(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    return engine_->later(reduces<T>(Op::all_reduce, data.data(), data.data(), data.size(), op, options));
  }

  /// data := root's data.
  template <Scalar T, std::size_t E>
  void broadcast(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    engine_->now(moves<T>(Op::broadcast, data.data(), data.data(), data.size(), root, options));
  }
  template <Scalar T, std::size_t E>
  Work broadcast_async(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    return engine_->later(moves<T>(Op::broadcast, data.data(), data.data(), data.size(), root, options));
  }

  /// all := every rank's `mine`, in rank order; all.size() is size() * mine.size(). `mine` may be its own place in
  /// `all`.
  template <Scalar T, std::size_t E>
  void all_gather(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all, CollectiveOptions options = {}) {
    engine_->now(gathers<T>(mine, all, options));
  }
  template <Scalar T, std::size_t E>
  Work all_gather_async(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all,
                        CollectiveOptions options = {}) {
    return engine_->later(gathers<T>(mine, all, options));
  }

  /// mine := this rank's chunk of the reduction of every rank's scale * all; all.size() is size() * mine.size().
  template <Scalar T, std::size_t E>
  void reduce_scatter(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine, ReduceOp op = ReduceOp::sum,
                      CollectiveOptions options = {}) {
    engine_->now(scatters<T>(all, mine, op, options));
  }
  template <Scalar T, std::size_t E>
  Work reduce_scatter_async(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine,
                            ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    return engine_->later(scatters<T>(all, mine, op, options));
  }

  /// Messages between two ranks arrive in the order of sending. `send` returns when `data` may be reused; if the link's
  /// queue has room, the peer may not have received it yet. Two ranks that both send much data before they receive
  /// deadlock until the timeout.
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>>
  void send(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    engine_->now(sends<std::remove_const_t<T>>(data, peer, options));
  }
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>> Work send_async(std::span<T, E> data, int peer,
                                                          CollectiveOptions options = {}) {
    return engine_->later(sends<std::remove_const_t<T>>(data, peer, options));
  }
  template <Scalar T, std::size_t E>
  void recv(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    engine_->now(receives<T>(data, peer, options));
  }
  template <Scalar T, std::size_t E>
  Work recv_async(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    return engine_->later(receives<T>(data, peer, options));
  }

  /// Returns when every rank has called it.
  void barrier() { engine_->now(Call{}); }
  Work barrier_async() { return engine_->later(Call{}); }

  /// A barrier that names missing ranks: at the deadline rank 0 lists them in an error that every rank throws. Slower
  /// than `barrier`. Over MPI and gloo it is a plain barrier without names.
  void monitored_barrier() {
    Call call;
    call.op = Op::monitored_barrier;
    engine_->now(call);
  }

  /// The newest 64 calls of this rank, one per line: number, call, algorithm (`by ring`) if there are several, begin,
  /// and duration, or whether it is under way or failed. If CHORUS_FLIGHT_RECORDER is set, the first failure writes
  /// them to stderr (`stderr`) or to the file $CHORUS_FLIGHT_RECORDER.rankN. NCCL's calls follow those of host memory,
  /// and are written to $CHORUS_FLIGHT_RECORDER.nccl.rankN; they begin when the host makes them, and end when it sees
  /// their end. When a rank dies, the launcher gives the others half a second to write theirs.
  std::string flight_record() const { return engine_->record(); }

  /// Aborts the group: waiting calls, later calls, and the other ranks' calls throw CommError with `why`.
  void abort(std::string_view why) noexcept { engine_->abort(why); }

  Engine& engine() const { return *engine_; }
  /// For a thread that aborts the group, if it is still there.
  std::weak_ptr<Engine> handle() const { return engine_; }

 private:
  template <class T>
  static Call reduces(Op op, const T* in, T* out, std::size_t count, ReduceOp how, const CollectiveOptions& options) {
    Call call{op, reduction<T>(how, options.scale), options.traffic, count, in, out};
    call.bucket = options.bucket;
    return call;
  }

  template <class T>
  Call moves(Op op, const T* in, T* out, std::size_t count, int peer, const CollectiveOptions& options) const {
    check_move(op, peer, options);
    Call call{op, {.dtype = dtype<T>, .element = sizeof(T)}, options.traffic, count, in, out, peer};
    call.unit = options.unit;
    call.part_of = options.part_of;
    return call;
  }

  template <class T>
  Call gathers(std::span<const T> mine, std::span<T> all, const CollectiveOptions& options) const {
    check_chunk("all_gather", all.size(), mine.size());
    return moves<T>(Op::all_gather, mine.data(), all.data(), mine.size(), rank(), options);
  }

  template <class T>
  Call scatters(std::span<const T> all, std::span<T> mine, ReduceOp op, const CollectiveOptions& options) const {
    check_chunk("reduce_scatter", all.size(), mine.size());
    return reduces<T>(Op::reduce_scatter, all.data(), mine.data(), mine.size(), op, options);
  }

  template <class T>
  Call sends(std::span<const T> data, int peer, const CollectiveOptions& options) const {
    check_peer("send", peer);
    return moves<T>(Op::message, data.data(), nullptr, data.size(), peer, options);
  }
  template <class T>
  Call receives(std::span<T> data, int peer, const CollectiveOptions& options) const {
    check_peer("recv", peer);
    auto call = moves<T>(Op::message, nullptr, data.data(), data.size(), peer, options);
    call.receives = true;
    return call;
  }

  void check_move(Op op, int peer, const CollectiveOptions& options) const {
    check<UsageError>(options.scale == 1, name(op), ": scale ", options.scale, " needs a reducing operation");
    check<UsageError>(peer >= 0 && peer < size(), name(op), ": rank ", peer, " is not in [0, ", size(), ")");
  }
  void check_peer(std::string_view what, int peer) const {
    check<UsageError>(peer != rank(), what, ": rank ", peer, " is this rank, expected another rank");
  }
  void check_chunk(std::string_view what, std::size_t all, std::size_t mine) const {
    check<UsageError>(all == mine * static_cast<std::size_t>(size()), what, ": all has ", all, " numbers, expected ",
                      size(), " ranks x ", mine);
  }

  std::shared_ptr<Engine> engine_;
};

static_assert(Communicator<AnyCommunicator>);

}  // namespace chorus::comm
