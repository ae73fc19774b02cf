#pragma once
/// `Processes`: the living ranks of a job, each a process.

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
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
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

namespace chorus::elastic {

namespace detail {

/// The doors at which this process knocks, if its launcher has started it in the place of a lost one: HOST:PORT, with
/// spaces between them, in CHORUS_ELASTIC_DOORS. Removed when read: processes that this one starts are of another job.
inline std::string doors_from_environment() {
  const char* text = chorus::detail::env("CHORUS_ELASTIC_DOORS");
  std::string doors = text == nullptr ? "" : text;
  unsetenv("CHORUS_ELASTIC_DOORS");
  return doors;
}

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

}  // namespace detail

/// Each process has a door: a socket at which a thread answers at once. A second thread asks at the door of the next
/// rank whether that lives (see Pulse), and ends a silent process if both are on one machine, so that its connections
/// break. On another machine a silent process is only suspected: then the others' calls end.
///
/// A round: each rank goes to the door of the first rank that lives, which is the chair. The chair waits until each
/// rank has come or is lost, and lets newcomers in. It sends the new list of ranks, its View, to all; then they meet as
/// at a job's start. If the chair dies, the next one takes its place. A rank that has taken part in a later epoch
/// brings its View along. If one dies before all have met, all begin another round.
///
/// A rank is proven to be dead if nobody listens at its door any more, or if it was ended here. An epoch needs more
/// than half of the last epoch's ranks, without those; at exactly half it needs the first of them. So of two parts of a
/// divided network one goes on at most.
class Processes final : public Members {
 public:
  /// `world`: as for `connect`, which meets the ranks of the first epoch. `doors`: HOST:PORT of some living ranks, with
  /// spaces between them, for a process that joins a job; the launcher gives them to one that it starts in a lost
  /// one's place. Throws UsageError for options out of range.
  explicit Processes(const comm::World& world, const Options& options = {},
                     const std::string& doors = detail::doors_from_environment())
      : world_(world),
        options_(options),
        slice_(std::max<int>(1, static_cast<int>(options.lost_after.count()) / detail::Pulse::slices)) {
    comm::check_timeout("elastic: lost_after", options.lost_after);
    check<UsageError>(options.at_least >= 1 && options.at_least <= comm::max_ranks, "elastic: at_least is ",
                      options.at_least, ", expected 1 to ", comm::max_ranks);
    for (std::size_t at = 0, end = 0; at < doors.size(); at = end + 1) {
      end = std::min(doors.find(' ', at), doors.size());
      if (end > at) doors_.push_back(detail::door_of(std::string_view(doors).substr(at, end - at)));
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
  ~Processes() override {
    if (epoch > 0) SupervisorLink::of_process().lives(epoch, view_.rank_of(card_.id), "");
    stop();
  }

  comm::AnyCommunicator regroup(std::string_view why) override {
    {
      const std::lock_guard lock(mutex_);
      engine_.reset();
    }
    why_ = why;
    const bool first = view_.count == 0;
    if (first && doors_.empty()) return begin();
    auto deadline = Clock::now() + world_.timeout;
    while (true) {
      check_failed();
      chair_line_ = comm::Socket();
      came_.clear();
      const auto chair = first_alive();
      const bool formed = view_.count == 0       ? knock(deadline)
                          : chair.id == card_.id ? preside(deadline)
                                                 : attend(chair, deadline);
      try {
        if (formed) return meet();
      } catch (const CommError&) {  // one has been lost since
        if (Clock::now() >= deadline) throw;
      }
      check<TimeoutError>(view_.count == 0 || Clock::now() < deadline, "elastic: the ranks did not meet within ",
                          world_.timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(view_.count == 0 ? 10 : 1));
    }
  }

  bool knocked() override { return knocked_.load(std::memory_order_relaxed); }

  /// HOST:PORT of each rank's door, with spaces between them: for a process that joins.
  std::string doors() const {
    std::string text;
    for (const auto& card : view_.members()) text += cat(text.empty() ? "" : " ", card.address());
    return text;
  }

  void fail(std::string_view why) noexcept override {
    try {
      comm::FixedText<1024> text(why);
      for (auto card : view_.members()) {
        if (card.id == card_.id || is_gone(card.id)) continue;
        const auto deadline = Clock::now() + std::chrono::milliseconds(200);
        const auto line = call(card, Hello::fails, deadline);
        if (line) line.send_all(std::as_writable_bytes(std::span(&text, 1)), deadline);
      }
    } catch (...) {  // they learn it by the end of this process
    }
  }

 private:
  using Clock = comm::Clock;
  using Hello = detail::Hello;
  using View = detail::View;
  using Card = detail::Card;
  using Pulse = detail::Pulse;
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
    if (hello.magic != detail::magic || !comm::detail::proves(hello, accepted.nonce, world_.token)) return;
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
    if (!proven && card.machine == card_.machine) proven = detail::end_silent(card);
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
  void adopt(const View& view) {
    const std::lock_guard lock(mutex_);
    view_ = view;
    gone_.clear();
    suspects_ = false;
    epoch = view.epoch;
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

  // ---- the round

  /// The first epoch.
  comm::AnyCommunicator begin() {
    auto communicator = comm::connect(world_);
    std::vector<std::uint8_t> mine(sizeof card_), all(sizeof card_ * static_cast<std::size_t>(world_.size));
    std::memcpy(mine.data(), &card_, sizeof card_);
    communicator.all_gather(std::span<const std::uint8_t>(mine), std::span(all));
    View view;
    view.epoch = 1;
    view.count = world_.size;
    std::memcpy(view.cards.data(), all.data(), all.size());
    check<CommError>(view.sound(), "elastic: the ranks' addresses are damaged");
    view.key = view.cards[0].id;
    adopt(view);
    return begun(std::move(communicator));
  }

  comm::AnyCommunicator begun(comm::AnyCommunicator communicator) {
    {
      const std::lock_guard lock(mutex_);
      engine_ = communicator.handle();
    }
    SupervisorLink::of_process().lives(epoch, communicator.rank(), doors());
    return communicator;
  }

  /// The meeting of the ranks of `view_`, at the chair's.
  comm::AnyCommunicator meet() {
    auto world = world_;
    world.rank = view_.rank_of(card_.id);
    world.size = view_.count;
    world.listen_fd = listener_.release();
    world.master_addr = view_.cards[0].address().host();
    world.master_port = view_.port;
    world.purpose = cat("epoch ", view_.epoch, " ", view_.key);
    world.called_off = [this] {
      if (suspects_ || (chair_line_ && chair_line_.hung_up())) return true;
      return std::ranges::any_of(came_, [](const auto& one) { return one.second.line.hung_up(); });
    };
    return begun(comm::connect(world));
  }

  /// A newcomer: returns true once it has been let in. It waits as long as the chair lives; that moves `deadline`.
  bool knock(comm::Deadline& deadline) {
    bool answered = false;
    const auto doors = std::exchange(doors_, {});
    for (const auto& door : doors) {
      Card card;
      card.set_address(door);
      auto line = call(card, Hello::joins, Clock::now() + options_.lost_after);
      if (!line || card.id == card_.id) continue;  // a lost rank's port may be this process's now, or a newcomer's
      const auto begin = Clock::now();
      const auto view = hear(line, card, std::nullopt);
      deadline += Clock::now() - begin;
      answered = answered || !view || view->count > 0;
      if (!view || view->count == 0) continue;
      if (view->verdict == View::formed && view->rank_of(card_.id) >= 0) {
        chair_line_ = std::move(line);
        return adopt(*view), true;
      }
      for (const auto& member : view->members()) doors_.push_back(member.address());
      break;
    }
    check<CommError>(answered,
                     "elastic: no rank of the job is left at the doors that this process was given: the job has ended");
    check<TimeoutError>(Clock::now() < deadline, "elastic: no rank has let this process in within ",
                        world_.timeout.count(), " ms: check that it has the job's CHORUS_TOKEN");
    if (doors_.empty()) doors_ = doors;
    return false;
  }

  /// Comes to the chair. Returns true with the new View; false if the chair is lost, or another round is needed.
  bool attend(Card chair, comm::Deadline deadline) {
    auto line = call(chair, Hello::comes, Clock::now() + options_.lost_after);
    if (!line || !line.send_all(comm::bytes_of(view_), Clock::now() + options_.lost_after))
      return examine(chair), false;
    const auto view = hear(line, chair, deadline + std::chrono::seconds(1));
    if (!view || view->verdict != View::formed || view->rank_of(card_.id) < 0) return examine(chair), false;
    chair_line_ = std::move(line);
    return adopt(*view), true;
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

  /// The chair's part. Returns true once it has sent the new View.
  bool preside(comm::Deadline deadline) {
    std::map<std::uint64_t, Pulse> pulses;
    std::vector<pollfd> events;
    while (true) {
      take_arrivals();
      std::erase_if(came_, [](const auto& one) { return one.second.line.hung_up(); });
      events.assign(1, bell_.event());
      std::vector<Pulse*> asked;
      std::string missing;
      for (int rank = 0; rank < view_.count; ++rank) {
        const auto& card = view_.cards[static_cast<std::size_t>(rank)];
        if (card.id == card_.id || came_.contains(card.id) || is_gone(card.id)) continue;
        missing += cat(missing.empty() ? "" : ", ", rank, " (process ", card.pid, ")");
        asked.push_back(&pulses.try_emplace(card.id, card).first->second);
        events.push_back(asked.back()->event());
      }
      if (asked.empty()) return conclude();
      if (Clock::now() >= deadline) {
        const auto late = cat("elastic: rank ", missing, " lives, but did not arrive within ", world_.timeout.count(),
                              " ms; they met because of: ", why_);
        answer_all(View::late, late);
        throw TimeoutError(late);
      }
      for (const auto& [id, one] : came_) events.push_back({one.line.fd(), POLLRDHUP, 0});
      const int n = poll(events.data(), events.size(), slice_);
      for (std::size_t i = 0; n >= 0 && i < asked.size(); ++i)
        if (!lose(asked[i]->card(), asked[i]->look(events[i + 1].revents, n == 0)) && n == 0) ask(asked[i]->card());
    }
  }

  void answer_all(View::Verdict verdict, std::string_view why = {}) {
    for (const auto& card : view_.members())
      if (const auto one = came_.find(card.id); one != came_.end())
        answer(one->second.line, one->second.hello, view_, verdict, why);
    if (verdict == View::formed) return;
    for (const auto& [line, hello] : newcomers_) answer(line, hello, view_, verdict, why);
  }

  /// Sorts those that have come to the door.
  void take_arrivals() {
    bell_.clear();
    try {
      check_failed();
    } catch (const CommError& error) {
      answer_all(View::failed, error.what());
      throw;
    }
    std::deque<Arrival> arrived;
    {
      const std::lock_guard lock(mutex_);
      arrived = std::exchange(arrived_, {});
    }
    for (auto& one : arrived) {
      const auto& hello = one.hello;
      View theirs;
      if (one.line.hung_up()) continue;
      if (hello.kind == Hello::joins && view_.rank_of(hello.id) < 0) {
        newcomers_.push_back(std::move(one));
        continue;
      }
      if (hello.kind == Hello::comes) {
        if (!one.line.receive_all(comm::bytes_of(theirs), Clock::now() + options_.lost_after) || !theirs.sound())
          continue;
        if (theirs.epoch > view_.epoch) {
          check<Evicted>(theirs.rank_of(card_.id) >= 0, taken_for_lost(theirs));
          adopt(theirs);
        }
      }
      const bool stranger = view_.rank_of(hello.id) < 0 || (theirs.epoch == view_.epoch && theirs.key != view_.key);
      if (stranger)
        answer(one.line, hello, view_, View::evicted, taken_for_lost(view_));
      else
        came_[hello.id] = std::move(one);
    }
  }

  /// All have come or are lost: decides about the new epoch.
  bool conclude() {
    int proven = 0, here = 0;
    bool leads = true;  // this is the first of those that may live
    for (int rank = 0; rank < view_.count; ++rank) {
      const std::lock_guard lock(mutex_);
      const auto& card = view_.cards[static_cast<std::size_t>(rank)];
      const auto lost = gone_.find(card.id);
      const bool dead = lost != gone_.end() && lost->second;
      proven += dead ? 1 : 0;
      here += card.id == card_.id || came_.contains(card.id) ? 1 : 0;
      if (rank < view_.rank_of(card_.id) && !dead) leads = false;
    }
    const int may_live = view_.count - proven;
    if (2 * here < may_live || (2 * here == may_live && !leads)) {
      const auto why = cat("elastic: ", here, " of ", may_live,
                           " ranks that may live are here: the others may continue without them");
      answer_all(View::failed, why);
      throw CommError(why);
    }
    View next;
    next.epoch = view_.epoch + 1;
    next.key = comm::random_key();
    for (const auto& card : view_.members())
      if (card.id == card_.id || came_.contains(card.id)) next.add(card);
    std::erase_if(newcomers_, [](const Arrival& one) { return one.line.hung_up(); });
    while (!newcomers_.empty() && next.count < comm::max_ranks) {
      auto& [line, hello] = newcomers_.front();
      Card card{.id = hello.id, .machine = hello.machine, .pid = hello.pid};
      card.set_address(line.remote().with_port(hello.port));
      next.add(card);
      came_[hello.id] = std::move(newcomers_.front());
      newcomers_.pop_front();
    }
    if (next.count < options_.at_least) {
      const auto why = cat("elastic: ", next.count, next.count == 1 ? " rank is" : " ranks are",
                           " left, expected at least ", options_.at_least, "; the last loss: ", why_);
      adopt(next);
      answer_all(View::too_few, why);
      throw TooFewRanks(why);
    }
    listener_ = comm::Socket::listen(door_.local().with_port(0));
    next.port = listener_.local().port();
    adopt(next);
    answer_all(View::formed);  // newcomers last: who knows of the epoch then are the old ranks
    const std::lock_guard lock(mutex_);
    knocked_ = next.count < comm::max_ranks &&
               std::ranges::any_of(arrived_, [](const Arrival& one) { return one.hello.kind == Hello::joins; });
    return true;
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

  // Those of a round.
  std::string why_;
  comm::Nonce nonce_{};                    ///< of this process's last hello
  comm::Socket chair_line_;                ///< to the chair; its end calls the meeting off
  std::map<std::uint64_t, Arrival> came_;  ///< the chair's: ranks
  std::deque<Arrival> newcomers_;
  comm::Socket listener_;  ///< the chair's: where the ranks meet

  std::thread at_door_, watcher_;
};

}  // namespace chorus::elastic
