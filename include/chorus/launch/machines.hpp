#pragma once
/// `Machines`: launchers that find and number each other, as torchrun's do with --rdzv-backend c10d. Machines may be
/// lost, join late, and return.

#include <algorithm>
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_server.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chorus/launch/console.hpp>
#include <chorus/launch/supervisor.hpp>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

namespace chorus {

/// Settings that all launchers of a job must share.
struct MachineOptions {
  int least = 1, most = 1;         ///< machines: nothing starts with fewer than `least`, none is taken beyond `most`
  std::string host = "127.0.0.1";  ///< an address of the machine at which they meet, which listens there
  int port = 29400;                ///< of `host`
  std::string local_addr;          ///< of this machine, for ranks to meet at if it is machine 0; empty: `host`
  std::chrono::milliseconds join_timeout{600'000};  ///< the wait for `least` machines, or for a place beyond `most`
  std::chrono::milliseconds last_call{30'000};      ///< the wait for more than `least`, or for one that may be lost
  std::chrono::milliseconds interval{100};          ///< between checks whether the others start a new round
};

namespace detail {

/// The machine that can listen at host:port holds a store and is machine 0; the others are numbered in order of
/// arrival. They meet in rounds, one before each start of the ranks. The store holds for round R:
///
/// - R/open: ranks per machine, set once machine 0 has joined; or that the job has `ended`, and why
/// - R/joined: the number of machines that have joined
/// - R/nodes, R/most, R/restarts, R/address, R/port: machine 0's decision: who takes part, and where ranks meet
/// - R/doors: in a job that outlives its ranks (see SupervisorLink::lives), the epoch, and where these let others in
/// - R/asks EPOCH: the number of machines that have asked for a place in it
/// - R/late: the number of machines that joined after that
/// - R/left: the number of machines that took part and will not return
/// - R/over: the first event: the ranks of a machine have `ended` well or `failed`, or a late machine `joins`; the
///   latter two start a new round
///
/// and for the whole job its id, `round` (the newest one), `restarts`, and `ended` (no round can follow): the reason,
/// or empty if all is well.
class Machines {
 public:
  /// Throws CommError if no machine is found at the address, UsageError if another job meets there.
  Machines(const MachineOptions& options, const RankGroup& group, Console& console)
      : options_(options), farewell_(group.grace + std::chrono::seconds(1)), console_(console), store_(open()) {
    store_.set_timeout(std::chrono::seconds(60));
    if (server_) store_.multi_set({"id", "restarts"}, {group.run_id, "0"});
    const auto id = store_.get("id");
    check<UsageError>(id == group.run_id, where(), "expected the job '", printable(id), "' there, got '",
                      printable(group.run_id), "'");
  }
  /// When the job has ended, machine 0 keeps the store until the others, whose ranks may have to stop first, know of
  /// it.
  ~Machines() {
    if (!server_) return;
    try {
      if (store_.check({ended})) server_->await_departures(farewell_);
    } catch (const Error&) {  // then no machine can be told
    }
  }
  Machines(const Machines&) = delete;
  Machines& operator=(const Machines&) = delete;

  /// Meets the other machines and fills in this machine's place in `group`. If it comes while ranks run, all ranks
  /// restart if fewer than `most` machines take part, or let this machine's ranks in at `group.doors` if the job
  /// outlives them; otherwise it waits for a place. Returns false if the job ends well before that. Throws Error if too
  /// few machines come in time, or one has ended the job.
  bool form(RankGroup& group) {
    int number = 0;
    Decision decided;
    group.doors.clear();
    if (server_) {
      ++round_;
      publish(group);
      decided = await_decision();
    } else {
      round_ = std::max(round_ + 1, number_in("round", store_.get("round")));
      for (bool late = false;; late = true, ++round_) {
        const auto ranks = wait_until_open(late);
        if (ranks.starts_with(ended)) {
          const auto why = ranks.substr(std::strlen(ended));
          if (took_part_ || !why.empty()) fail_ended(why);
          return false;
        }
        check<UsageError>(ranks == cat(group.ranks), where(), "machine 0 starts ", printable(ranks),
                          " ranks, this machine ", group.ranks, ": give both the same --nproc-per-node");
        number = count(key("joined"), 1) - 1;
        decided = await_decision();
        if (number < decided.nodes) break;
        group.doors = ask_for_a_place(decided, group.ranks);
        if (group.doors.empty()) continue;
        decided.nodes = std::min(number + 1, decided.most);  // these numbers only name its ranks until they are let in
        number = decided.nodes - 1;
        break;
      }
    }
    group.nodes = decided.nodes;
    group.restart = decided.restarts;
    group.master_addr = decided.address;
    group.master_port = decided.port;
    group.node_rank = number;
    group.attempt = round_;
    group.listen_fd = listener_.fd();
    took_part_ = true;
    return true;
  }
  /// In a job that outlives its ranks, when these have met: machines that come later find them.
  void open_doors(const RankLife& life) {
    if (server_) store_.set(key("doors"), cat(life.epoch, " ", life.doors));
  }
  /// The ranks that live have not let this machine's in: it may ask again.
  void was_not_let_in() {
    took_part_ = false;
    --round_;
  }
  /// Whether this machine has taken part before.
  bool took_part() const { return took_part_; }

  /// While ranks run and the returned thread lives: calls `again` once, with the reason, when a new round starts.
  [[nodiscard]] std::jthread watch(std::function<void(const char*)> again) const {
    return start_thread<std::jthread>(
        "machines",
        [this, again = std::move(again), store = with_timeout(options_.interval)](const std::stop_token& stop) mutable {
          while (!stop.stop_requested()) {
            try {
              const auto reason = store.get(key("over"));
              if (reason == "joins") again("a machine joins");
              if (reason == "failed") again("ranks of another machine have failed");
              return;
            } catch (const TimeoutError&) {
            } catch (const Error&) {  // machine 0 is gone; our ranks lose its ranks
              return;
            }
          }
        });
  }

  /// This machine's ranks have failed: starts a new round, if machine 0 is still there.
  void give_up_round() { end_round("failed"); }
  /// The same if this machine will not return: the others don't wait for it.
  void leave() {
    tell([&] { store_.add(key("left"), 1); });
    give_up_round();
  }
  /// The same if its ranks can't run at all. Ends the job if that can't continue without it.
  void leave(const RankGroup& group, const std::string& why) {
    if (server_ || group.nodes - 1 < options_.least) end(why);
    leave();
  }
  /// This machine's ranks have ended well. Returns false if a new round starts nevertheless: a machine joins, and other
  /// ranks may have been stopped for it.
  bool end_well() {
    if (end_round(ended) == "joins") return false;
    end("");
    return true;
  }
  /// Ends the job: no round follows.
  void end(const std::string& why) {
    tell([&] { store_.multi_set({ended, cat(round_ + 1, "/open")}, {why, cat(ended, why)}); });
  }
  /// Counts a failure of ranks; `before` restarts. Simultaneous failures on several machines count once.
  int count_restart(int before) {
    return number_in("restarts", store_.compare_set("restarts", cat(before), cat(before + 1)));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr const char* ended = "ended";
  /// Machine 0's decision about a round: how many machines take part, their maximum, and where ranks meet.
  struct Decision {
    int nodes = 0, most = 0, restarts = 0, port = 0;
    std::string address;
  };

  static std::string with_brackets(const std::string& host) {
    return host.find(':') == std::string::npos ? host : cat("[", host, "]");
  }
  std::string where() const { return cat("machines meet at ", with_brackets(options_.host), ":", options_.port, ": "); }
  std::string key(const char* name) const { return cat(round_, "/", name); }

  /// A number that another machine has set. Throws CommError for an invalid one.
  int number_in(const std::string& key, const std::string& text, int least = 0, int most = INT_MAX - 1) const {
    const auto number = whole_number(text, least, most);
    check<CommError>(number.has_value(), where(), "'", key, "' is '", printable(text),
                     "', expected a whole number from ", least, " to ", most);
    return *number;
  }
  int count(const std::string& key, int more) { return number_in(key, cat(store_.add(key, more))); }

  /// Calls `call`; does nothing if machine 0 is gone, since no machine can be told.
  template <class Call>
  static void tell(const Call& call) {
    try {
      call();
    } catch (const CommError&) {
    }
  }

  /// Sets the reason why the round is over and returns the first one that was set; empty if machine 0 is gone.
  std::string end_round(const char* why) {
    std::string first;
    tell([&] { first = store_.compare_set(key("over"), "", why); });
    return first;
  }

  comm::Store open() {
    const char* secret = env("CHORUS_TOKEN");
    const std::string token = secret ? secret : "";
    std::string why;
    try {
      auto socket = comm::Socket::listen(place_to_listen(options_.host, options_.port, options_.most > 1));
      server_ = std::make_shared<comm::StoreServer>(std::move(socket), token, 0);
      return comm::Store(server_);
    } catch (const CommError& error) {  // another machine's address, or another launcher of this one
      why = error.what();
    }
    try {
      return comm::Store::connect(options_.host, options_.port, token, options_.join_timeout);
    } catch (const CommError& error) {
      throw CommError(where() + error.what() + "; and this machine can't be the first: " + why);
    }
  }

  [[noreturn]] void fail_ended(const std::string& why) const {
    fail<Error>(where(), why.empty() ? "ranks of one machine failed after those of another had succeeded"
                                     : printable(why, 1000));
  }

  comm::Store with_timeout(std::chrono::milliseconds timeout) const {
    auto store = store_;
    store.set_timeout(timeout);
    return store;
  }

  /// The number of ranks that each machine starts in this round.
  std::string wait_until_open(bool late) const {
    if (!late) return with_timeout(patience()).get(key("open"));
    try {
      return with_timeout(options_.join_timeout).get(key("open"));
    } catch (const TimeoutError&) {
      fail<TimeoutError>(where(), "no place became free within ", options_.join_timeout.count(), " ms");
    }
  }
  Decision await_decision() const {
    const auto said =
        with_timeout(patience()).multi_get({key("nodes"), key("most"), key("restarts"), key("port"), key("address")});
    return {number_in(key("nodes"), said[0], 1, comm::max_ranks), number_in(key("most"), said[1], 1, comm::max_ranks),
            number_in(key("restarts"), said[2]), number_in(key("port"), said[3], 1, 65535), said[4]};
  }
  /// How long machine 0 may wait, at most.
  std::chrono::milliseconds patience() const {
    return options_.join_timeout + options_.last_call + std::chrono::seconds(10);
  }

  /// For a machine that comes while ranks run. Returns the doors of these if they let its ranks in; else it may take
  /// part in the next round.
  std::string ask_for_a_place(const Decision& decided, int ranks) {
    if (std::exchange(asked_, round_) != round_) store_.add(key("late"), 1);
    const auto deadline = Clock::now() + options_.join_timeout;
    std::string counted_in;
    for (bool said = false;; said = true) {
      std::string doors = store_.check({key("doors")}) ? store_.get(key("doors")) : "";
      const auto epoch = doors.substr(0, doors.find(' '));
      doors.erase(0, epoch.size() + 1);
      int nodes = decided.nodes;
      if (!doors.empty()) {  // machines may have been lost, and others let in
        const auto living = static_cast<int>(std::ranges::count(doors, ' ')) + 1;
        nodes = (living + ranks - 1) / ranks;
      }
      const bool free = nodes < decided.most;
      const auto running = cat("the job runs on ", nodes, nodes == 1 ? " machine" : " machines");
      if (!said)
        console_.say(running + (!free           ? ": waiting for a place"
                                : doors.empty() ? ": all restart with this machine"
                                                : ", and its ranks let others in"));
      if (free && doors.empty()) end_round("joins");
      if (doors.empty() || store_.check({cat(round_ + 1, "/open")})) return "";
      // Machines that come at one time count each other.
      const bool asks = free && std::exchange(counted_in, epoch) != epoch;
      if (asks && nodes + count(key("asks ") + epoch, 1) <= decided.most) return doors;
      check<TimeoutError>(Clock::now() < deadline, where(), "no place became free within ",
                          options_.join_timeout.count(), " ms");
      std::this_thread::sleep_for(options_.interval);
    }
  }

  void refuse_if_ended() {
    if (store_.check({ended})) fail_ended(store_.get(ended));
  }

  /// Machine 0's part: opens a round, waits for the others, and decides who takes part.
  void publish(const RankGroup& group) {
    const auto begin = Clock::now();
    const int before = round_ == 0 ? 0 : group.nodes;
    const auto last_late = cat(round_ - 1, "/late"), last_left = cat(round_ - 1, "/left");
    refuse_if_ended();
    store_.add(key("joined"), 1);
    store_.multi_set({key("open"), "round"}, {cat(group.ranks), cat(round_)});
    std::optional<Clock::time_point> enough;
    int joined = 0, expected = 0, late = 0, left = 0;
    while (true) {
      late = count(last_late, 0);
      left = count(last_left, 0);
      expected = before == 0 ? options_.most : before + late - left;
      joined = count(key("joined"), 0);
      if (joined >= std::max(options_.least, expected)) break;
      if (joined >= options_.least && !enough) enough = Clock::now();
      if (enough && Clock::now() >= *enough + options_.last_call) break;
      check<TimeoutError>(enough || Clock::now() < begin + options_.join_timeout, where(), joined, " of ",
                          options_.least, " machines arrived within ", options_.join_timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      refuse_if_ended();
    }
    int restarts = number_in("restarts", store_.get("restarts"));
    // Each new round needs a reason that can't recur for ever: a machine is lost or joins, or a restart is counted.
    const bool joins = late > 0 && before < options_.most, lost = joined < expected + left;
    if (before > 0 && !joins && !lost && restarts == group.restart) restarts = count_restart(restarts);
    check<Error>(restarts <= group.max_restarts, where(), "ranks lost their connections, and no restarts are left");
    const auto& address = options_.local_addr.empty() ? options_.host : options_.local_addr;
    // A new port, so that no rank of an earlier round connects.
    listener_ = comm::Socket::listen(place_to_listen(address, 0, options_.most > 1));
    store_.multi_set({key("most"), key("nodes"), key("restarts"), key("address"), key("port")},
                     {cat(options_.most), cat(std::min(joined, options_.most)), cat(restarts), address,
                      cat(listener_.local().port())});
  }

  MachineOptions options_;
  std::chrono::milliseconds farewell_;
  Console& console_;
  std::shared_ptr<comm::StoreServer> server_;  ///< machine 0's
  comm::Store store_;
  comm::Socket listener_;  ///< machine 0's: where ranks meet
  int round_ = -1, asked_ = -1;
  bool took_part_ = false;
};

}  // namespace detail
}  // namespace chorus
