#pragma once
/// Gloo as an engine: `GlooCommunicator`, or Backend::gloo of a program that includes this header. Link chorus::gloo.
///
/// Ranks meet like those of chorus' own engines; gloo's connections use the address of that meeting. Over the meeting's
/// group they compare their calls before any data moves. Without the comparison (CHORUS_COMPARE_CALLS=0), ranks that
/// call different collectives get a timeout at best. Deadlines are gloo's own: each of its waits lasts at most the
/// timeout. Differences from chorus' own engines: abort tells the other ranks at once, but a call of this rank that
/// waits inside gloo ends only at its deadline; reduce-scatter is an all-reduce of a copy, as gloo has no suitable one;
/// `trace` counts a ring's bytes.

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <chorus/comm/connect.hpp>
#include <chorus/comm/engine/compare_calls.hpp>
#include <chorus/comm/engine/queued_engine.hpp>
#include <chorus/comm/engine/ring_traffic.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/core/held_signal.hpp>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

namespace chorus::comm {

namespace detail {

/// Gloo's key-value store. All ranks set keys in the same order, each its own, so that a `set` is an all-gather.
class GatheredStore final : public gloo::rendezvous::Store {
 public:
  explicit GatheredStore(AnyCommunicator& control) : control_(control) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const auto keys = all_gather_object(control_, key);
    const auto values = all_gather_object(control_, std::string_view(data.data(), data.size()));
    for (std::size_t rank = 0; rank < keys.size(); ++rank)
      values_[keys[rank]].assign(values[rank].begin(), values[rank].end());
  }
  std::vector<char> get(const std::string& key) override {
    const auto found = values_.find(key);
    check<CommError>(found != values_.end(), "gloo: no rank has set '", key, "'");
    return found->second;
  }
  void wait(const std::vector<std::string>&) override {}
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {}

 private:
  AnyCommunicator& control_;
  std::map<std::string, std::vector<char>> values_;
};

class GlooEngine final : public QueuedEngine {
 public:
  explicit GlooEngine(const World& world)
      : QueuedEngine(world.rank, world.size, world.members, "gloo"), timeout_(world.timeout), control_(connect(world)) {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = own_address(world).host();
    const chorus::detail::HeldSignal block(SIGPIPE);  // for the device's thread too
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<gloo::rendezvous::Context>(world.rank, world.size);
    context->setTimeout(timeout_);
    GatheredStore store(control_);
    try {
      context->connectFullMesh(store, device);
    } catch (const std::exception& error) {
      control_.abort(error.what());
      fail<CommError>("rank ", world.rank, ": gloo: ", error.what());
    }
    context_ = std::move(context);
  }

  ~GlooEngine() override { stop(); }

  // For compare_calls. Gloo moves a message only when its receiver is ready.
  static constexpr bool sends_wait = true;
  Envelope exchange(int to, const Envelope& envelope, int from) {
    control_.send(std::span(reinterpret_cast<const std::uint8_t*>(&envelope), sizeof envelope), to);
    Envelope theirs;
    control_.recv(std::span(reinterpret_cast<std::uint8_t*>(&theirs), sizeof theirs), from);
    return theirs;
  }

 private:
  void run(const Call& call, const Envelope& envelope) override {
    const chorus::detail::HeldSignal block(SIGPIPE);
    try {
      if (compares_) compare_calls(*this, call, envelope, rank, size);
      start(call);
    } catch (const std::exception& error) {
      const bool ours = dynamic_cast<const CommError*>(&error) != nullptr;
      const auto why = reason(cat(ours ? "" : "gloo: ", error.what()));
      const bool late = !ours && std::string_view(error.what()).find("imed out") != std::string_view::npos;
      if (late || dynamic_cast<const TimeoutError*>(&error)) fail<TimeoutError>(why);
      fail<CommError>(why);
    }
    count_ring_traffic(call, rank, size, members);
    if (call.op == Op::reduce_scatter)  // an all-reduce of all numbers
      count_ring_traffic(call, rank, size, members);
  }

  /// Gloo's other ranks see broken connections.
  void give_up(const std::string& why) noexcept override {
    control_.abort(why);
    const chorus::detail::HeldSignal block(SIGPIPE);
    try {
      context_->closeConnections();
    } catch (...) {
      // The other ranks then notice at their deadlines.
    }
  }

  /// Gloo learns of a rank's failure from a broken connection; the control communicator knows the reason.
  std::string reason(std::string_view why) {
    for (int i = 0; i < 10; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
      if (const auto trouble = control_.engine().trouble(); !trouble.empty()) return cat(why, "; ", trouble);
    return std::string(why);
  }

  /// Calls `f` with an integer of the element's size, which is all that gloo's templates need.
  template <class F>
  static void with_size(std::size_t element, F f) {
    element == 1   ? f(std::uint8_t{})
    : element == 2 ? f(std::uint16_t{})
    : element == 4 ? f(std::uint32_t{})
                   : f(std::uint64_t{});
  }

  void reduce(const Reduction& reduction, void* data, std::size_t count) {
    gloo::AllreduceOptions options(context_);
    with_size(reduction.element, [&]<class T>(T) { options.setOutput(static_cast<T*>(data), count); });
    options.setReduceFunction(reduction.combine);
    options.setTimeout(timeout_);
    gloo::allreduce(options);
  }

  void start(const Call& call) {
    const auto n = static_cast<std::size_t>(size), own = static_cast<std::size_t>(rank);
    const auto element = call.reduction.element;
    switch (call.op) {
      case Op::all_reduce:
        if (call.count == 0) return;
        if (call.reduction.scale != 1) call.reduction.scaled(call.out, call.out, call.count, call.reduction.scale);
        return reduce(call.reduction, call.out, call.count);
      case Op::reduce_scatter:
        if (call.count == 0) return;
        scratch_.resize(n * call.count * element);
        call.reduction.scaled(scratch_.data(), call.in, n * call.count, call.reduction.scale);
        reduce(call.reduction, scratch_.data(), n * call.count);
        std::memcpy(call.out, scratch_.data() + own * call.count * element, call.count * element);
        return;
      case Op::broadcast: {
        if (call.count == 0) return;
        gloo::BroadcastOptions options(context_);
        options.setOutput(static_cast<std::uint8_t*>(call.out), call.count * element);
        options.setRoot(call.peer);
        options.setTimeout(timeout_);
        return gloo::broadcast(options);
      }
      case Op::all_gather: {
        if (call.count == 0) return;
        const auto bytes = call.count * element;
        const auto all = static_cast<std::uint8_t*>(call.out);
        if (call.in != all + own * bytes) std::memcpy(all + own * bytes, call.in, bytes);
        gloo::AllgatherOptions options(context_);
        options.setOutput(all, n * bytes);
        options.setTimeout(timeout_);
        return gloo::allgather(options);
      }
      case Op::message: {
        const auto bytes = call.count * element;
        auto buffer = context_->createUnboundBuffer(call.receives ? call.out : const_cast<void*>(call.in), bytes);
        if (call.receives) {
          buffer->recv(call.peer, message_slot);
          buffer->waitRecv(timeout_);
        } else {
          buffer->send(call.peer, message_slot);
          buffer->waitSend(timeout_);
        }
        return;
      }
      case Op::barrier:
      case Op::monitored_barrier: {
        if (compares_) return;  // the comparison was a barrier
        gloo::BarrierOptions options(context_);
        options.setTimeout(timeout_);
        return gloo::barrier(options);
      }
    }
  }

  static constexpr std::uint64_t message_slot = 0x7fff'ffff'0000'0000;  // none of the collectives'

  const std::chrono::milliseconds timeout_;
  AnyCommunicator control_;  ///< the meeting's group; carries envelopes and reasons
  const bool compares_ = compares_calls();
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::vector<std::byte> scratch_;
};

inline std::shared_ptr<Engine> gloo_engine(const World& world) { return std::make_shared<GlooEngine>(world); }

inline const bool gloo_registered = register_backend(Backend::gloo, gloo_engine);

}  // namespace detail

/// A Communicator over gloo.
class GlooCommunicator : public AnyCommunicator {
 public:
  /// Meets the other ranks like `connect`, and throws its exceptions.
  explicit GlooCommunicator(const World& world) : AnyCommunicator(connect(world, {.backend = Backend::gloo})) {}
};

static_assert(Communicator<GlooCommunicator>);

}  // namespace chorus::comm
