#pragma once
/// `Engine`: executes the calls of a communicator, behind a virtual interface that knows bytes and no types.

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

enum class Op : std::uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, message, barrier, monitored_barrier };

constexpr std::string_view name(Op op) {
  constexpr std::string_view names[] = {"all_reduce", "broadcast", "all_gather",       "reduce_scatter",
                                        "message",    "barrier",   "monitored_barrier"};
  const auto i = static_cast<std::size_t>(op);
  return i < std::size(names) ? names[i] : "an unknown operation";
}

/// A scalar type and an operator, as functions on bytes. Pointers are aligned to the scalar type.
struct Reduction {
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::size_t element = 1;  ///< bytes of one number
  double scale = 1;
  /// out[i] = in[i] (+) mine[i], bf16 and half in float; `out` may be `in` or `mine`. Null in calls that only move
  /// numbers.
  void (*combine)(void* out, const void* in, const void* mine, std::size_t count) = nullptr;
  /// out[i] = in_scale * in[i] (+) mine_scale * mine[i]. Products are rounded before the addition, so that any rank may
  /// multiply: a sum of two numbers has the same bits on every path.
  void (*combine_products)(void* out, const void* in, double in_scale, const void* mine, double mine_scale,
                           std::size_t count) = nullptr;
  /// out[i] = scale * mine[i]; `out` may be `mine`. Null: a plain copy.
  void (*scaled)(void* out, const void* mine, std::size_t count, double scale) = nullptr;
};

/// The reduction of numbers of type T with `op`. Throws UsageError for a scale that T cannot hold.
template <Scalar T>
Reduction reduction(ReduceOp op, double scale);

/// One call of a communicator.
struct Call {
  Op op = Op::barrier;
  Reduction reduction;
  trace::Traffic traffic = trace::Traffic::control;
  std::size_t count = 0;     ///< numbers per rank: of `mine` if there is a `mine`, else of `data`
  const void* in = nullptr;  ///< this rank's contribution
  void* out = nullptr;       ///< the result; equals `in` if a call is in place
  int peer = 0;              ///< the root of a broadcast, the other end of a message
  bool receives = false;     ///< a message: recv, not send
  int bucket = -1;           ///< the number of a gradient bucket, for messages
  int unit = -1;             ///< the number of a unit of parameters, likewise
  const char* part_of = nullptr;  ///< the name of a collective made of several calls, likewise

  /// The lane of a trace.
  trace::Lane lane() const { return unit >= 0 ? trace::Lane::gathers : trace::Lane::communication; }
};

/// One rank's end of a group. Its calls have been checked: sizes fit, roots and peers are ranks. They run in order. The
/// first failure is final: every later call throws it.
class Engine {
 public:
  /// `names`: see World's `members`.
  Engine(int me, int ranks, std::vector<int> names = {}) : rank(me), size(ranks), members(std::move(names)) {}
  virtual ~Engine() = default;  ///< finishes its calls and leaves the group
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual void now(const Call& call) = 0;
  virtual Work later(const Call& call) = 0;
  /// See Communicator. May be called from any thread, also while others wait in `now`.
  virtual void abort(std::string_view why) noexcept = 0;
  /// The carrier of bytes: `shm`, `tcp`, ...
  virtual std::string_view name() const = 0;
  /// See AnyCommunicator.
  virtual std::shared_ptr<std::byte> allocate(std::size_t) { return nullptr; }
  static constexpr std::chrono::nanoseconds not_measured{-1};
  /// The total time of calls, from their turn to their end; 0 if none takes time, `not_measured` if calls run on
  /// streams.
  virtual std::chrono::nanoseconds busy() const { return {}; }
  /// This rank's clock; for a simulated rank its virtual time.
  virtual Clock::time_point time() const { return Clock::now(); }
  /// The newest calls, one per line, as the flight recorder prints them; empty if the engine keeps none.
  virtual std::string record() const { return {}; }
  /// The requested algorithm of its all-reduces, see World.
  virtual Algorithm all_reduce() const { return Algorithm::automatic; }
  /// The known failure of the group, without waiting; empty while a call is running, which will find it itself. May be
  /// called from any thread.
  virtual std::string trouble() { return {}; }
  /// Runs `start`, which launches a captured step with calls of this engine. `what`, for messages, must outlive it.
  virtual void launch(const char*, const std::function<void()>& start) { start(); }
  /// Whether calls may use memory of a GPU, and then run on streams. Host memory is always allowed.
  virtual bool takes_device_memory() const { return false; }

  /// This rank's number in the job.
  int rank_in_job() const { return members.empty() ? rank : members[static_cast<std::size_t>(rank)]; }

  const int rank, size;
  const std::vector<int> members;  ///< see World
};

namespace detail {

/// The engine of a group of one. Nothing moves, but results are as in a larger group.
class Alone final : public Engine {
 public:
  Alone() : Engine(0, 1) {}

  void now(const Call& call) override {
    if (aborted_) fail<CommError>("rank 0: ", comm::name(call.op), ": aborted: ", aborted_.why());
    if (call.out == nullptr || call.count == 0) return;
    if (call.reduction.scaled != nullptr) {
      call.reduction.scaled(call.out, call.in, call.count, call.reduction.scale);
    } else if (call.out != call.in) {
      std::memcpy(call.out, call.in, call.count * call.reduction.element);
    }
  }
  Work later(const Call& call) override {
    now(call);
    return {};
  }
  void abort(std::string_view why) noexcept override { aborted_.set(why); }
  std::string_view name() const override { return "alone"; }

 private:
  AbortReason aborted_;
};

}  // namespace detail

inline std::shared_ptr<Engine> alone() { return std::make_shared<detail::Alone>(); }

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/algorithms/reduction.hpp>
#endif
