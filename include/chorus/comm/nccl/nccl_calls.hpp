#pragma once
/// `NcclCalls`: what one rank has asked of NCCL, from where a call is opened until the device has ended it.

#include <algorithm>
#include <chorus/comm/nccl/nccl_member.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <vector>

namespace chorus::comm {

/// Calls in flight on the communication stream, in their order, between two events each: one after the compute
/// stream's work that a call needs, and one after the call. All is called under the lock.
template <class Api>
class NcclCalls : public NcclMember<Api> {
 protected:
  using Member = NcclMember<Api>;
  using Call = typename Member::Call;
  using Stream = typename Member::Stream;
  using RedOp = typename Api::RedOp;
  using Member::api_, Member::comm_, Member::device_, Member::failure_, Member::stream_, Member::timeout_;
  using Member::check_cuda, Member::describe, Member::event, Member::give_up, Member::listen;
  using Member::Member;
  using Member::raise_if_failed, Member::recorder_, Member::recycle;

  /// The communication stream waits for what the compute stream has to do so far.
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

  /// The call is under way on `stream`; returns its ticket. NCCL may launch from a thread of its own: only once it has
  /// accepted the call is an event recorded after it.
  std::uint64_t close(Call& call, Stream stream) {
    for (const RedOp& op : operators_) api_.destroy_operator(op, comm_);
    operators_.clear();
    call.done = event();
    check_cuda(call, api_.record(call.done, stream));
    call.ticket = ++issued_;
    if (!call.captured) recorder_.name(call.number, call);  // of a group, its last call is known by now
    (call.captured ? captured_ : in_flight_).push_back(call);
    change_.notify_all();
    return call.ticket;
  }

  /// Has the compute stream wait for a call; the host does not.
  void let_compute_wait(std::uint64_t ticket) {
    const auto found = [ticket](const Call& call) { return call.ticket == ticket; };
    const auto captured = std::find_if(captured_.begin(), captured_.end(), found);
    const auto flying = std::find_if(in_flight_.begin(), in_flight_.end(), found);
    if (captured == captured_.end() && flying == in_flight_.end()) {
      if (ticket > finished_ && failure_) failure_.raise();
      return;  // has ended, or belongs to the group that is being made, which is waited for as a whole
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

  /// What a capture that came to nothing has left: it never ran, and is not waited for.
  void forget_captured() {
    for (const Call& left : captured_) recycle(left);
    captured_.clear();
  }

  /// Whether a call has ended, or never will.
  bool has_ended(std::uint64_t ticket) {
    if (captured_.empty()) inspect();  // a capturing thread may not ask
    return finished_ >= ticket || bool(failure_);
  }

  /// Finds out what has ended, and whether what has not is in trouble.
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

  void forget_calls() noexcept override {
    in_flight_.clear();
    captured_.clear();
    operators_.clear();
    change_.notify_all();
  }

  std::condition_variable_any change_;  // something is in flight, or nothing any more
  std::deque<Call> in_flight_;
  std::vector<RedOp> operators_;  // of the call that is being made
  std::uint64_t issued_ = 0;

 private:
  std::deque<Call> captured_;  // until they are waited for, in the same capture
  std::uint64_t finished_ = 0;
};

}  // namespace chorus::comm
