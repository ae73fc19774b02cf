#pragma once
/// Starts the ranks of one machine as processes and supervises them: the first that fails is named and ends all,
/// signals are passed on, and no rank outlives the supervisor. `supervisor_link.hpp` is the rank's end.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/core/config.hpp>
#include <chorus/launch/console.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/rank_output.hpp>
#include <chorus/launch/rank_process.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chorus/launch/supervisor_link.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace chorus {

/// How a group ended.
struct GroupOutcome {
  int status = 0;        ///< 0, the exit status of the rank that failed first, or 128 + a signal's number
  int failed_rank = -1;  ///< the rank that failed first, -1 if none did
  int signal = 0;        ///< the signal that was sent to the supervisor
};

namespace detail {

/// The address of a name of this machine. Throws UsageError if it is `for_others` and resolves differently on others.
inline comm::Address place_to_listen(const std::string& name, int port, bool for_others) {
  const auto address = comm::Address::resolve(name, port);
  check<UsageError>(
      !for_others || !address.misleads(name), "launch: '", printable(name), "' is ", address.host(),
      " on this machine, which no other machine can reach (see /etc/hosts): give this machine's address instead");
  return address;
}

/// Starts the ranks and waits until all have ended. When one fails, it is named on stderr, the others get SIGTERM and
/// after `grace` SIGKILL; the group's signals to this process are passed on in the same way. SIGUSR1 and SIGUSR2, if
/// they are not among those, are passed on and end nothing. Output goes to `console`; nothing here waits for its
/// reader. Run it in a thread that lives as long as the ranks: they are killed when it ends.
///
/// A rank whose job outlives it (see SupervisorLink::lives) may be killed by a signal, or lose the others: then these
/// continue. In the place of a killed one another process is started, while ranks are left to let it in: at most one in
/// 200 ms, `group.replacements` a minute, and 10 a minute after ones that were killed before they were let in.
class Supervisor {
 public:
  Supervisor(const RankGroup& group, Console& console)
      : group_(group),
        console_(console),
        signals_(all_signals(group.signals)),
        output_(group, console),
        ranks_(static_cast<std::size_t>(group.ranks)) {}
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  /// After an exception no rank is left running.
  ~Supervisor() {
    for (Rank& rank : ranks_) {
      if (!rank.running) continue;
      kill(rank.pid, SIGKILL);
      waitpid(rank.pid, nullptr, 0);
    }
  }

  /// Call it once. Throws Error if a process cannot be started.
  GroupOutcome run() {
    start_all();
    while (running_ > 0 || undecided() || vacant() != nullptr) {
      Rank* const place = vacant();
      const int signal = signals_.wait(place != nullptr ? place->vacant : deadline_);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal == 0 && place != nullptr) {
        replace(*place);
      } else if (signal == SignalPipe::woken) {
        form_anew();
      } else if (signal != 0) {
        pass_on(signal);
      } else if (stage_ == Stage::watching) {
        judge();
      } else if (stage_ == Stage::stopping) {
        console_.say(format("%d %s not ended within %g s (--grace): killing %s", running_,
                            running_ == 1 ? "rank has" : "ranks have",
                            std::chrono::duration<double>(group_.grace).count(), running_ == 1 ? "it" : "them"));
        kill_all();
      } else {
        console_.say(format("%d ranks did not end after SIGKILL; giving up on them", running_));
        for (Rank& rank : ranks_) rank.running = false;
        break;
      }
    }
    while (const int signal = signals_.wait(Clock::now())) {
      if (signal != SIGCHLD && signal != SignalPipe::woken && ends_job(signal)) note(signal);
    }
    return outcome_;
  }

  /// Stops the ranks as if they had lost a peer, and says why; any thread may call it once while `run` runs.
  void interrupt(const char* why) {
    interrupted_by_ = why;
    signals_.wake();
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { watching, stopping, killing };
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    int wait_status = 0;
    Fd reports;         ///< the rank's report when it fails
    RankReport report;  ///< the same, after it has ended
    RankOutput::Streams streams;
    bool replaces = false;                    ///< whether it has taken a lost one's place
    bool told = false;                        ///< whether its loss has been reported
    long led = 0;                             ///< the epoch whose rank 0 was lost here
    std::optional<Clock::time_point> vacant;  ///< when another process may take its place
  };

  static std::vector<int> all_signals(std::vector<int> signals) {
    for (const int signal : {SIGUSR1, SIGUSR2})
      if (std::find(signals.begin(), signals.end(), signal) == signals.end()) signals.push_back(signal);
    return signals;
  }
  bool ends_job(int signal) const {
    return std::find(group_.signals.begin(), group_.signals.end(), signal) != group_.signals.end();
  }

  int number(const Rank& rank) const {
    return group_.node_rank * group_.ranks + static_cast<int>(&rank - ranks_.data());
  }

  /// A token, because other users of this machine can reach loopback, too.
  static std::string random_token() {
    comm::Mac bytes;
    comm::fill_random(bytes);
    std::string token(comm::launched);
    for (const std::byte byte : bytes) token += format("%02x", static_cast<unsigned>(byte));
    return token;
  }

  /// On machine 0 the socket at which the ranks meet is opened before there are ranks and passed to rank 0, so that no
  /// other process can take the port in between.
  [[gnu::cold]] void start_all() {
    int port = group_.master_port;
    if (group_.node_rank == 0) {
      comm::Socket socket;
      if (group_.listen_fd < 0)
        socket = comm::Socket::listen(place_to_listen(group_.master_addr, port, group_.nodes > 1));
      if (group_.listen_fd < 0) port = socket.local().port();
      listener_ = Fd(dup(group_.listen_fd < 0 ? socket.fd() : group_.listen_fd), "rendezvous");
    }
    port_ = port;
    if (group_.nodes == 1 && env("CHORUS_TOKEN") == nullptr) token_ = random_token();
    nothing_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC), "/dev/null");
    doors_ = Fd(memfd_create("doors", MFD_CLOEXEC), "doors");
    for (int rank = 0; rank < group_.ranks; ++rank) {
      ranks_[static_cast<std::size_t>(rank)].streams = output_.add(rank);
      start(rank, "");
    }
    output_.start();
  }

  /// `doors`: for a process that takes a lost one's place.
  void start(int local_rank, const std::string& doors) {
    Pipe reports;
    Rank& rank = ranks_[static_cast<std::size_t>(local_rank)];
    const RankDescriptors given{.report = reports.write_end.get(),
                                .listener = listener_.get(),
                                .input = nothing_.get(),
                                .output = rank.streams.out.get(),
                                .err = rank.streams.err.get(),
                                .doors = doors_.get()};
    rank.pid = start_rank(group_, local_rank, rank_environment(group_, local_rank, port_, token_, given, doors), given);
    rank.running = true;
    rank.wait_status = 0;
    rank.reports = std::move(reports.read_end);
    rank.report = {};
    rank.replaces = !doors.empty();
    rank.told = false;
    ++running_;
  }

  /// The last report of a rank, see SupervisorLink::lives.
  struct Life {
    long epoch = 0, rank = 0;
    std::string doors;
  };
  Life life_of(const Rank& rank) const {
    char text[doors_bytes] = {};
    [[maybe_unused]] const auto n = pread(doors_.get(), text, sizeof text - 1, (&rank - ranks_.data()) * doors_bytes);
    char* rest = text;
    const long epoch = std::strtol(rest, &rest, 10), place = std::strtol(rest, &rest, 10);
    return {epoch, place, *rest == ' ' ? rest + 1 : ""};
  }

  /// Whether the others may continue without a rank that has ended badly. A killed one's place becomes vacant.
  bool goes_on(Rank& rank) {
    const auto life = life_of(rank);
    if (life.doors.empty() && !(rank.replaces && life.epoch == 0)) return false;
    if (!WIFSIGNALED(rank.wait_status) && !lost_peers(rank)) return false;
    if (life.epoch > 0 && life.rank == 0) rank.led = life.epoch;
    if (WIFSIGNALED(rank.wait_status)) rank.vacant = Clock::now() + patience(rank.wait_status);
    if (WIFSIGNALED(rank.wait_status) && life.epoch == 0) killed_early_.push_back(Clock::now());
    return true;
  }
  /// The place that is to be taken next, while there are ranks that can let a process in.
  Rank* vacant() {
    Rank* next = nullptr;
    for (Rank& rank : ranks_)
      if (rank.vacant && (!next || *rank.vacant < *next->vacant)) next = &rank;
    return stage_ == Stage::watching && !suspect_ && (running_ > 0 || group_.nodes > 1) ? next : nullptr;
  }
  /// Says that the rank is lost; at the next call, which may be at once, starts another process.
  [[gnu::cold]] void replace(Rank& place) {
    const auto now = Clock::now();
    if (!std::exchange(place.told, true)) {
      auto start = replaced_.empty() ? now : std::max(now, replaced_.back() + Milliseconds(200));
      const auto limit = [&](const std::vector<Clock::time_point>& times, int most) {
        const auto kept = static_cast<std::size_t>(most);
        if (times.size() >= kept) start = std::max(start, times[times.size() - kept] + std::chrono::minutes(1));
      };
      std::string line = format("rank %d (pid %d) was killed by %s; the others continue", number(place), place.pid,
                                signal_name(WTERMSIG(place.wait_status)).c_str());
      place.vacant.reset();
      if (group_.replacements > 0) {
        limit(replaced_, group_.replacements);
        limit(killed_early_, 10);
        place.vacant = start;
        line += ", and another process takes its place";
        const auto wait = std::chrono::ceil<std::chrono::seconds>(start - now).count();
        if (wait > 1) line += format(" in %d s", static_cast<int>(wait));
      }
      return console_.say(line);
    }
    place.vacant.reset();
    const auto local_rank = static_cast<int>(&place - ranks_.data());
    [[maybe_unused]] const auto n = pwrite(doors_.get(), "", 1, local_rank * doors_bytes);
    replaced_.push_back(now);
    try {
      start(local_rank, newest_.doors);
    } catch (const Error& error) {
      console_.say(error.what());
    }
  }

  /// All have ended. If it went on without some, it has ended well unless all are lost, or the newest epoch's rank 0,
  /// which saves.
  void conclude() {
    const bool some = std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.wait_status == 0; });
    for (const Rank& rank : ranks_)
      if (rank.wait_status != 0 && (!some || (rank.led != 0 && rank.led == newest_.epoch))) suspect(rank);
    for (const Rank& rank : ranks_) {
      if (rank.wait_status == 0 || suspect_ || rank.told) continue;
      say_report(rank);
      console_.say(format("rank %d (pid %d) was lost; the others had ended, exit status 0", number(rank), rank.pid));
    }
  }

  [[gnu::cold]] void reap() {
    for (Rank& rank : ranks_) {
      if (!rank.running || waitpid(rank.pid, &rank.wait_status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      --running_;
      rank.report = read_report(rank);
      for (const Rank& one : ranks_)
        if (auto life = life_of(one); life.epoch > newest_.epoch) newest_ = std::move(life);
      if (rank.wait_status == 0) doubt(rank);
      if (&rank == &ranks_.front()) close_listener();
      if (stage_ == Stage::watching && rank.wait_status != 0 && !goes_on(rank)) suspect(rank);
      if (!rank.vacant) rank.streams = {};  // its reader sees the end
    }
    if (running_ == 0 && stage_ == Stage::watching && !suspect_ && vacant() == nullptr) conclude();
    // The signal that has ended all of them may arrive here later.
    const bool all_told = running_ == 0 && !(suspect_ && WIFSIGNALED(suspect_->wait_status));
    if (undecided() && (all_told || Clock::now() >= *deadline_)) judge();
  }
  bool undecided() const { return suspect_ != nullptr && stage_ == Stage::watching; }

  /// Checks whether a rank with exit status 0 has made its call of launch: main may have taken another path, or ignored
  /// `launch`'s status.
  void doubt(Rank& rank) {
    auto& [arrived, when, status, message] = rank.report;
    if (!group_.launch.empty() && !arrived) {
      status = 2;
      message = "its main ended without the call of launch that started it";
    }
    if (status != 0)
      rank.wait_status = status << 8;  // as if it had exited with it
    else
      say_report(rank);
  }

  void say_report(const Rank& rank) {
    const std::string& why = rank.report.message;
    const bool named = why.starts_with("rank ");  // as errors of a communicator are
    if (!why.empty()) console_.say(named ? why : format("rank %d: %s", number(rank), why.c_str()));
  }

  /// After rank 0 has ended: its children may live on and hold the socket, but a restart needs the port.
  void close_listener() {
    if (listener_.get() >= 0) shutdown(listener_.get(), SHUT_RDWR);
    listener_.reset();
  }

  static bool lost_peers(const Rank& rank) {
    return WIFEXITED(rank.wait_status) && WEXITSTATUS(rank.wait_status) == lost_peer_status;
  }

  /// How long to wait for a better explanation. A rank that lost another one may end before that one does; and Ctrl-C
  /// reaches the ranks as soon as the supervisor.
  static Milliseconds patience(int wait_status) {
    if (WIFEXITED(wait_status)) return Milliseconds(WEXITSTATUS(wait_status) == lost_peer_status ? 1'000 : 0);
    const int signal = WTERMSIG(wait_status);
    return Milliseconds(signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT ? 50 : 0);
  }

  /// Other ranks need this time to write their flight records when they learn of the loss.
  static Milliseconds time_to_record() { return Milliseconds(comm::FlightRecorder::wanted() ? 500 : 0); }

  void suspect(const Rank& rank) {
    const auto better = patience(rank.wait_status);
    if (suspect_ && patience(suspect_->wait_status) <= better) return;
    const auto until = Clock::now() + better + time_to_record();
    suspect_ = &rank;
    if (!deadline_ || until < *deadline_) deadline_ = until;
  }

  /// Names the rank that failed first and stops the others.
  [[gnu::cold]] void judge() {
    const bool lost_peer = lost_peers(*suspect_);
    for (const Rank& rank : ranks_)
      if (lost_peer && !rank.running && lost_peers(rank) && rank.report.when < suspect_->report.when) suspect_ = &rank;
    const int status = suspect_->wait_status;
    outcome_.failed_rank = number(*suspect_);
    outcome_.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    say_report(*suspect_);
    std::string line = format("rank %d (pid %d) ", outcome_.failed_rank, suspect_->pid);
    line += WIFSIGNALED(status)
                ? format("was killed by %s", signal_name(WTERMSIG(status)).c_str())
                : format("%s, exit status %d", lost_peer ? "lost the other ranks" : "failed", outcome_.status);
    for (const Rank& rank : ranks_) {
      if (!lost_peer || rank.running || rank.wait_status != 0) continue;
      line += format("; rank %d had ended before, exit status 0", number(rank));
    }
    if (running_ == 1) line += "; stopping the other rank";
    if (running_ > 1) line += format("; stopping the other %d ranks", running_);
    console_.say(line);
    stop(SIGTERM);
  }

  static RankReport read_report(const Rank& rank) {
    std::string text;
    char buffer[4096];
    for (ssize_t size = 0; (size = read(rank.reports.get(), buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(size));
    return RankReport::from(text);
  }

  [[gnu::cold]] void pass_on(int signal) {
    if (!ends_job(signal)) return kill_running(signal);
    const bool again = outcome_.signal != 0;
    note(signal);
    if (again || stage_ == Stage::killing) return kill_all();
    if (stage_ == Stage::stopping) return;  // for another reason
    outcome_.status = 128 + signal;
    console_.say(running_ == 0 ? format("%s: all ranks have ended", signal_name(signal).c_str())
                               : format("%s: stopping %d %s", signal_name(signal).c_str(), running_,
                                        running_ == 1 ? "rank" : "ranks"));
    stop(signal);
  }
  /// Records the signal: no restart follows.
  void note(int signal) {
    outcome_.signal = signal;
    if (outcome_.status == lost_peer_status) outcome_.status = 128 + signal;
  }

  /// Stops the ranks for a new round of all machines.
  void form_anew() {
    if (stage_ != Stage::watching || suspect_) return;
    outcome_.status = lost_peer_status;
    console_.say(format("%s: stopping %d %s", interrupted_by_.load(), running_, running_ == 1 ? "rank" : "ranks"));
    stop(SIGTERM);
  }

  void stop(int signal) {
    stage_ = Stage::stopping;
    deadline_ = Clock::now() + group_.grace;
    kill_running(signal);
    kill_running(SIGCONT);  // a stopped process receives no other signal
  }
  void kill_all() {
    stage_ = Stage::killing;
    deadline_ = Clock::now() + Milliseconds(1'500);
    kill_running(SIGKILL);
  }
  void kill_running(int signal) {
    for (const Rank& rank : ranks_) {
      if (rank.running) kill(rank.pid, signal);
    }
  }

  const RankGroup& group_;
  Console& console_;
  SignalPipe signals_;
  RankOutput output_;
  std::vector<Rank> ranks_;
  Fd listener_;  ///< machine 0's
  Fd nothing_;   ///< stdin of all ranks but 0
  Fd doors_;     ///< a file in memory, with `doors_bytes` for each rank
  int port_ = 0, running_ = 0;
  Life newest_;  ///< the newest report of all ranks
  std::vector<Clock::time_point> replaced_, killed_early_;
  Stage stage_ = Stage::watching;
  const Rank* suspect_ = nullptr;  ///< the best explanation so far
  std::string token_;              ///< a secret of this job only; empty if the starter has set one
  std::optional<Clock::time_point> deadline_;
  std::atomic<const char*> interrupted_by_{""};
  GroupOutcome outcome_;
};

/// The minimum duration of an attempt, so that a program that fails at once does not keep the machine busy.
inline constexpr std::chrono::milliseconds shortest_attempt{200};

/// No restart for a wrong option, which stays wrong, and after a signal, whose sender wants an end.
inline bool worth_a_restart(const GroupOutcome& outcome) {
  return outcome.status != 0 && outcome.status != 2 && outcome.signal == 0;
}

}  // namespace detail

/// Supervises the group, and restarts all its ranks after a failure, up to `group.max_restarts` times and at most once
/// in 200 ms; a program loses its work since its newest checkpoint. A wrong option (exit status 2) and a signal to this
/// process end the job at once. The ranks of other machines notice the loss, fail, and are restarted by their own
/// supervisors; they meet again at the same address. Returns the status of the last attempt.
///
/// If the reader of the output stops, ranks are still supervised (see Console). At the end of the job the supervisor
/// waits for the reader; after a signal for at most `group.grace`.
[[gnu::cold]] inline int run_job(RankGroup group) {
  detail::Console console;
  for (group.restart = 0;; ++group.restart) {
    const auto next = std::chrono::steady_clock::now() + detail::shortest_attempt;
    group.attempt = group.restart;
    const auto outcome = detail::Supervisor(group, console).run();
    if (outcome.signal != 0) console.finish(group.grace);
    if (!detail::worth_a_restart(outcome) || group.restart >= group.max_restarts)
      return console.status_after(outcome.status);
    console.say(detail::format("restart %d of %d", group.restart + 1, group.max_restarts));
    std::this_thread::sleep_until(next);
  }
}

}  // namespace chorus
