#pragma once
/// `Processes`: the living ranks of a job, each a process.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chorus/comm/connect.hpp>
#include <chorus/launch/supervisor_link.hpp>
#include <chorus/parallel/elastic/door.hpp>
#include <chorus/parallel/elastic/members.hpp>
#include <chorus/parallel/elastic/messages.hpp>
#include <chorus/parallel/elastic/pulse.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
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

}  // namespace detail

/// Each process has a Door. A round: each rank goes to the door of the first rank that lives, which is the chair. The
/// chair waits until each rank has come or is lost, and lets newcomers in. It sends the new list of ranks, its View, to
/// all; then they meet as at a job's start. If the chair dies, the next one takes its place. A rank that has taken part
/// in a later epoch brings its View along. If one dies before all have met, all begin another round.
///
/// A rank is proven to be dead if nobody listens at its door any more, or if it was ended here. An epoch needs more
/// than half of the last epoch's ranks, without those; at exactly half it needs the first of them. So of two parts of a
/// divided network one goes on at most.
class Processes final : public Members, private detail::Door {
 public:
  /// `world`: as for `connect`, which meets the ranks of the first epoch. `doors`: HOST:PORT of some living ranks, with
  /// spaces between them, for a process that joins a job; the launcher gives them to one that it starts in a lost
  /// one's place. Throws UsageError for options out of range.
  explicit Processes(const comm::World& world, const Options& options = {},
                     const std::string& doors = detail::doors_from_environment())
      : Door(world, options, doors) {}
  ~Processes() override {
    if (epoch > 0) SupervisorLink::of_process().lives(epoch, view_.rank_of(card_.id), "");
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
  using Hello = detail::Hello;
  using View = detail::View;
  using Card = detail::Card;
  using Pulse = detail::Pulse;

  /// From the next call of `regroup` on, or in it, these are the ranks.
  void adopt(const View& view) {
    know(view);
    epoch = view.epoch;
  }

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

  std::string why_;
  comm::Socket chair_line_;                ///< to the chair; its end calls the meeting off
  std::map<std::uint64_t, Arrival> came_;  ///< the chair's: ranks
  std::deque<Arrival> newcomers_;
  comm::Socket listener_;  ///< the chair's: where the ranks meet
};

}  // namespace chorus::elastic
