#pragma once
/// Listeners for events in training: communication, memory and time. Without a listener each event costs one branch.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <chorus/core/replaced.hpp>

namespace chorus::trace {

/// The content of a message between devices or ranks.
enum class Traffic : std::uint8_t { control, parameters, gradients, buffers, inputs, outputs, activations };
inline constexpr std::size_t traffic_kinds = 7;

/// The content of a block of device memory.
enum class Memory : std::uint8_t { activations, parameters, gradients, optimizer, buckets };
inline constexpr std::size_t memory_kinds = 5;

constexpr std::string_view name(Traffic kind) {
  constexpr std::string_view names[] = {"control", "parameters", "gradients", "buffers",
                                        "inputs",  "outputs",    "activations"};
  return names[static_cast<std::size_t>(kind)];
}
constexpr std::string_view name(Memory kind) {
  constexpr std::string_view names[] = {"activations", "parameters", "gradients", "optimizer", "buckets"};
  return names[static_cast<std::size_t>(kind)];
}

/// The tracks in a trace of a device's or rank's time. `gathers`: collectives that gather sharded parameters, beside
/// those that reduce gradients.
enum class Lane : std::uint8_t { step, loader, forward, backward, communication, wait, optimizer, gathers };
inline constexpr std::size_t lanes = 8;

constexpr std::string_view name(Lane lane) {
  constexpr std::string_view names[] = {"step",          "loader",       "forward",   "backward",
                                        "communication", "exposed wait", "optimizer", "gathers"};
  return names[static_cast<std::size_t>(lane)];
}

/// An interval from `begin` to `end`, or an instant at `end`, in ns of the listener's clock.
struct Event {
  int device;  ///< or rank
  Lane lane;
  std::string_view category, name;
  std::int64_t begin, end;
  std::string_view args = {};  ///< further fields of a JSON object: `"bucket":2,"bytes":1024`
};

/// Receives events, from any thread.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual std::int64_t now() = 0;
  virtual void span(const Event& event) = 0;
  virtual void instant(const Event& event) = 0;
  virtual void sent(int from, int to, Traffic kind, std::size_t bytes) = 0;
  /// By trace_slot.
  virtual void allocated(int slot, Memory kind, std::int64_t bytes) = 0;
  /// Whether it wants each step of a collective algorithm.
  virtual bool wants_steps() const { return false; }
};

/// Observes the begin and end of training steps, for traces of selected steps: `stepped` after an optimizer's step,
/// `forward_begins` before a forward pass that records gradients.
class StepCounter {
 public:
  virtual ~StepCounter() = default;
  virtual void stepped() = 0;
  virtual void forward_begins() = 0;
  /// Before a forward pass in evaluation mode without gradients, which belongs to no training step.
  virtual void evaluation_begins() {}
  /// Adds information about the run to its trace, as JSON.
  virtual void note(std::string_view key, std::string_view json) = 0;
};

namespace detail {
inline std::atomic<Listener*> listener{nullptr};
inline std::atomic<StepCounter*> step_counter{nullptr};
inline std::atomic<int> place_of_process{0};
inline thread_local constinit int place_of_thread = -1;
}  // namespace detail

/// The current listener, or null. It must outlive all threads that may have read it.
inline Listener* listening() { return detail::listener.load(std::memory_order_acquire); }
inline void listen(Listener* listener) { detail::listener.store(listener, std::memory_order_release); }
inline StepCounter* step_counter() { return detail::step_counter.load(std::memory_order_acquire); }
inline void count_steps(StepCounter* counter) { detail::step_counter.store(counter, std::memory_order_release); }

/// The device or rank that this thread works for.
inline int place() {
  return detail::place_of_thread >= 0 ? detail::place_of_thread
                                      : detail::place_of_process.load(std::memory_order_relaxed);
}
/// Sets the place of threads without a PlaceScope.
inline void set_place_of_process(int device) { detail::place_of_process.store(device, std::memory_order_relaxed); }
/// While it lives, this thread works for that device or rank.
struct PlaceScope : chorus::detail::Replaced<int> {
  explicit PlaceScope(int device) : Replaced(detail::place_of_thread, device) {}
};

/// Reports its lifetime to the listener that existed at its construction, for this thread's place.
class Span {
 public:
  /// The strings must outlive it.
  Span(Lane lane, std::string_view category, std::string_view name)
      : listener_(listening()), event_{0, lane, category, name, 0, 0, {}} {
    if (listener_ == nullptr) [[likely]]
      return;
    event_.device = place();
    event_.begin = listener_->now();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() {
    if (listener_ == nullptr) [[likely]]
      return;
    event_.end = listener_->now();
    listener_->span(event_);
  }
  /// Whether there is a listener.
  explicit operator bool() const { return listener_ != nullptr; }
  /// Sets device, name and args, which are known only now.
  void describe(int device, std::string name, std::string args) {
    name_ = std::move(name);
    args_ = std::move(args);
    event_.device = device;
    event_.name = name_;
    event_.args = args_;
  }

 private:
  Listener* const listener_;
  Event event_;
  std::string name_, args_;
};

}  // namespace chorus::trace
