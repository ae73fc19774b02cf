#pragma once
/// `Door`: where others reach a process of an elastic job, and what it knows of them.

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/meeting/acceptor.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/launch/supervisor_link.hpp>
#include <chorus/parallel/elastic/members.hpp>
#include <chorus/parallel/elastic/messages.hpp>
#include <chorus/parallel/elastic/pulse.hpp>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::elastic::detail {

/// Throws UsageError for what is no address and port.
inline comm::Address door_of(std::string_view text) {
  const auto colon = std::min(text.rfind(':'), text.size());
  const auto address = comm::Address::in_numbers(comm::detail::without_brackets(std::string(text.substr(0, colon))));
  const auto port = chorus::detail::whole_number(text.substr(std::min(colon + 1, text.size())), 1, 65535);
  check<UsageError>(address && port, "elastic: expected a door as 10.0.0.1:4000, got '", printable(text), "'");
  return address->with_port(*port);
}

/// Ends a process of this machine that doesn't answer. Returns whether it has ended.
inline bool end_silent(const Card& card) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, card.pid, 0));
  if (fd < 0) return errno == ESRCH;
  // While somebody listens at its door, the number is still that process's.
  const auto line = comm::Socket::connect(card.address(), comm::Clock::now() + std::chrono::seconds(1));
  pollfd exit{fd, POLLIN, 0};
  bool ended = (!line && errno == ECONNREFUSED) || poll(&exit, 1, 0) > 0;
  if (!ended && line && syscall(SYS_pidfd_send_signal, fd, SIGKILL, nullptr, 0) == 0) {
    chorus::detail::say(cat("elastic: killed process ", card.pid, ", which gave no sign of life"));
    ended = poll(&exit, 1, 1'000) > 0;
  }
  close(fd);
  return ended;
}

/// A socket at which a thread answers at once. A second thread asks at the door of the next rank whether that lives
/// (see Pulse), and ends a silent process if both are on one machine, so that its connections break. On another machine
/// a silent process is only suspected: then the others' calls end.
class Door {
 protected:
  /// As for Processes.
  Door(const comm::World& world, const Options& options, const std::string& doors)
      : world_(world),
        options_(options),
        slice_(std::max<int>(1, static_cast<int>(options.lost_after.count()) / Pulse::slices)) {
    comm::check_timeout("elastic: lost_after", options.lost_after);
    check<UsageError>(options.at_least >= 1 && options.at_least <= comm::max_ranks, "elastic: at_least is ",
                      options.at_least, ", expected 1 to ", comm::max_ranks);
    for (std::size_t at = 0, end = 0; at < doors.size(); at = end + 1) {
      end = std::min(doors.find(' ', at), doors.size());
      if (end > at) doors_.push_back(door_of(std::string_view(doors).substr(at, end - at)));
    }
    auto near = world_;
    if (!doors_.empty()) {
      near.rank = 1;
      near.master_addr = doors_.front().host();
      near.master_port = doors_.front().port();
    }
    door_ = comm::Socket::listen(comm::detail::own_address(near).with_port(0));
    encrypted_ = comm::detail::check_token(world.token, door_.local());
    card_.id = comm::random_key();
    const char* name = chorus::detail::env("CHORUS_HOST_ID");  // as for HybridTransport
    card_.machine = name != nullptr ? comm::detail::fnv_1a(name) : comm::detail::machine_id();
    card_.pid = getpid();
    card_.set_address(door_.local());
    if (doors_.empty()) SupervisorLink::of_process().meets();
    at_door_ = chorus::detail::start_thread("elastic", [this] { serve(); });
    try {
      watcher_ = chorus::detail::start_thread("elastic", [this] { watch(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;
  ~Door() { stop(); }

  using Clock = comm::Clock;
  struct Arrival {
    comm::Socket line;
    Hello hello;
  };
  struct Event {  // an eventfd
    const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    Event() { check<CommError>(fd >= 0, "elastic: eventfd: ", std::strerror(errno)); }
    Event(const Event&) = delete;
    ~Event() { close(fd); }
    void set() const { eventfd_write(fd, 1); }
    void clear() const {
      eventfd_t ignored = 0;
      eventfd_read(fd, &ignored);
    }
    pollfd event() const { return {fd, POLLIN, 0}; }
  };

  // ---- the threads

  void stop() {
    stopping_.set();
    if (at_door_.joinable()) at_door_.join();
    if (watcher_.joinable()) watcher_.join();
  }

  void serve() {
    comm::Acceptor acceptor(door_, sizeof(Hello), card_.id, encrypted_, world_.token);
    const pollfd stopping = stopping_.event();
    while (true) {
      try {
        auto accepted = acceptor.next(Clock::now() + std::chrono::hours(1), std::span(&stopping, 1));
        if (accepted.socket)
          take(std::move(accepted));
        else if (auto event = stopping; poll(&event, 1, 0) > 0)
          return;
      } catch (const Error& error) {
        chorus::detail::say(cat("elastic: at the door: ", error.what()));
      }
    }
  }

  void take(comm::Accepted accepted) {
    const auto hello = accepted.hello_as<Hello>();
    if (hello.magic != magic || !comm::detail::proves(hello, accepted.nonce, world_.token)) return;
    const bool joins = hello.kind == Hello::joins;
    std::unique_lock lock(mutex_);
    const bool evicted = hello.epoch > 0 && hello.epoch <= view_.epoch && view_.rank_of(hello.id) < 0;
    if (evicted || hello.kind == Hello::asks || (joins && first_of(view_, gone_).id != card_.id)) {
      const View view = view_;
      lock.unlock();
      return answer(accepted.socket, hello, view, evicted ? View::evicted : View::elsewhere, taken_for_lost(view));
    }
    arrived_.push_back({std::move(accepted.socket), hello});
    if (joins && view_.count < comm::max_ranks) knocked_ = true;
    bell_.set();
  }

  void watch() {
    std::optional<Pulse> pulse;
    pollfd events[2] = {stopping_.event(), {}};
    while (true) {
      const auto next = successor();
      if (next.id == 0) pulse.reset();
      if (next.id != 0 && (!pulse || pulse->card().id != next.id)) pulse.emplace(next);
      events[1] = pulse ? pulse->event() : pollfd{-1, 0, 0};
      const int n = poll(events, 2, slice_);
      if (events[0].revents != 0) return;
      if (pulse && n >= 0) lose(next, pulse->look(events[1].revents, n == 0));
    }
  }

  /// The next living rank; an id of 0 if there is none.
  Card successor() {
    const std::lock_guard lock(mutex_);
    const int own = view_.rank_of(card_.id);
    for (int step = 1; own >= 0 && step < view_.count; ++step) {
      const auto& card = view_.cards[static_cast<std::size_t>((own + step) % view_.count)];
      if (!gone_.contains(card.id)) return card;
    }
    return {};
  }

  // ---- what is known of the others

  static Card first_of(const View& view, const std::map<std::uint64_t, bool>& gone) {
    for (const auto& card : view.members())
      if (!gone.contains(card.id)) return card;
    return {};
  }
  Card first_alive() {
    const std::lock_guard lock(mutex_);
    return first_of(view_, gone_);
  }
  bool is_gone(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    return gone_.contains(id);
  }

  /// Notes that a process has ended, or is silent. Returns whether it is lost.
  bool lose(const Card& card, Pulse::Sign sign) {
    if (sign != Pulse::Sign::gone && sign != Pulse::Sign::silent) return false;
    bool proven = sign == Pulse::Sign::gone;
    if (!proven && card.machine == card_.machine) proven = end_silent(card);
    std::shared_ptr<comm::Engine> engine;
    {
      const std::lock_guard lock(mutex_);
      if (view_.count > 0 && view_.rank_of(card.id) < 0) return true;  // of an earlier epoch
      gone_[card.id] = proven;
      suspects_ = suspects_ || !proven;
      if (!proven) engine = engine_.lock();
    }
    if (engine)
      engine->abort(cat("process ", card.pid, " gave no sign of life for ", options_.lost_after.count(), " ms"));
    return true;
  }

  /// From the next call of `regroup` on, or in it, these are the ranks.
  void know(const View& view) {
    const std::lock_guard lock(mutex_);
    view_ = view;
    gone_.clear();
    suspects_ = false;
  }

  static std::string taken_for_lost(const View& view) {
    return cat("elastic: this process was taken for lost: the others are in epoch ", view.epoch, " without it");
  }

  // ---- messages

  /// A connection to a process's door, after the hello; empty if there is none by the deadline. Sets `to.id` if it is
  /// not known.
  comm::Socket call(Card& to, Hello::Kind kind, comm::Deadline deadline) {
    const auto door = to.address();
    auto line = comm::Socket::connect(door, deadline);
    comm::Challenge challenge;
    if (!line || !line.receive_all(comm::bytes_of(challenge), deadline)) return {};
    if (to.id != 0 && challenge.magic != to.id) return {};
    to.id = challenge.magic;
    comm::detail::follow(challenge, line, encrypted_, world_.token, "elastic", door);
    Hello hello{.kind = kind,
                .port = door_.local().port(),
                .id = card_.id,
                .machine = card_.machine,
                .epoch = view_.epoch,
                .pid = card_.pid};
    comm::fill_random(hello.nonce);
    hello.proof = comm::detail::proof_of(hello, challenge.nonce, world_.token);
    nonce_ = hello.nonce;
    return line.send_all(comm::bytes_of(hello), deadline) ? std::move(line) : comm::Socket();
  }

  /// Sends a View to one that has come, or the reason why there is none.
  void answer(const comm::Socket& line, const Hello& hello, View view, View::Verdict verdict,
              std::string_view why = {}) {
    view.verdict = verdict;
    view.why = comm::FixedText<1024>(why);
    view.proof = comm::detail::proof_of(view, hello.nonce, world_.token);
    line.send_all(comm::bytes_of(view), Clock::now() + std::chrono::milliseconds(500));
  }

  /// The answer of the process at the other end of `line`; nothing if the connection ends, or the process is lost.
  std::optional<View> hear(const comm::Socket& line, const Card& from, std::optional<comm::Deadline> deadline) {
    View view;
    Pulse pulse(from);
    for (std::size_t got = 0;;) {
      const auto n = line.try_receive(comm::bytes_of(view).subspan(got));
      if (n < 0) return std::nullopt;
      if ((got += static_cast<std::size_t>(n)) == sizeof view) break;
      if (n > 0) continue;
      pollfd events[2] = {{line.fd(), line.needs(POLLIN), 0}, pulse.event()};
      const int ready = poll(events, 2, slice_);
      if (ready >= 0 && lose(from, pulse.look(events[1].revents, ready == 0))) return std::nullopt;
      check<TimeoutError>(!deadline || Clock::now() < *deadline, "elastic: process ", from.pid,
                          " lives, but the ranks did not meet there within ", world_.timeout.count(), " ms");
    }
    if (!view.sound() || !comm::detail::proves(view, nonce_, world_.token)) return std::nullopt;
    const auto why = printable(view.why.view(), 1000);
    check<Evicted>(view.verdict != View::evicted, why);
    check<TooFewRanks>(view.verdict != View::too_few, why);
    check<TimeoutError>(view.verdict != View::late, why);
    check<CommError>(view.verdict != View::failed, why);
    return view;
  }

  /// Throws if a rank has ended by an error of its own.
  void check_failed() {
    std::deque<Arrival> failed;
    {
      const std::lock_guard lock(mutex_);
      for (auto& one : arrived_)
        if (one.hello.kind == Hello::fails) failed.push_back(std::move(one));
      std::erase_if(arrived_, [](const Arrival& one) { return !one.line; });
    }
    for (const auto& [line, hello] : failed) {
      comm::FixedText<1024> text;
      if (!line.receive_all(comm::bytes_of(text), Clock::now() + options_.lost_after)) continue;
      chorus::fail<CommError>("rank ", view_.rank_of(hello.id), " (process ", hello.pid,
                              ") failed: ", printable(text.view(), 1000));
    }
  }

  /// A rank lives and does not come: throws Evicted if it knows a later epoch without this process.
  void ask(Card card) {
    const auto line = call(card, Hello::asks, Clock::now() + std::chrono::milliseconds(slice_));
    if (line) hear(line, card, std::nullopt);
  }

  /// Waits for a sign of life.
  void examine(const Card& card) {
    Pulse pulse(card);
    while (!is_gone(card.id)) {
      auto event = pulse.event();
      const int n = poll(&event, 1, slice_);
      if (n < 0) continue;
      const auto sign = pulse.look(event.revents, n == 0);
      if (sign == Pulse::Sign::alive || lose(card, sign)) return;
    }
  }

  comm::World world_;
  const Options options_;
  const int slice_;                   ///< ms
  std::vector<comm::Address> doors_;  ///< a newcomer's
  comm::Socket door_;
  bool encrypted_ = false;
  Card card_;
  Event stopping_, bell_;  ///< for both threads; at each arrival

  std::mutex mutex_;                    ///< of these:
  View view_;                           ///< changes only in `regroup`, whose thread reads it without
  std::map<std::uint64_t, bool> gone_;  ///< lost ranks of `view_`, and whether they are proven to be dead
  std::deque<Arrival> arrived_;
  std::weak_ptr<comm::Engine> engine_;  ///< of the epoch's communicator

  std::atomic<bool> knocked_{false};
  std::atomic<bool> suspects_{false};  ///< a silent process on another machine, in this round
  comm::Nonce nonce_{};                ///< of this process's last hello

 private:
  std::thread at_door_, watcher_;
};

}  // namespace chorus::elastic::detail
