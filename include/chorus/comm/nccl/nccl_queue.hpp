#pragma once
/// `NcclQueue`: makes one rank's NCCL calls, and watches them in a thread.

#include <atomic>
#include <chorus/comm/nccl/nccl_calls.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/say.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace chorus::comm {

/// Events order collectives after the compute stream's work, and the compute stream after them when it waits for a
/// Work; the host continues. A thread checks the calls in flight every few milliseconds. If NCCL or CUDA report an
/// error, or the other ranks do not arrive within `timeout`, it aborts the communicator: the device's kernels end, and
/// a thread that waits for the device continues and gets the failure at its next call.
///
/// All NCCL calls are made under one lock. The communicator is non-blocking, but a call blocks while the device's queue
/// is full; if that outlasts `timeout`, the thread aborts the communicator without the lock. A stream capture is not
/// watched, since captured events cannot be queried; `launch` watches a graph's replay.
template <class Api>
class NcclQueue final : public Progress, private NcclCalls<Api> {
 public:
  /// `tell` is called once, with the reason, when this rank aborts; from any thread. `hear` returns another rank's
  /// failure, if known, and then this rank aborts, too; it is called at each call and every few milliseconds.
  /// `members`: see World.
  NcclQueue(Api api, int rank, int device, std::chrono::milliseconds timeout, std::function<void(const Failure&)> tell,
            std::function<Failure()> hear, const std::vector<int>& members = {})
      : Calls(std::move(api), rank, device, timeout, std::move(tell), std::move(hear), members) {}
  ~NcclQueue() override { stop(); }

  /// Meets the other ranks; all of them call it. Throws CommError.
  void join(int size, const typename Api::UniqueId& id) {
    const std::lock_guard lock(mutex_);
    check_cuda(api_.use_device(device_), "choosing device");
    const int code = api_.init(comm_, size, id, rank_);
    living_ = comm_;
    accept(code, named("meeting the other ranks"));
    watcher_ = chorus::detail::start_thread("nccl", [this] { watch(); });
  }

  /// Launches one call on the stream: `issue(api, comm, stream, operators)` returns NCCL's code, and adds to
  /// `operators` those to be destroyed after the launch. Returns the call's ticket.
  template <class Issue>
  std::uint64_t enqueue(const NamedCall& what, const Issue& issue) {
    const CallLock lock(*this);
    Call call{what};
    call.envelope.sequence = calls_++;
    if (grouping_) {
      static_cast<NamedCall&>(group_) = call;
      group_.grouped = true;
      accept_later(issue(api_, comm_, stream_, operators_), call);
      return issued_ + 1;
    }
    open(call);
    accept(issue(api_, comm_, stream_, operators_), call);
    return close(call, stream_);
  }

  /// Launches the calls of `calls` together; they run concurrently. Returns their ticket.
  template <class Made>
  std::uint64_t group(const Made& calls) {
    const CallLock lock(*this);
    check<UsageError>(!grouping_, "nccl: a group of calls inside another group");
    group_ = {};
    group_.grouped = true;
    return launch_together(group_, [&] {
      try {
        calls();
      } catch (...) {
        if (!failure_) give_up(describe(group_, "the calls of a group could not all be made"), false);
        throw;
      }
    });
  }

  /// Launches `count` calls of a kind together: `issue(api, i, comm, stream)` makes number i and returns NCCL's code.
  /// Returns their ticket.
  template <class Issue>
  std::uint64_t together(const char* name, std::size_t count, const Issue& issue) {
    const CallLock lock(*this);
    Call call = named(name);
    call.grouped = true;
    call.envelope.sequence = calls_++;
    return launch_together(call, [&] {
      for (std::size_t i = 0; i < count; ++i) accept_later(issue(api_, i, comm_, stream_), call);
    });
  }

  /// Runs `start`, which adds work with calls of this communicator to the compute stream, and watches it.
  template <class Start>
  void launch(const char* name, const Start& start) {
    const CallLock lock(*this);
    Call call = named(name);
    raise_if_failed(call);
    check_cuda(call, api_.use_device(device_));
    const Stream compute = api_.compute_stream(device_);
    call.number = recorder_.begin(call);
    call.ready = event();
    check_cuda(call, api_.record(call.ready, compute));
    start();
    close(call, compute);
  }

  /// Makes the compute stream wait for a call; the host does not wait.
  void wait(std::uint64_t ticket) override {
    const CallLock lock(*this);
    this->wait_on_compute_stream(ticket);
  }

  bool done(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    return this->has_ended(ticket);
  }

  /// Returns when all calls so far have ended on the device; throws the failure of one of them. Waits for at most
  /// `timeout` per call. Not allowed inside a capture.
  void synchronize() {
    for (int turn = 0;; ++turn) {
      {
        const std::lock_guard lock(mutex_);
        inspect();
        if (failure_) failure_.raise();
        if (in_flight_.empty()) return;
      }
      pause(turn);
    }
  }

  /// Aborts for a reason of the caller. A thread that waits in an NCCL call gets that reason.
  void abort(std::string_view why) noexcept {
    asked_to_abort_.set(why);
    const std::lock_guard lock(mutex_);
    listen(nullptr);
  }

  /// Ends the watching thread and leaves the group: in order if all is well; with an abort if a call has failed or
  /// during an exception, since the other ranks may not arrive then. Destroy graphs that were captured with the
  /// communicator before: it waits for them, with a limit.
  void stop() noexcept {
    {
      const std::lock_guard lock(waiting_);
      if (stopping_.exchange(true)) return;
      change_.notify_all();
    }
    if (watcher_.joinable()) watcher_.join();
    try {
      if (comm_ != Comm{} && std::uncaught_exceptions() > exceptions_)
        abort("its owner was destroyed by an exception");
      else if (comm_ != Comm{})
        leave();
    } catch (...) {
      // The communicator was aborted, and threads that wait for a call have the reason.
    }
    NcclAbort<Api> abort;
    {
      const std::lock_guard lock(mutex_);
      abort = std::move(abort_);
    }
    if (!abort.finish(timeout_))  // streams stay: the abort may still use them
      return chorus::detail::say(cat("rank ", rank_, ": nccl: a communicator is left behind: after ", timeout_.count(),
                                     " ms a graph that was captured with it still lives"));
    const std::lock_guard lock(mutex_);
    destroy_streams();
  }

  int device() const { return device_; }
  /// The newest calls, one per line; a captured step is one call, its launch.
  std::string record() {
    const std::lock_guard lock(mutex_);
    return recorder_.lines();
  }

 private:
  using Calls = NcclCalls<Api>;
  using Call = typename Calls::Call;
  using Stream = typename Calls::Stream;
  using Comm = typename Calls::Comm;
  using Calls::abort_, Calls::api_, Calls::comm_, Calls::device_, Calls::failure_, Calls::grouping_, Calls::mutex_,
      Calls::rank_, Calls::timeout_;
  using Calls::accept, Calls::accept_later, Calls::asked_to_abort_, Calls::check_cuda, Calls::describe,
      Calls::destroy_streams;
  using Calls::busy_, Calls::change_, Calls::in_call_since_, Calls::in_flight_, Calls::issued_, Calls::living_,
      Calls::operators_, Calls::stream_;
  using Calls::close, Calls::event, Calls::give_up, Calls::inspect, Calls::listen, Calls::named, Calls::open,
      Calls::pause;
  using Calls::raise_if_failed, Calls::recorder_;

  // Between group_start and group_end an abort ends the group.
  template <class Made>
  std::uint64_t launch_together(Call& call, const Made& calls) {
    open(call);
    raise_if_failed(call);
    if (const int code = api_.group_start(); code != Api::success && code != Api::in_progress) this->refuse(code, call);
    grouping_ = true;
    calls();
    grouping_ = false;
    accept(api_.group_end(), call);
    return close(call, stream_);
  }

  void leave() {
    synchronize();
    const std::lock_guard lock(mutex_);
    const Call call = named("leaving the group");
    accept(api_.finalize(comm_), call);
    comm_ = Comm{};
    if (const Comm comm = living_.exchange(Comm{}); comm != Comm{}) api_.destroy(comm);
  }

  /// The lock, for calls of NCCL or CUDA: they block while the device's queue is full. `watch` sees since when.
  class CallLock {
   public:
    explicit CallLock(NcclQueue& queue)
        : lock_(queue.mutex_), since_(queue.in_call_since_), outermost_(since_.load() == Clock::time_point{}) {
      if (outermost_) since_ = Clock::now();
    }
    CallLock(const CallLock&) = delete;
    CallLock& operator=(const CallLock&) = delete;
    ~CallLock() {
      if (outermost_) since_ = Clock::time_point{};
    }

   private:
    const std::lock_guard<std::recursive_mutex> lock_;
    std::atomic<Clock::time_point>& since_;
    const bool outermost_;
  };

  // It never waits for the lock, which a blocked call may hold.
  void watch() {
    api_.use_device(device_);
    std::unique_lock waiting(waiting_);
    while (!stopping_) {
      bool idle = false;
      if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
        inspect();
        busy_ = !in_flight_.empty();
        idle = !busy_;
      } else {
        this->abort_blocked_call();
      }
      change_.wait_for(waiting, idle ? idle_period : period, [&] { return stopping_ || (idle && busy_); });
    }
  }

  static constexpr std::chrono::milliseconds period{5}, idle_period{1000};

  const int exceptions_ = std::uncaught_exceptions();
  Call group_;
  std::mutex waiting_;  // the watching thread's
  std::atomic<bool> stopping_{false};
  std::uint32_t calls_ = 0;
  std::thread watcher_;
};

}  // namespace chorus::comm
