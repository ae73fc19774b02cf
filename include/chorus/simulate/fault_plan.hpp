#pragma once
/// `FaultPlan`: what goes wrong in a simulation, drawn from a seed, printable, and read again from its text.

#include <array>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/core/printable.hpp>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// One thing that goes wrong. Calls are counted from 1, by rank, and bytes by what a rank has sent on that link.
struct Fault {
  enum class Kind : std::uint8_t {
    kill,   ///< the rank's process is gone
    hang,   ///< the rank stands still for ever, and its links stay
    stop,   ///< the rank stands still for `amount` seconds, and goes on
    cut,    ///< the link is lost, both ways
    slow,   ///< the link takes `amount` times as long for each byte
    delay,  ///< each piece on the link is late, by up to `amount` seconds
  };
  Kind kind = Kind::kill;
  int rank = 0, peer = -1;    ///< `peer`: of a link, and where `at_byte` counts
  std::uint64_t at_call = 0;  ///< before the rank's call of that number; 0: see at_byte
  std::uint64_t at_byte = 0;  ///< in the piece of the rank's link to `peer` that has that byte
  double amount = 0;

  bool is_of_link() const { return kind == Kind::cut || kind == Kind::slow || kind == Kind::delay; }
  /// Whether no deadline and no result can be missed because of it alone.
  bool is_harmless(double timeout) const {
    return kind == Kind::slow || kind == Kind::delay || (kind == Kind::stop && amount < timeout);
  }
};

/// The names of Fault::Kind, in its order.
inline constexpr std::array<std::string_view, 6> fault_names = {"kill", "hang", "stop", "cut", "slow", "delay"};

/// `kill 2 @call 17`, `cut 0-1 @byte 4096`, `stop 3 @call 5 for 0.2`, `slow 1-2 x 50`, `delay 0-3 up to 0.001`.
inline std::string text_of(const Fault& fault) {
  char amount[32] = {};
  std::to_chars(amount, amount + sizeof amount - 1, fault.amount);  // the shortest that reads as the same number
  std::string text = cat(fault_names[static_cast<std::size_t>(fault.kind)], ' ', fault.rank);
  if (fault.peer >= 0) text += cat('-', fault.peer);
  if (fault.kind == Fault::Kind::slow) return text + " x " + amount;
  if (fault.kind == Fault::Kind::delay) return text + " up to " + amount;
  text += fault.at_call > 0 ? cat(" @call ", fault.at_call) : cat(" @byte ", fault.at_byte);
  return fault.kind == Fault::Kind::stop ? text + " for " + amount : text;
}

/// All that goes wrong in one simulation.
struct FaultPlan {
  std::vector<Fault> faults;
  /// How long a call may make no progress, in virtual seconds: World's timeout.
  double timeout = 30;
  /// Of the delays of pieces, and of who runs first of those that are ready at one time.
  std::uint64_t seed = 0;

  std::string text() const {
    std::string all;
    for (const auto& fault : faults) all += (all.empty() ? "" : ", ") + text_of(fault);
    return all.empty() ? "nothing" : all;
  }
  /// The plan that `text` has printed. Throws UsageError for other texts.
  [[gnu::cold]] static FaultPlan read(std::string_view text) {
    FaultPlan plan;
    if (text == "nothing") return plan;
    std::istringstream all{std::string(text)};
    for (std::string one; std::getline(all, one, ',');) plan.faults.push_back(read_fault(one));
    return plan;
  }

 private:
  static Fault read_fault(const std::string& text) {
    std::istringstream words(text);
    std::string name, where, unit, word;
    Fault fault;
    words >> name >> fault.rank;
    std::size_t kind = 0;
    while (kind < fault_names.size() && fault_names[kind] != name) ++kind;
    bool good = kind < fault_names.size() && bool(words);
    fault.kind = static_cast<Fault::Kind>(kind);
    if (words.peek() == '-') words.get(), words >> fault.peer;
    if (fault.kind == Fault::Kind::slow)
      good = good && words >> word >> fault.amount && word == "x";
    else if (fault.kind == Fault::Kind::delay)
      good = good && words >> word >> unit >> fault.amount && word == "up" && unit == "to";
    else {
      std::uint64_t at = 0;
      good = good && words >> where >> at && (where == "@call" || where == "@byte") && at > 0;
      (where == "@call" ? fault.at_call : fault.at_byte) = at;
      if (fault.kind == Fault::Kind::stop) good = good && words >> word >> fault.amount && word == "for";
    }
    const bool needs_peer = fault.is_of_link() || fault.at_byte > 0;
    check<UsageError>(good && !(words >> word) && fault.rank >= 0 && needs_peer == (fault.peer >= 0) &&
                          fault.peer != fault.rank && fault.amount >= 0,
                      "fault plan: '", printable(text),
                      "': expected such as kill 2 @call 17, hang 1 @call 3, stop 3 @call 5 for 0.2, "
                      "cut 0-1 @byte 4096, slow 1-2 x 50, delay 0-3 up to 0.001");
    return fault;
  }
};

/// What a program does without faults: where a plan's faults can strike.
struct FaultRoom {
  int ranks = 2;
  std::uint64_t calls = 1;  ///< of a rank
  std::uint64_t bytes = 1;  ///< that a rank sends to another one, on average
};

/// The plan of that seed: up to four faults. A seed first leaves out some kinds, so that rare ones are not always
/// hidden behind a kill ("swarm testing", Groce et al., 2012). The same on all machines.
inline FaultPlan drawn_faults(std::uint64_t seed, const FaultRoom& room, double timeout = 30) {
  constexpr std::uint32_t purpose = 0xFA017;
  std::uint32_t place = 0;
  const auto draw = [&](std::uint64_t below) {
    const auto words = philox(seed, {purpose, place++, 0, 0});
    return (static_cast<std::uint64_t>(words[0]) << 32 | words[1]) % below;
  };
  const auto mask = draw(62) + 1;  // at least one kind of six is there, and at least one is not
  FaultPlan plan{.timeout = timeout, .seed = seed};
  const auto ranks = static_cast<std::uint64_t>(room.ranks);
  const auto count = 1 + draw(4);
  while (plan.faults.size() < count) {
    const auto kind = draw(fault_names.size());
    if ((mask >> kind & 1) == 0) continue;
    Fault fault{.kind = static_cast<Fault::Kind>(kind), .rank = static_cast<int>(draw(ranks))};
    if (fault.is_of_link() || draw(2) == 0) {
      fault.peer = static_cast<int>((static_cast<std::uint64_t>(fault.rank) + 1 + draw(ranks - 1)) % ranks);
      if (fault.kind != Fault::Kind::slow && fault.kind != Fault::Kind::delay) fault.at_byte = 1 + draw(room.bytes);
    } else {
      fault.at_call = 1 + draw(room.calls);
    }
    // A stop is short, or longer than anyone waits; a link is up to 1000 times as slow, which is still in time.
    const double amount = static_cast<double>(1 + draw(1000));
    if (fault.kind == Fault::Kind::stop) fault.amount = timeout * (draw(2) == 0 ? amount * 5e-4 : 1.5 + amount * 1e-3);
    if (fault.kind == Fault::Kind::slow) fault.amount = amount;
    if (fault.kind == Fault::Kind::delay) fault.amount = amount * 1e-5;
    plan.faults.push_back(fault);
  }
  return plan;
}

}  // namespace chorus::comm::simulated
