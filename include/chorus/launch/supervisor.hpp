#pragma once
/// Starts the ranks of one machine as processes and supervises them: the first that fails is named and ends all,
/// signals are passed on, and no rank outlives the supervisor, but in a job that outlives its ranks.
/// `supervisor_link.hpp` is the rank's end.

#include <fcntl.h>
#include <signal.h>
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
#include <chorus/launch/job_file.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/rank_output.hpp>
#include <chorus/launch/rank_process.hpp>
#include <chorus/launch/replacements.hpp>
#include <chorus/launch/signal_pipe.hpp>
#include <chorus/launch/stand_by.hpp>
#include <chorus/launch/supervised_rank.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// How a group ended.
struct GroupOutcome {
  int status = 0;        ///< 0, the exit status of the rank that failed first, or 128 + a signal's number
  int failed_rank = -1;  ///< the rank that failed first, -1 if none did
  int signal = 0;        ///< the signal that was sent to the supervisor
  bool met = false;      ///< whether the job outlives its ranks, and these have met
  bool early = false;    ///< a rank was killed before they had met in such a job: nothing is lost if all start anew
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
/// continue. In the place of a killed one another process is started (see Replacements, with `group.replacements`),
/// while ranks are left to let it in.
///
/// Such a job outlives its supervisor, too: another process stands by. With an `estate` this one takes over the ranks
/// of a supervisor that was killed. They are not its children: it sees that they end, and takes from their last words
/// how.
class Supervisor {
 public:
  Supervisor(const RankGroup& group, Console& console, std::optional<Estate> estate = std::nullopt)
      : group_(group),
        console_(console),
        signals_(all_signals(group.signals)),
        takes_over_(estate.has_value()),
        file_(takes_over_ ? std::move(estate->file) : JobFile::create()),
        output_(group, console, takes_over_ ? std::move(estate->pipes) : std::vector<Fd>()),
        ranks_(static_cast<std::size_t>(group.ranks)),
        replacements_(group.replacements) {}
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  /// After an exception no rank is left running.
  ~Supervisor() {
    for (Rank& rank : ranks_) {
      if (!rank.running) continue;
      rank.send(SIGKILL);
      if (!rank.adopted) waitpid(rank.pid, nullptr, 0);
    }
  }

  /// Call it once. `on_epoch` is called in a job that outlives its ranks, after these have met. Throws Error if a
  /// process cannot be started.
  GroupOutcome run(std::function<void(const RankLife&)> on_epoch = {}) {
    on_epoch_ = std::move(on_epoch);
    newest_.doors = group_.doors;
    takes_over_ ? take_over() : start_all();
    while (running_ > 0 || undecided() || vacant() != nullptr) {
      Rank* const place = vacant();
      const int signal = signals_.wait(place != nullptr ? place->vacant : deadline_, adopted());
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
    outcome_.met = newest_.epoch > 0;
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
  using Rank = SupervisedRank;

  static std::vector<int> all_signals(std::vector<int> signals) {
    for (const int signal : {SIGUSR1, SIGUSR2})
      if (std::find(signals.begin(), signals.end(), signal) == signals.end()) signals.push_back(signal);
    return signals;
  }
  bool ends_job(int signal) const {
    return std::find(group_.signals.begin(), group_.signals.end(), signal) != group_.signals.end();
  }

  int local(const Rank& rank) const { return static_cast<int>(&rank - ranks_.data()); }
  int number(const Rank& rank) const { return group_.node_rank * group_.ranks + local(rank); }
  std::string name(const Rank& rank) const {
    return rank.pid < 0 ? format("rank %d", number(rank)) : format("rank %d (pid %d)", number(rank), rank.pid);
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
    for (Rank& rank : ranks_) {
      rank.streams = output_.add(local(rank));
      start(rank, group_.doors);
    }
    output_.start();
  }

  /// The ranks that live are those that hold their locks; of the others it is found in their last words how they ended.
  [[gnu::cold]] void take_over() {
    port_ = group_.master_port;
    nothing_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC), "/dev/null");
    for (Rank& rank : ranks_) {
      rank.streams = output_.add(local(rank));
      rank.adopt(file_, local(rank));
      ++running_;
    }
    output_.start();
    if (JobFile::noted(file_.fd(), JobFile::ends)) {
      outcome_.status = 128 + SIGKILL;
      note(SIGKILL);
      kill_all();
    }
    reap();
  }
  /// The pidfds of adopted ranks that run.
  std::vector<int> adopted() const {
    std::vector<int> list;
    for (const Rank& rank : ranks_)
      if (rank.running && rank.adopted) list.push_back(rank.end.get());
    return list;
  }

  /// `doors`: for a process that takes a lost one's place.
  void start(Rank& rank, const std::string& doors) {
    const int local_rank = local(rank);
    file_.clear(local_rank);
    const RankDescriptors given{.report = file_.fd(),
                                .listener = listener_.get(),
                                .input = nothing_.get(),
                                .output = rank.streams.out.get(),
                                .err = rank.streams.err.get()};
    rank.pid = start_rank(group_, local_rank, rank_environment(group_, local_rank, port_, token_, given, doors), given);
    rank.running = true;
    rank.adopted = false;
    rank.end.reset();
    rank.wait_status = 0;
    rank.report = {};
    rank.replaces = !doors.empty();
    rank.told = false;
    ++running_;
  }

  /// Whether the others may continue without a rank that has ended badly. A killed one's place becomes vacant.
  bool goes_on(Rank& rank) {
    const auto life = file_.life_of(local(rank));
    if (life.doors.empty() && !(rank.replaces && life.epoch == 0)) return false;
    if (!WIFSIGNALED(rank.wait_status) && !rank.lost_peers()) return false;
    if (life.epoch > 0 && life.rank == 0) rank.led = life.epoch;
    if (WIFSIGNALED(rank.wait_status)) rank.vacant = Clock::now() + rank.patience();
    if (WIFSIGNALED(rank.wait_status) && life.epoch == 0) replacements_.note_early_loss(Clock::now());
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
      std::string line = name(place) + " " + place.killed() + "; the others continue";
      place.vacant.reset();
      if (replacements_.any()) {
        place.vacant = replacements_.next(now);
        line += ", and another process takes its place";
        const auto wait = std::chrono::ceil<std::chrono::seconds>(*place.vacant - now).count();
        if (wait > 1) line += format(" in %d s", static_cast<int>(wait));
      }
      return console_.say(line);
    }
    place.vacant.reset();
    replacements_.note_start(now);
    try {
      start(place, newest_.doors);
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
      console_.say(name(rank) + " was lost; the others had ended, exit status 0");
    }
  }

  /// Reads in which epoch the ranks are.
  void hear() {
    const long before = newest_.epoch;
    for (const Rank& rank : ranks_)
      if (auto life = file_.life_of(local(rank)); life.epoch > newest_.epoch) newest_ = std::move(life);
    if (newest_.epoch > before && on_epoch_) on_epoch_(newest_);
  }

  [[gnu::cold]] void reap() {
    hear();
    for (Rank& rank : ranks_) {
      if (!rank.running || !rank.has_ended(file_, local(rank))) continue;
      hear();  // its last words
      rank.running = false;
      --running_;
      if (rank.wait_status == 0) doubt(rank);
      if (&rank == &ranks_.front()) close_listener();
      if (stage_ == Stage::watching && rank.wait_status != 0 && !goes_on(rank)) suspect(rank);
      if (!rank.vacant) rank.streams = {};  // its reader sees the end
    }
    if (running_ == 0 && stage_ == Stage::watching && !suspect_ && vacant() == nullptr) conclude();
    // The signal that has ended all of them may arrive here later.
    const bool all_told = running_ == 0 && !(suspect_ && WIFSIGNALED(suspect_->wait_status));
    if (undecided() && (all_told || Clock::now() >= *deadline_)) judge();
    if (newest_.epoch == 0 || stage_ != Stage::watching || running_ == 0) return;
    try {
      stand_by_.keep(group_, port_, token_, file_, output_.pipes());
    } catch (const Error& error) {
      console_.say(error.what());
    }
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

  /// Other ranks need this time to write their flight records when they learn of the loss.
  static Milliseconds time_to_record() { return Milliseconds(comm::FlightRecorder::wanted() ? 500 : 0); }

  void suspect(const Rank& rank) {
    const auto better = rank.patience();
    if (suspect_ && suspect_->patience() <= better) return;
    const auto until = Clock::now() + better + time_to_record();
    suspect_ = &rank;
    if (!deadline_ || until < *deadline_) deadline_ = until;
  }

  /// Names the rank that failed first and stops the others.
  [[gnu::cold]] void judge() {
    const bool lost_peer = suspect_->lost_peers();
    for (const Rank& rank : ranks_)
      if (lost_peer && !rank.running && rank.lost_peers() && rank.report.when < suspect_->report.when) suspect_ = &rank;
    const int status = suspect_->wait_status;
    outcome_.early = newest_.epoch == 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && group_.nodes == 1 &&
                     std::ranges::any_of(ranks_, [&](const Rank& rank) { return file_.life_of(local(rank)).meets; });
    outcome_.failed_rank = number(*suspect_);
    outcome_.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    say_report(*suspect_);
    std::string line = name(*suspect_) + " ";
    line += WIFSIGNALED(status)
                ? suspect_->killed()
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
    file_.note(JobFile::ends);
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
      if (rank.running) rank.send(signal);
    }
  }

  const RankGroup& group_;
  Console& console_;
  SignalPipe signals_;
  const bool takes_over_;
  JobFile file_;
  RankOutput output_;
  std::vector<Rank> ranks_;
  Fd listener_;  ///< machine 0's
  Fd nothing_;   ///< stdin of all ranks but 0
  int port_ = 0, running_ = 0;
  RankLife newest_;  ///< the newest of all ranks
  Replacements replacements_;
  StandBy stand_by_;
  Stage stage_ = Stage::watching;
  const Rank* suspect_ = nullptr;  ///< the best explanation so far
  std::string token_;              ///< a secret of this job only; empty if the starter has set one
  std::optional<Clock::time_point> deadline_;
  std::atomic<const char*> interrupted_by_{""};
  GroupOutcome outcome_;
  std::function<void(const RankLife&)> on_epoch_;
};

}  // namespace detail

}  // namespace chorus
