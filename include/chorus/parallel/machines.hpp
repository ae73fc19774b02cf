#pragma once
/// `Machines`: launchers that find each other, and number themselves, as torchrun's do with --rdzv-backend c10d.

#include <algorithm>
#include <chorus/comm/store.hpp>
#include <chorus/comm/store_server.hpp>
#include <chorus/parallel/rank_process.hpp>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

namespace chorus::inline CHORUS_ABI {

/// What the launchers of a job have to agree on.
struct MachineOptions {
  int least = 1, most = 1;         ///< machines: without `least` nothing starts, beyond `most` none is taken
  std::string host = "127.0.0.1";  ///< an address of one of them, where they meet: the machine that can listen there
  int port = 29400;                ///< there
  std::string local_addr;          ///< of this machine, where ranks meet if it is that one; empty: `host`
  std::chrono::milliseconds join_timeout{600'000};  ///< to wait for `least` machines
  std::chrono::milliseconds last_call{30'000};      ///< to wait for more of them then, up to `most`
  std::chrono::milliseconds interval{100};          ///< between looks at whether the others form anew
};

namespace detail {

/// The machine that can listen at host:port holds a store, and is machine 0; the others number themselves as they come.
/// They come together in rounds, one before each start of the ranks, and the store holds of round R:
///
/// - R/open: ranks of each machine; set once machine 0 has joined
/// - R/joined: how many have joined
/// - R/nodes, R/restarts, R/address, R/port: machine 0 has decided who takes part, and where ranks meet
/// - R/over: somebody's ranks have failed, so that all form anew
///
/// and of the whole job its id, `restarts`, and `ended`: somebody has ended for good, so that no round can follow.
class Machines {
 public:
  /// Throws CommError where nobody is found at the address, UsageError where another job meets there.
  Machines(const MachineOptions& options, const RankGroup& group) : options_(options), store_(open()) {
    store_.set_timeout(std::chrono::seconds(60));
    if (server_) store_.set("id", group.run_id);
    const auto id = store_.get("id");
    check<UsageError>(id == group.run_id, where(), "the job '", id, "' meets there, this is '", group.run_id, "'");
  }
  Machines(const Machines&) = delete;
  Machines& operator=(const Machines&) = delete;

  /// Comes together with the others and fills in this machine's place in `group`. True where the ranks start without
  /// some machine that was there before. Throws Error where too few come in time, or one has ended the job.
  bool form(RankGroup& group) {
    const int before = round_ < 0 ? 0 : group.nodes;
    ++round_;
    int number = 0;
    if (server_) {
      store_.add(key("joined"), 1);
      store_.set(key("open"), cat(group.ranks));
      publish(group, before);
    } else {
      auto patient = store_;
      patient.set_timeout(options_.join_timeout + options_.last_call + std::chrono::seconds(10));
      const auto ranks = patient.get(key("open"));
      check<UsageError>(ranks == cat(group.ranks), where(), "machine 0 starts ", ranks, " ranks, this one ",
                        group.ranks, ": there have to be as many on each");
      number = static_cast<int>(store_.add(key("joined"), 1)) - 1;
      patient.wait({key("nodes")});
    }
    const auto formed = store_.multi_get({key("nodes"), key("restarts"), key("address"), key("port")});
    group.nodes = std::stoi(formed[0]);
    group.restart = std::stoi(formed[1]);
    group.master_addr = formed[2];
    group.master_port = std::stoi(formed[3]);
    check<UsageError>(number < group.nodes, where(), "the job has begun with ", group.nodes,
                      group.nodes == 1 ? " machine" : " machines", ", and this one comes too late");
    group.node_rank = number;
    group.attempt = round_;
    group.listen_fd = listener_.fd();
    return group.nodes < before;
  }

  /// While ranks run, and the thread that it returns: calls `again` once, where another machine's have failed.
  [[nodiscard]] std::jthread watch(std::function<void()> again) const {
    return std::jthread([this, again = std::move(again), store = store_](const std::stop_token& stop) mutable {
      while (!stop.stop_requested()) {
        try {
          store.wait({key("over")}, options_.interval);
          return again();
        } catch (const TimeoutError&) {
        } catch (const CommError&) {  // machine 0 has gone; our ranks lose its ranks
          return;
        }
      }
    });
  }

  /// This machine's ranks have failed: all form anew, where machine 0 is still there.
  void give_up_round() { tell(key("over"), ""); }
  /// No round follows.
  void end(const std::string& why) { tell("ended", why); }
  /// Counts a failure of this machine's own ranks.
  int count_restart() { return static_cast<int>(store_.add("restarts", 1)); }

 private:
  using Clock = std::chrono::steady_clock;

  std::string where() const { return format("machines meet at %s:%d: ", options_.host.c_str(), options_.port); }
  std::string key(const char* name) const { return format("%d/%s", round_, name); }

  void tell(const std::string& where, const std::string& what) {
    try {
      store_.set(where, what);
    } catch (const CommError&) {  // there is nobody to be told
    }
  }

  comm::Store open() {
    const char* secret = env("CHORUS_TOKEN");
    const std::string token = secret ? secret : "";
    std::string why;
    try {
      auto socket = comm::Socket::listen(comm::Address::resolve(options_.host, options_.port));
      server_ = std::make_shared<comm::StoreServer>(std::move(socket), token, 0);
      return comm::Store(server_);
    } catch (const CommError& error) {  // another machine's address, or another launcher of this one
      why = error.what();
    }
    try {
      return comm::Store::connect(options_.host, options_.port, token, options_.join_timeout);
    } catch (const CommError& error) {
      throw CommError(where() + error.what() + "; nor can this machine be the first: " + why);
    }
  }

  /// Machine 0's part: waits for the others, and decides who takes part.
  void publish(const RankGroup& group, int before) {
    const auto begin = Clock::now();
    std::optional<Clock::time_point> enough;
    int here = 0;
    while (true) {
      if (store_.check({"ended"})) fail<Error>(where(), store_.get("ended"));
      here = std::min(static_cast<int>(store_.add(key("joined"), 0)), options_.most);
      if (here >= options_.least && !enough) enough = Clock::now();
      if (here >= std::max(options_.least, before) && (before > 0 || here == options_.most)) break;
      if (enough && Clock::now() >= *enough + options_.last_call) break;
      check<TimeoutError>(enough || Clock::now() < begin + options_.join_timeout, where(), here, " of ", options_.least,
                          " machines came within ", options_.join_timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    auto restarts = static_cast<int>(store_.add("restarts", 0));
    // Each new round has a reason that cannot come back for ever: a machine less, or one restart more.
    if (before > 0 && here >= before && restarts == group.restart) restarts = count_restart();
    check<Error>(restarts <= group.max_restarts, where(), "ranks have lost each other, and all restarts are used up");
    const auto& address = options_.local_addr.empty() ? options_.host : options_.local_addr;
    listener_ = comm::Socket::listen(comm::Address::resolve(address, 0));  // a new port: no rank of an earlier round
    store_.multi_set({key("nodes"), key("restarts"), key("address"), key("port")},
                     {cat(here), cat(restarts), address, cat(listener_.local().port())});
  }

  MachineOptions options_;
  std::shared_ptr<comm::StoreServer> server_;  ///< machine 0's
  comm::Store store_;
  comm::Socket listener_;  ///< machine 0's: where ranks meet
  int round_ = -1;
};

}  // namespace detail
}  // namespace chorus::inline CHORUS_ABI
