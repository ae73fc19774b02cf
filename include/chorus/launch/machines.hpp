#pragma once
/// `Machines`: launchers that find each other, and number themselves, as torchrun's do with --rdzv-backend c10d.
/// Some may be lost, come late, and come back.

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

/// What the launchers of a job have to agree on.
struct MachineOptions {
  int least = 1, most = 1;         ///< machines: without `least` nothing starts, beyond `most` none is taken
  std::string host = "127.0.0.1";  ///< an address of one of them, where they meet: the machine that can listen there
  int port = 29400;                ///< there
  std::string local_addr;          ///< of this machine, where ranks meet if it is that one; empty: `host`
  std::chrono::milliseconds join_timeout{600'000};  ///< to wait for `least` machines, or for a place beside `most`
  std::chrono::milliseconds last_call{30'000};      ///< to wait for more than `least`, or for one that may be lost
  std::chrono::milliseconds interval{100};          ///< between looks at whether the others form anew
};

namespace detail {

/// The machine that can listen at host:port holds a store, and is machine 0; the others number themselves as they come.
/// They come together in rounds, one before each start of the ranks, and the store holds of round R:
///
/// - R/open: ranks of each machine; set once machine 0 has joined. Or that the job has `ended`, and why
/// - R/joined: how many have joined
/// - R/nodes, R/most, R/restarts, R/address, R/port: machine 0 has decided who takes part, and where ranks meet
/// - R/late: how many joined after that
/// - R/left: how many of those who take part won't come again
/// - R/over: what came first: somebody's ranks have `ended` well or `failed`, or a late machine `joins`; for the latter
///   two all form anew
///
/// and of the whole job its id, `round`: the newest one, `restarts`, and `ended`: no round can follow; why, or nothing
/// where all is well.
class Machines {
 public:
  /// Throws CommError where nobody is found at the address, UsageError where another job meets there.
  Machines(const MachineOptions& options, const RankGroup& group, Console& console)
      : options_(options), farewell_(group.grace + std::chrono::seconds(1)), console_(console), store_(open()) {
    store_.set_timeout(std::chrono::seconds(60));
    if (server_) store_.multi_set({"id", "restarts"}, {group.run_id, "0"});
    const auto id = store_.get("id");
    check<UsageError>(id == group.run_id, where(), "expected the job '", printable(id), "' there, got '",
                      printable(group.run_id), "'");
  }
  /// Where the job has ended, machine 0 holds the store until the others, whose ranks may have to stop first, have
  /// heard of it.
  ~Machines() {
    if (!server_) return;
    try {
      if (store_.check({ended})) server_->await_departures(farewell_);
    } catch (const Error&) {  // then nobody can be told
    }
  }
  Machines(const Machines&) = delete;
  Machines& operator=(const Machines&) = delete;

  /// Comes together with the others and fills in this machine's place in `group`. One that comes while ranks run has
  /// them all start anew where fewer than `most` machines take part, else it waits for a place; false where the job
  /// ends well before it has one. Throws Error where too few come in time, or one has ended the job.
  bool form(RankGroup& group) {
    int number = 0;
    Decision decided;
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
        ask_for_a_place(decided);
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
  /// Whether this machine has taken part before.
  bool took_part() const { return took_part_; }

  /// While ranks run, and the thread that it returns: calls `again` once, with the reason, where all form anew.
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
            } catch (const Error&) {  // machine 0 has gone; our ranks lose its ranks
              return;
            }
          }
        });
  }

  /// This machine's ranks have failed: all form anew, where machine 0 is still there.
  void give_up_round() { end_round("failed"); }
  /// The same where this machine won't come again: nobody waits for it.
  void leave() {
    tell([&] { store_.add(key("left"), 1); });
    give_up_round();
  }
  /// The same where its ranks can't run at all. The job ends where it can't go on without it.
  void leave(const RankGroup& group, const std::string& why) {
    if (server_ || group.nodes - 1 < options_.least) end(why);
    leave();
  }
  /// This machine's ranks have ended well. False where all form anew all the same: a machine joins, and ranks of others
  /// may have been stopped for it.
  bool end_well() {
    if (end_round(ended) == "joins") return false;
    end("");
    return true;
  }
  /// No round follows.
  void end(const std::string& why) {
    tell([&] { store_.multi_set({ended, cat(round_ + 1, "/open")}, {why, cat(ended, why)}); });
  }
  /// Counts a failure of ranks; `before` restarts. Where ranks of several machines fail at once, that is one.
  int count_restart(int before) {
    return number_in("restarts", store_.compare_set("restarts", cat(before), cat(before + 1)));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr const char* ended = "ended";
  /// What machine 0 says of a round: how many take part, of at most how many, and where ranks meet.
  struct Decision {
    int nodes = 0, most = 0, restarts = 0, port = 0;
    std::string address;
  };

  static std::string with_brackets(const std::string& host) {
    return host.find(':') == std::string::npos ? host : cat("[", host, "]");
  }
  std::string where() const { return cat("machines meet at ", with_brackets(options_.host), ":", options_.port, ": "); }
  std::string key(const char* name) const { return cat(round_, "/", name); }

  /// A number that another machine has set. Throws CommError for what can be none.
  int number_in(const std::string& key, const std::string& text, int least = 0, int most = INT_MAX - 1) const {
    const auto number = whole_number(text, least, most);
    check<CommError>(number.has_value(), where(), "'", key, "' is '", printable(text),
                     "', expected a whole number from ", least, " to ", most);
    return *number;
  }
  int count(const std::string& key, int more) { return number_in(key, cat(store_.add(key, more))); }

  /// Calls `call`, unless machine 0 has gone: then there is nobody to be told.
  template <class Call>
  static void tell(const Call& call) {
    try {
      call();
    } catch (const CommError&) {
    }
  }

  /// Why the round is over: this, or what was said first; nothing where machine 0 has gone.
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

  /// How many ranks each machine starts in this round.
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
  /// As long as machine 0 may wait.
  std::chrono::milliseconds patience() const {
    return options_.join_timeout + options_.last_call + std::chrono::seconds(10);
  }

  /// For a machine that comes when ranks run.
  void ask_for_a_place(const Decision& decided) {
    store_.add(key("late"), 1);
    const bool free = decided.nodes < decided.most;
    const auto count = cat(decided.nodes, decided.nodes == 1 ? " machine" : " machines");
    console_.say(cat("the job runs on ", count, free ? ": all restart with this machine" : ": waiting for a place"));
    if (free) end_round("joins");
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
    // Each new round has a reason that can't come back for ever: a machine is lost or joins, or it is one restart more.
    const bool joins = late > 0 && before < options_.most, lost = joined < expected + left;
    if (before > 0 && !joins && !lost && restarts == group.restart) restarts = count_restart(restarts);
    check<Error>(restarts <= group.max_restarts, where(), "ranks lost their connections, and no restarts are left");
    const auto& address = options_.local_addr.empty() ? options_.host : options_.local_addr;
    // A new port: no rank of an earlier round comes there.
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
  int round_ = -1;
  bool took_part_ = false;
};

}  // namespace detail
}  // namespace chorus
