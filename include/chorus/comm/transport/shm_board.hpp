#pragma once
/// `Board`: the messages between ranks that share memory, apart from their data: which ranks are here, which wait for
/// which, which have aborted. Each has a `Place` at it, where it sleeps, is woken, and learns that a peer has died.

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chorus/comm/transport/fixed_text.hpp>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::comm::detail {

/// Sleeps while `word` is `value`, until `futex_wake` or `limit`; may return spuriously.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec time{.tv_sec = seconds.count(), .tv_nsec = (limit - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

/// Wakes all that sleep on `word`.
inline void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Tells the processor that this is a waiting loop.
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The event that a sleeping rank waits for.
struct alignas(8) Waiting {
  enum What : std::int32_t {
    for_nothing,
    for_data,    ///< from `rank`
    for_room,    ///< that `rank` makes by reading
    for_another  ///< for a rank named `rank`, which has no seat here
  };
  What what = for_nothing;
  std::int32_t rank = 0;
  friend bool operator==(const Waiting&, const Waiting&) = default;
};

// Both lie in zeroed memory that several processes map.

struct alignas(64) Seat {
  std::atomic<std::uint32_t> bell;   ///< incremented to wake this rank
  std::atomic<Waiting> waits;        ///< while it sleeps
  std::atomic<Clock::rep> pulse;     ///< while it sleeps: the time of its last check, by the machine's clock
  std::atomic<std::uint32_t> left;   ///< 1 once it has left the group
  std::atomic<std::uint32_t> works;  ///< 1 while it works in the others' memory
  std::atomic<std::int32_t> pid;     ///< its process, or 0 among threads
  // On the board of a whole job: the same for its groups, which have their own boards.
  std::atomic<Waiting> waits_in_group;
  std::atomic<Clock::rep> group_pulse;
};

struct Board {
  enum Verdict : std::uint32_t { all_is_well, being_written, given_up };

  std::uint64_t key;             ///< random: proves that a process has opened the right region
  std::atomic<Verdict> verdict;  ///< given_up: `culprit` and `reason` are written
  std::int32_t culprit;
  FixedText<1024> reason;
  std::array<Seat, max_ranks> seats;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<Waiting>::is_always_lock_free);
static_assert(alignof(Waiting) == sizeof(Waiting));  // otherwise clang calls libatomic, which is not linked

/// One rank's place at a board, from taking its seat until leaving.
class Place {
 public:
  /// If the board names the ranks' processes, it watches for their deaths. `names`: the ranks' names in messages, if
  /// they are some of a group.
  Place(Board& board, int rank, int size, std::chrono::milliseconds timeout, std::vector<int> names)
      : board_(board),
        rank_(rank),
        size_(size),
        timeout_(timeout),
        names_(std::move(names)),
        rounds_(std::clamp(60 * static_cast<int>(std::thread::hardware_concurrency()) / size, 1, 60)),
        has_core_(size <= static_cast<int>(std::thread::hardware_concurrency())) {
    for (int peer = 0; peer < size_; ++peer) {
      const bool other = pid(peer) != 0 && peer != rank_;
      death(peer) = other ? static_cast<int>(syscall(SYS_pidfd_open, pid(peer), 0)) : -1;
    }
  }
  ~Place() {
    {
      const std::lock_guard lock(OfJob::of_process().mutex);
      if (OfJob::of_process().place == this) OfJob::of_process().place = nullptr;
    }
    if (getpid() == process_) {  // a forked child is no rank
      seat(rank_).left.store(1);
      ring_all_bells();
    }
    for (int peer = 0; peer < size_; ++peer)
      if (death(peer) >= 0) close(death(peer));
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  /// The numbers of the group's ranks in messages, if the group is a part of the job. Otherwise it is the job, and its
  /// board records for whom ranks wait in groups. Call it before the first wait.
  void set_names_in_job(const std::vector<int>& names) {
    in_job_ = names;
    const std::lock_guard lock(OfJob::of_process().mutex);
    if (names.empty() && !among_threads() && OfJob::of_process().place == nullptr) OfJob::of_process().place = this;
  }

  bool among_threads() const { return pid(rank_) == 0; }
  int pid(int who) const { return seat(who).pid.load(std::memory_order_relaxed); }

  /// Wakes `peer` if it sleeps and waits for this of this rank.
  void wake(int peer, Waiting::What what) const {
    if (seat(peer).waits.load() == Waiting{what, rank_}) ring_bell(peer);
  }

  /// Returns when `flag` is no longer `busy`: spins and yields for some microseconds if `may_spin`, then sleeps; see
  /// `yield`. While it sleeps, its seat says that it waits for `what` of `peer`, so that `peer` rings its bell. A
  /// thread that sets a flag reads the seat afterwards; a thread that writes to the seat reads the flag afterwards (all
  /// sequentially consistent), so one of them sees the other. Throws LinkError and LinkTimeout as Transport says.
  void wait(int peer, Waiting::What what, const std::atomic<std::uint32_t>& flag, std::uint32_t busy,
            const std::atomic<bool>* may_spin) {
    for (int round = 0; round < rounds_; ++round) {
      for (int i = 0; i < 10; ++i) {
        if (flag.load(std::memory_order_acquire) != busy) return;
        spin_pause();
      }
      if (!may_spin || !*may_spin) break;
      yield();  // the peer may need this core
    }
    auto& own = seat(rank_);
    const auto deadline = Clock::now() + timeout_;
    own.waits.store({what, peer});
    while (true) {
      const auto bell = own.bell.load();
      if (flag.load() != busy) break;
      const auto now = Clock::now();
      own.pulse.store(now.time_since_epoch().count());
      announce_wait(peer);
      diagnose(peer, flag, busy, now >= deadline);  // an exception leaves it set, for others' deadlines
      if (meanwhile) meanwhile(name(peer), now - (deadline - timeout_));
      futex_wait(own.bell, bell, std::min<Clock::duration>(deadline - now, nap));
    }
    own.waits.store({});
    announce_wait(nobody);
  }

  /// Throws if `peer` has left and `flag` is unchanged: all data that a rank sent before it left have arrived.
  void check_is_here(int peer, const std::atomic<std::uint32_t>& flag, std::uint32_t busy) const {
    if (seat(peer).left.load() == 0 || flag.load() != busy) return;
    check();  // the reason for leaving, if there is one
    fail<LinkError>("rank ", name_in_job(peer), " has left the group");
  }

  /// Records, periodically, that this rank waits for the rank with this name, which has no seat here; -1: no longer.
  void waits_elsewhere(int stranger) const {
    seat(rank_).pulse.store(Clock::now().time_since_epoch().count());
    seat(rank_).waits.store(stranger < 0 ? Waiting{} : Waiting{Waiting::for_another, stranger});
  }

  /// Other work at each check while this rank sleeps and waits for the rank of that name, with the duration so far. May
  /// throw LinkError.
  std::function<void(int name, Clock::duration waited)> meanwhile;

  /// Throws if a rank has aborted.
  void check() const {
    if (board_.verdict.load() == Board::given_up)
      fail<LinkError>("rank ", board_.culprit, " gave up: ", board_.reason.view());
  }

  /// Also throws if a process has ended.
  [[gnu::cold]] void check_peers() {
    check();
    for (int who = 0; who < size_; ++who)
      if (has_died(who)) fail<LinkError>("rank ", name_in_job(who), " is lost: its process ", pid(who), " has ended");
  }

  /// Records whether this rank works in the others' memory. It calls `check` between this and the first access: then
  /// either it sees that a rank has aborted, or that rank sees that it works (all sequentially consistent).
  void works_in_place(bool does) const { seat(rank_).works.store(does ? 1 : 0); }
  /// After a rank has aborted: returns when no other rank works in this one's memory any more. Waits until the deadline
  /// for a stopped rank.
  [[gnu::cold]] void await_hands_off() noexcept {
    const auto deadline = Clock::now() + timeout_;
    for (int who = 0; who < size_; ++who)
      while (who != rank_ && (board_.verdict.load() != Board::given_up || seat(who).works.load() != 0) &&
             !has_died(who) && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  /// Aborts the group in this rank's name. From any thread.
  [[gnu::cold]] void abort(const std::string& why) noexcept {
    auto none = Board::all_is_well;
    if (board_.verdict.compare_exchange_strong(none, Board::being_written)) {
      board_.culprit = name_in_job(rank_);
      board_.reason = FixedText<1024>(why);
      board_.verdict.store(Board::given_up);
    }
    ring_all_bells();
    ring_bell(rank_);
  }

 private:
  static constexpr std::chrono::milliseconds nap{20};  // between two checks of a sleeper
  static constexpr int nobody = -1;

  /// This process's place at the board of its job, if it has one.
  struct OfJob {
    std::mutex mutex;
    Place* place = nullptr;
    static OfJob& of_process() {
      static OfJob of_job;
      return of_job;
    }
  };

  /// Lets another thread use this core. A program that computes then keeps it for milliseconds. So where ranks have a
  /// core each, there is no yield for a while after a slow one. Where they share cores, the others that compute are
  /// mostly ranks, for which this one has to wait: there sleeping at once takes longer.
  void yield() {
    constexpr std::chrono::microseconds slow{500}, pause{100'000};
    const auto begin = Clock::now();
    if (begin < no_yield_before_) return;
    sched_yield();
    if (const auto end = Clock::now(); has_core_ && end - begin > slow) no_yield_before_ = end + pause;
  }

  Seat& seat(int who) const { return board_.seats[static_cast<std::size_t>(who)]; }
  int& death(int peer) { return deaths_[static_cast<std::size_t>(peer)]; }
  int name(int who) const { return names_.empty() ? who : names_[static_cast<std::size_t>(who)]; }
  int in_job(int named) const { return in_job_.empty() ? named : in_job_[static_cast<std::size_t>(named)]; }
  int name_in_job(int who) const { return in_job(name(who)); }

  void announce_wait(int peer) const {
    if (in_job_.empty() || among_threads()) return;
    const std::lock_guard lock(OfJob::of_process().mutex);
    const Place* const job = OfJob::of_process().place;
    if (job == nullptr) return;
    Seat& own = job->seat(job->rank_);
    own.group_pulse.store(Clock::now().time_since_epoch().count());
    own.waits_in_group.store(peer == nobody ? Waiting{} : Waiting{Waiting::for_another, name_in_job(peer)});
  }

  void ring_bell(int who) const noexcept {
    seat(who).bell.fetch_add(1);
    futex_wake(seat(who).bell);
  }
  void ring_all_bells() const noexcept {
    for (int who = 0; who < size_; ++who)
      if (who != rank_) ring_bell(who);
  }

  [[gnu::cold]] void diagnose(int peer, const std::atomic<std::uint32_t>& flag, std::uint32_t busy, bool late) {
    check_peers();
    check_is_here(peer, flag, busy);
    if (late) fail<LinkTimeout>("waited ", timeout_.count(), " ms for ", chain(peer));
  }

  [[gnu::cold]] bool has_died(int who) {
    const int process = pid(who);
    if (process == 0 || who == rank_) return false;
    pollfd event{death(who), POLLIN, 0};
    const bool ended = event.fd >= 0 ? poll(&event, 1, 0) > 0 : kill(process, 0) != 0 && errno == ESRCH;
    return ended && seat(who).left.load() == 0;
  }

  /// `rank 2, which waits for rank 1, which ...`: the last one is the cause.
  [[gnu::cold]] std::string chain(int peer) const {
    int who = name_in_job(peer);
    std::string text = cat("rank ", who);
    for (int length = 0; length < max_ranks; ++length) {
      Sight seen = look_at(who);
      if (seen.awaited == nobody && !in_job_.empty()) {
        const std::lock_guard lock(OfJob::of_process().mutex);
        if (const Place* const job = OfJob::of_process().place) seen = job->look_at(who);
      }
      if (seen.awaited == nobody) return seen.has_seat ? text + ", which is stopped or busy" : text;
      if (seen.awaited == name_in_job(rank_)) return text + ", which waits for this rank";
      text += cat(", which waits for rank ", who = seen.awaited);
    }
    return text;
  }
  /// A rank of the job on this board, and the rank that it waits for.
  struct Sight {
    bool has_seat = false;
    int awaited = nobody;
  };
  [[gnu::cold]] Sight look_at(int number) const {
    const auto lasts = [](const std::atomic<Clock::rep>& pulse) {
      return Clock::now() - Clock::time_point(Clock::duration(pulse.load())) <= 10 * nap;
    };
    for (int who = 0; who < size_; ++who) {
      if (name_in_job(who) != number) continue;
      const auto waits = seat(who).waits.load(), in_group = seat(who).waits_in_group.load();
      if (waits.what != Waiting::for_nothing && lasts(seat(who).pulse))
        return {true, waits.what == Waiting::for_another ? in_job(waits.rank) : name_in_job(waits.rank)};
      if (in_group.what != Waiting::for_nothing && lasts(seat(who).group_pulse)) return {true, in_group.rank};
      return {true, nobody};
    }
    return {};
  }

  Board& board_;
  const int rank_, size_, process_ = getpid();
  const std::chrono::milliseconds timeout_;
  const std::vector<int> names_;
  std::vector<int> in_job_;  // by name
  std::array<int, max_ranks> deaths_{};  // per peer: a pidfd, readable once its process has ended
  const int rounds_;                     // number of checks and yields before sleeping; fewer if ranks outnumber cores
  const bool has_core_;                  // ranks don't outnumber cores
  Clock::time_point no_yield_before_{};  // since a yield was slow
};

}  // namespace chorus::comm::detail
