#pragma once
/// `NcclMember`: one rank's place in a group of NCCL's.

#include <chorus/comm/engine/abort_reason.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/engine/in_order.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::comm {

/// A non-blocking communicator, its stream and events, and how it first failed: what NcclQueue is made of. NCCL's and
/// CUDA's codes become errors here that name rank and call; after the first the communicator is aborted, and no other
/// call of it is made. But for the constructor, all is called under the lock.
template <class Api>
class NcclMember {
 protected:
  using Comm = typename Api::Comm;
  using Stream = typename Api::Stream;
  using Event = typename Api::Event;

  /// One call, or what else takes a place in the streams' order.
  struct Call : NamedCall {
    std::uint64_t ticket = 0, number = 0;  // the latter is the recorder's
    Event ready{}, done{};                 // where the stream may begin it, and where it has ended
    bool captured = false;
    bool runs = false;  // `ready` has been reached: from then on the others are waited for
    Deadline deadline{};
  };

  NcclMember(Api api, int rank, int device, std::chrono::milliseconds timeout, std::function<void(const Failure&)> tell,
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

  virtual ~NcclMember() = default;
  NcclMember(const NcclMember&) = delete;
  NcclMember& operator=(const NcclMember&) = delete;

  /// This rank gives up: what is known of its calls is worth nothing any more.
  virtual void forget_calls() noexcept = 0;

  static Call named(const char* name) {
    Call call;
    call.name = name;
    return call;
  }

  std::string describe(const Call& call, std::string_view why) const {
    return cat("rank ", rank_, ": ", call.text(), ": nccl: ", why);
  }

  /// Gives up if this rank has been asked to, or another one has; `call`: what this one is in, if anything. Of a group
  /// that this rank has left, where a Work may still be asked, it asks nobody.
  void listen(const Call* call) {
    if (failure_ || comm_ == Comm{}) return;
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

  /// What NCCL says of a call: of one inside of a group, whose end tells whether it is under way; and of one by itself,
  /// which has to be before it returns.
  void accept_later(int code, const Call& call) {
    raise_if_failed(call);
    if (code != Api::success && code != Api::in_progress) refuse(code, call);
  }

  void accept(int code, const Call& call) {
    const auto deadline = Clock::now() + timeout_;
    for (int turn = 0; code == Api::in_progress; ++turn) {
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
    failure_ = {std::move(why), timed_out};
    // This thread's calls of other communicators would wait for the group's end, too.
    if (std::exchange(grouping_, false)) api_.group_end();
    if (comm_ != Comm{}) api_.abort(std::exchange(comm_, Comm{}));
    forget_calls();
    if (tell_) tell_(failure_);
    recorder_.dump();
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
  Stream stream_{};
  Failure failure_;
  AbortReason asked_to_abort_;  // from any thread, without the lock
  FlightRecorder recorder_;     // calls from when they are issued until they are seen to have ended
  bool grouping_ = false;       // between NCCL's group_start and group_end

 private:
  const std::function<void(const Failure&)> tell_;
  const std::function<Failure()> hear_;
  std::vector<Event> events_, spare_;
};

}  // namespace chorus::comm
