#pragma once
/// `NcclCalls`: one rank's place in a group of NCCL, and its calls.

#include <algorithm>
#include <atomic>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/nccl/nccl_abort.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::comm {

/// The basis of NcclQueue: a non-blocking communicator, its stream, the calls in flight, in order, and the first
/// failure. A call is between two events: one after the compute stream's work that it needs, and one after the call.
/// NCCL's and CUDA's codes become errors with rank and call. After the first error the communicator is aborted, and no
/// further calls of it are made. All functions but the constructor are called under the lock.
template <class Api>
class NcclCalls {
 protected:
  using Comm = typename Api::Comm;
  using Stream = typename Api::Stream;
  using Event = typename Api::Event;
  using RedOp = typename Api::RedOp;

  /// One call, or another event with a place in the streams' order.
  struct Call : NamedCall {
    std::uint64_t ticket = 0, number = 0;  // the latter is the recorder's
    Event ready{}, done{};                 // the earliest begin on the stream, and the end
    bool captured = false;
    bool runs = false;  // `ready` has been reached: the timeout counts from here
    Deadline deadline{};
  };

  NcclCalls(Api api, int rank, int device, std::chrono::milliseconds timeout, std::function<void(const Failure&)> tell,
            std::function<Failure()> hear, const std::vector<int>& members)
      : api_(std::move(api)),
        rank_(rank),
        device_(device),
        timeout_(timeout),
        recorder_(rank, "nccl", members),
        tell_(std::move(tell)),
        hear_(std::move(hear)) {
    check_timeout("nccl", timeout);
    check_cuda(api_.use_device(device_), "choosing device");
    check_cuda(api_.create_stream(stream_), "making a stream on device");
  }

  ~NcclCalls() = default;
  NcclCalls(const NcclCalls&) = delete;
  NcclCalls& operator=(const NcclCalls&) = delete;

  static Call named(const char* name) {
    Call call;
    call.name = name;
    return call;
  }

  std::string describe(const Call& call, std::string_view why) const {
    return cat("rank ", rank_, ": ", call.text(), ": nccl: ", why);
  }

  /// Aborts if this rank was asked to, or if another rank has aborted; `call`: this rank's present call, if any. Does
  /// nothing if this rank has left the group, when a Work may still be asked.
  void listen(const Call* call) {
    if (failure_ || comm_ == Comm{}) return;
    if (blocked_)
      return give_up(call ? describe(*call, blocked_text()) : cat("rank ", rank_, ": nccl: ", blocked_text()), true);
    if (asked_to_abort_) return give_up(cat("rank ", rank_, ": aborted: ", asked_to_abort_.why()), false);
    const Failure theirs = hear_();
    if (!theirs) return;
    const auto why = cat("gives up: ", theirs.what);
    give_up(call ? describe(*call, why) : cat("rank ", rank_, ": nccl: ", why), theirs.timed_out);
  }

  void raise_if_failed(const Call& call) {
    if (failure_)
      Failure{describe(call, cat("this communicator has failed before: ", failure_.what)), failure_.timed_out}.raise();
    listen(&call);
    if (failure_) failure_.raise();
  }

  /// NCCL's code of a call: inside a group, whose end reports whether it was launched; or of a single call, which must
  /// be launched before it returns.
  void accept_later(int code, const Call& call) {
    raise_if_failed(call);
    if (code != Api::success && code != Api::in_progress) refuse(code, call);
  }

  void accept(int code, const Call& call) {
    const auto deadline = Clock::now() + timeout_;
    for (int turn = 0; code == Api::in_progress; ++turn) {
      if (in_call_since_.load() != Clock::time_point{}) in_call_since_ = Clock::now();  // it polls and isn't blocked
      listen(&call);
      if (failure_) failure_.raise();
      if (const int asked = api_.async_error(comm_, code); asked != Api::success) code = asked;
      if (code == Api::in_progress && Clock::now() >= deadline) {
        give_up(describe(call, cat("not under way after ", timeout_.count(), " ms")), true);
        failure_.raise();
      }
      if (code == Api::in_progress) pause(turn);
    }
    if (code != Api::success) refuse(code, call);
  }

  [[noreturn]] void refuse(int code, const Call& call) {
    give_up(describe(call, api_.nccl_error(code, comm_)), false);
    failure_.raise();
  }

  void check_cuda(int code, const char* what) {
    check<CommError>(code == Api::success, "rank ", rank_, ": nccl: ", what, " ", device_, ": ", api_.cuda_error(code));
  }
  void check_cuda(const Call& call, int code) {
    if (code == Api::success) return;
    give_up(describe(call, api_.cuda_error(code)), false);
    failure_.raise();
  }

  void give_up(std::string why, bool timed_out) noexcept {
    if (blocked_ && !timed_out) why += cat("; ", blocked_text());
    failure_ = {std::move(why), timed_out || blocked_};
    // Otherwise this thread's calls of other communicators would wait for the group's end, too.
    if (std::exchange(grouping_, false)) api_.group_end();
    in_flight_.clear();
    captured_.clear();
    operators_.clear();
    change_.notify_all();
    tell_once(failure_);
    comm_ = Comm{};
    if (const Comm comm = living_.exchange(Comm{}); comm != Comm{}) abort_.begin(api_, comm);
    recorder_.dump();
  }
  void tell_once(const Failure& failure) {
    if (tell_ && !told_.exchange(true)) tell_(failure);
  }

  std::string blocked_text() const { return cat("the call did not return within ", timeout_.count(), " ms"); }
  /// For a thread without the lock: if the thread that holds it has been in one call for longer than the timeout, the
  /// device's queue is full of work that waits for a lost peer. An abort ends that work.
  void abort_blocked_call() noexcept {
    const Clock::time_point since = in_call_since_;
    if (since == Clock::time_point{} || Clock::now() < since + timeout_) return;
    if (living_.load() == Comm{}) return;
    blocked_ = true;  // before the abort, which lets the call return
    const Comm comm = living_.exchange(Comm{});
    if (comm == Comm{}) return;
    tell_once({cat("rank ", rank_, ": nccl: ", blocked_text()), true});
    abort_.begin(api_, comm);
  }

  Event event() {
    if (spare_.empty()) {
      Event made{};
      check_cuda(api_.create_event(made), "making an event on device");
      events_.push_back(made);
      return made;
    }
    const Event taken = spare_.back();
    spare_.pop_back();
    return taken;
  }
  void recycle(const Call& call) {
    spare_.push_back(call.ready);
    spare_.push_back(call.done);
  }

  /// The communication stream waits for the compute stream's present work.
  void open(Call& call) {
    raise_if_failed(call);
    check_cuda(call, api_.use_device(device_));
    const Stream compute = api_.compute_stream(device_);
    call.captured = api_.capturing(compute);
    if (!call.captured) {
      forget_captured();
      call.number = recorder_.begin(call);
    }
    call.ready = event();
    check_cuda(call, api_.record(call.ready, compute));
    check_cuda(call, api_.wait(stream_, call.ready));
  }

  /// The call has been launched on `stream`; returns its ticket. NCCL may launch from its own thread, so an event is
  /// recorded only after NCCL has accepted the call.
  std::uint64_t close(Call& call, Stream stream) {
    for (const RedOp& op : operators_) api_.destroy_operator(op, comm_);
    operators_.clear();
    call.done = event();
    check_cuda(call, api_.record(call.done, stream));
    call.ticket = ++issued_;
    if (!call.captured) recorder_.name(call.number, call);  // for a group, its last call is known now
    (call.captured ? captured_ : in_flight_).push_back(call);
    if (blocked_) raise_if_failed(call);
    busy_ = true;
    change_.notify_all();
    return call.ticket;
  }

  /// The compute stream waits for a call; the host does not.
  void wait_on_compute_stream(std::uint64_t ticket) {
    const auto found = [ticket](const Call& call) { return call.ticket == ticket; };
    const auto captured = std::find_if(captured_.begin(), captured_.end(), found);
    const auto flying = std::find_if(in_flight_.begin(), in_flight_.end(), found);
    if (captured == captured_.end() && flying == in_flight_.end()) {
      if (ticket > finished_ && failure_) failure_.raise();
      return;  // has ended, or belongs to the open group, which is waited for as a whole
    }
    Call call = captured != captured_.end() ? *captured : *flying;
    check_cuda(call, api_.use_device(device_));
    const Stream compute = api_.compute_stream(device_);
    if (captured != captured_.end() && !api_.capturing(compute)) return forget_captured();
    check_cuda(call, api_.wait(compute, call.done));
    if (captured == captured_.end()) return;
    recycle(call);
    captured_.erase(captured);
  }

  /// Forgets the calls of a failed capture: they never ran, and nothing waits for them.
  void forget_captured() {
    for (const Call& left : captured_) recycle(left);
    captured_.clear();
  }

  /// Whether a call has ended or never will.
  bool has_ended(std::uint64_t ticket) {
    if (captured_.empty()) inspect();  // a capturing thread must not query events
    return finished_ >= ticket || bool(failure_);
  }

  /// Finds calls that have ended, and errors of calls that have not.
  void inspect() {
    listen(in_flight_.empty() ? nullptr : &in_flight_.front());
    if (failure_ || in_flight_.empty()) return;
    Call first;
    int ended = Api::success;
    while (ended == Api::success && !in_flight_.empty()) {
      first = in_flight_.front();
      ended = api_.query(first.done);
      if (ended != Api::success) break;
      finished_ = first.ticket;
      recorder_.end(first.number);
      recycle(first);
      in_flight_.pop_front();
    }
    int state = Api::success;
    if (const int asked = api_.async_error(comm_, state); asked != Api::success) state = asked;
    if (state != Api::success && state != Api::in_progress)
      return give_up(describe(first, api_.nccl_error(state, comm_)), false);
    if (in_flight_.empty()) return;
    if (ended != Api::not_ready) return give_up(describe(first, api_.cuda_error(ended)), false);

    Call& waits = in_flight_.front();
    if (!waits.runs && api_.query(waits.ready) == Api::success) {
      waits.runs = true;
      waits.deadline = Clock::now() + timeout_;
    }
    if (waits.runs && Clock::now() >= waits.deadline)
      give_up(describe(waits, cat("not every rank has joined in and finished within ", timeout_.count(), " ms")), true);
  }

  void destroy_streams() noexcept {
    for (const auto& made : events_) api_.destroy_event(made);
    api_.destroy_stream(stream_);
  }

  static void pause(int turn) {
    if (turn < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  Api api_;
  const int rank_, device_;
  const std::chrono::milliseconds timeout_;
  std::recursive_mutex mutex_;
  Comm comm_{};
  std::atomic<Comm> living_{};  // the same until it is aborted or destroyed: for a thread without the lock
  std::atomic<bool> blocked_{false}, told_{false};
  std::atomic<Clock::time_point> in_call_since_{};  // since when the lock's owner is in a call that may block
  std::atomic<bool> busy_{false};                   // something is in flight
  Stream stream_{};
  Failure failure_;
  NcclAbort<Api> abort_;
  AbortReason asked_to_abort_;          // from any thread, without the lock
  FlightRecorder recorder_;             // calls from launch until their end is seen
  bool grouping_ = false;               // between NCCL's group_start and group_end
  std::condition_variable_any change_;  // whether something is in flight has changed
  std::deque<Call> in_flight_;
  std::vector<RedOp> operators_;  // of the call being made
  std::uint64_t issued_ = 0;

 private:
  const std::function<void(const Failure&)> tell_;
  const std::function<Failure()> hear_;
  std::vector<Event> events_, spare_;
  std::deque<Call> captured_;  // until they are waited for in the same capture
  std::uint64_t finished_ = 0;
};

}  // namespace chorus::comm
