#pragma once
/// `Tasks`: functions that run in turn, each with a clock of its own that stands still unless it is moved: virtual
/// time.

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/philox.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <ratio>
#include <semaphore>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace chorus::comm::simulated {

/// Virtual time, in whole femtoseconds: sums of integers are the same on every machine and with every compiler option.
/// It lasts for 2.5 hours.
using Time = std::chrono::duration<std::int64_t, std::femto>;

/// Throws UsageError for seconds below 0, and for more than 8000: there virtual time is near its end.
inline Time time_of(std::string_view what, double seconds) {
  check<UsageError>(seconds >= 0 && seconds <= 8000, what, ": ", seconds, " s of virtual time, expected 0 to 8000");
  return Time(static_cast<std::int64_t>(seconds * 1e15));
}
/// `clock` after so much more. Throws UsageError near the end of virtual time.
inline Time later(Time clock, Time more) {
  constexpr Time end(std::int64_t{9'000'000'000'000'000'000});
  check<UsageError>(more < end - clock, "simulation: more than 9000 s of virtual time");
  return clock + more;
}
inline double seconds(Time time) { return static_cast<double>(time.count()) * 1e-15; }

/// Where a task runs. A fiber costs some pages of memory and a change between two of them 0.3 us; all are on the thread
/// of `run`, so they have one `thread_local` state between them: they are for code without any. A thread costs more,
/// has its own, and runs only when it is its turn.
enum class RunsOn : std::uint8_t { fiber, thread };

/// What the address sanitizer has to be told of a change between stacks; nothing elsewhere.
struct StackChange {
#if defined(__SANITIZE_ADDRESS__)
  static void begin(void** own, const void* bottom, std::size_t size) {
    __sanitizer_start_switch_fiber(own, bottom, size);
  }
  static void end(void* own, const void** bottom, std::size_t* size) {
    __sanitizer_finish_switch_fiber(own, bottom, size);
  }
#else
  static void begin(void**, const void*, std::size_t) {}
  static void end(void*, const void**, std::size_t*) {}
#endif
};

/// One task runs at a time, until it ends or blocks: no two ever race. In the order of their clocks, if that is wanted,
/// else in the order in which they are woken.
class Tasks {
 public:
  /// `ties`: which of those that are ready at one time runs first; 0: the one that was ready first.
  explicit Tasks(bool in_time_order = false, std::uint64_t ties = 0) : in_time_order_(in_time_order), ties_(ties) {}
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;
  ~Tasks() {
    if (stacks_ != nullptr) munmap(stacks_, stack_bytes * fibers_);
    for (auto* const stack : later_stacks_) munmap(stack, stack_bytes);
  }

  /// A task that begins when `run` is called; from a task that runs, a fiber that begins at that task's time. `body`
  /// must not throw.
  int add(RunsOn where, std::function<void()> body) {
    auto& task = tasks_.emplace_back();
    task.body = std::move(body);
    if (where == RunsOn::thread)
      task.own = std::make_unique<Thread>();
    else if (current_ < 0)
      task.number = fibers_++;
    else
      later_stacks_.push_back(task.stack = reserved(1));
    const int number = static_cast<int>(tasks_.size()) - 1;
    if (current_ >= 0) task.clock = clock(), ++left_;
    wake(number, task.clock);
    return number;
  }

  /// Returns when all tasks have ended. Where none can go on, `stuck()` has to wake one. Throws CommError where there
  /// is no memory for stacks, or no thread.
  void run(const std::function<void()>& stuck) {
    reserve_stacks();
    start_threads();
    for (left_ = tasks_.size(); left_ > 0;) {
      if (nobody_is_ready()) stuck();
      const auto next = take_next();
      if (next.event) {
        next.event();
        continue;
      }
      current_ = next.task;
      Task& task = tasks_[static_cast<std::size_t>(current_)];
      if (task.ended) continue;  // woken before its end, or after it
      task.is_ready = false;
      task.own ? give_turn(*task.own) : enter_fiber(task);
      left_ -= task.ended;
    }
    for (auto& task : tasks_)
      if (task.own) task.own->thread.join();
  }

  // From a task that runs:

  int current() const { return current_; }
  Time& clock() { return clock_of(current_); }
  Time& clock_of(int task) { return tasks_[static_cast<std::size_t>(task)].clock; }
  /// Lets others run until somebody wakes this one.
  void block() {
    Task& task = tasks_[static_cast<std::size_t>(current_)];
    if (task.own) {
      turn_.release();
      task.own->turn.acquire();
    } else {
      StackChange::begin(&task.shadow, bottom_, size_);
      swapcontext(&task.context, &scheduler_);
      StackChange::end(task.shadow, &bottom_, &size_);
    }
  }
  /// `task` may go on. It is ready at the virtual time `at`, which is not before the caller's own.
  void wake(int task, Time at) {
    Task& woken = tasks_[static_cast<std::size_t>(task)];
    if (std::exchange(woken.is_ready, true)) return;
    if (in_time_order_)
      ordered_.push({std::max(at, woken.clock), next_number(), task, {}});
    else
      ready_.push_back(task);
  }
  /// In time order: returns when no other task can do anything before the caller's clock.
  void await_turn() {
    if (ordered_.empty() || ordered_.top().at >= clock()) return;
    wake(current_, clock());
    block();
  }
  /// In time order: calls `event` at that virtual time.
  void at(Time when, std::function<void()> event) { ordered_.push({when, next_number(), -1, std::move(event)}); }

 private:
  static constexpr std::size_t stack_bytes = 128 << 10;  // reserved; what is not touched costs nothing

  struct Thread {
    std::binary_semaphore turn{0};
    std::thread thread;
  };
  struct Task {
    std::function<void()> body;
    Time clock{};
    bool is_ready = false, begun = false, ended = false;
    std::size_t number = 0;      // of the fibers that `run` begins with
    std::byte* stack = nullptr;  // of a fiber
    void* shadow = nullptr;  // the sanitizer's
    ucontext_t context;
    std::unique_ptr<Thread> own;  // else it is a fiber
  };
  struct Ready {
    Time at;
    std::uint64_t number;  // of two at one time, the smaller one is first
    int task;
    std::function<void()> event;
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.at != b.at ? a.at > b.at : a.number > b.number;  // the queue's top is the largest
    }
  };

  std::uint64_t next_number() {
    const auto number = given_++;
    if (ties_ == 0) return number;
    const auto drawn = philox(ties_, {static_cast<std::uint32_t>(number), 0, 0, 0x71E5});
    return static_cast<std::uint64_t>(drawn[0]) << 32 | drawn[1];
  }
  bool nobody_is_ready() const { return ready_.empty() && ordered_.empty(); }
  Ready take_next() {
    if (in_time_order_) {
      check<CommError>(!ordered_.empty(), "simulation: no rank can continue");
      auto next = ordered_.top();
      ordered_.pop();
      return next;
    }
    check<CommError>(!ready_.empty(), "simulation: no rank can continue");
    const int task = ready_.front();
    ready_.pop_front();
    return {{}, 0, task, {}};
  }

  [[gnu::cold]] void reserve_stacks() {
    if (fibers_ == 0) return;
    stacks_ = reserved(fibers_);
    for (auto& task : tasks_)
      if (!task.own) task.stack = stacks_ + stack_bytes * task.number;
  }
  static std::byte* reserved(std::size_t fibers) {
    void* const memory = mmap(nullptr, stack_bytes * fibers, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<CommError>(memory != MAP_FAILED, "simulation: no memory for ", fibers, " stacks");
    return static_cast<std::byte*>(memory);
  }
  [[gnu::cold]] void start_threads() {
    try {
      for (auto& task : tasks_) {
        if (!task.own) continue;
        task.own->thread = chorus::detail::start_thread("simulation", [this, &task] {
          task.own->turn.acquire();
          if (!given_up_) task.body();
          task.ended = true;
          turn_.release();
        });
      }
    } catch (...) {
      given_up_ = true;
      for (auto& task : tasks_) {
        if (!task.own || !task.own->thread.joinable()) continue;
        give_turn(*task.own);
        task.own->thread.join();
      }
      throw;
    }
  }
  void give_turn(Thread& thread) {
    thread.turn.release();
    turn_.acquire();
  }
  void enter_fiber(Task& task) {
    if (!std::exchange(task.begun, true)) {
      getcontext(&task.context);
      task.context.uc_stack.ss_sp = task.stack;
      task.context.uc_stack.ss_size = stack_bytes;
      task.context.uc_link = &scheduler_;
      const auto self = reinterpret_cast<std::uintptr_t>(this);  // makecontext passes int
      makecontext(&task.context, reinterpret_cast<void (*)()>(&Tasks::in_fiber), 2, static_cast<unsigned>(self),
                  static_cast<unsigned>(self >> 32));
    }
    void* shadow = nullptr;
    StackChange::begin(&shadow, task.stack, stack_bytes);
    swapcontext(&scheduler_, &task.context);
    StackChange::end(shadow, nullptr, nullptr);
  }
  static void in_fiber(unsigned low, unsigned high) {
    auto& tasks = *reinterpret_cast<Tasks*>(static_cast<std::uintptr_t>(high) << 32 | low);
    Task& task = tasks.tasks_[static_cast<std::size_t>(tasks.current_)];
    StackChange::end(nullptr, &tasks.bottom_, &tasks.size_);
    task.body();
    task.ended = true;
    StackChange::begin(nullptr, tasks.bottom_, tasks.size_);
  }

  const bool in_time_order_;
  const std::uint64_t ties_;
  std::deque<Task> tasks_;  // they stay where they are
  std::deque<int> ready_;
  std::priority_queue<Ready> ordered_;
  std::uint64_t given_ = 0;
  int current_ = -1;
  std::size_t left_ = 0;  // tasks that have not ended
  std::size_t fibers_ = 0;
  std::byte* stacks_ = nullptr;
  std::vector<std::byte*> later_stacks_;
  ucontext_t scheduler_;
  const void* bottom_ = nullptr;  // of its stack, for the sanitizer
  std::size_t size_ = 0;
  std::binary_semaphore turn_{0};  // of the thread of `run`
  bool given_up_ = false;          // a thread could not be started
};

}  // namespace chorus::comm::simulated
