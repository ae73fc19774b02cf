#pragma once
/// `FaultPlan`: what goes wrong in a simulation, drawn from a seed, printable, and read again from its text.

#include <algorithm>
#include <array>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/from_chars.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/core/printable.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// One thing that goes wrong. Calls and operations on files are counted from 1, by rank, and bytes by what a rank has
/// sent on that link.
struct Fault {
  enum class Kind : std::uint8_t {
    kill,   ///< the rank's process is gone
    hang,   ///< the rank stands still for ever, and its links stay
    stop,   ///< the rank stands still for `amount` seconds, and goes on
    cut,    ///< the link is lost, both ways
    slow,   ///< the link takes `amount` times as long for each byte
    delay,  ///< each piece on the link is late, by up to `amount` seconds
    full,   ///< the disk is full: the rank's operation on a file fails with ENOSPC
    bad,    ///< the disk is broken: with EIO
    part,   ///< a write writes a part of its bytes
  };
  Kind kind = Kind::kill;
  int rank = 0, peer = -1;    ///< `peer`: of a link, and where `at_byte` counts
  std::uint64_t at_call = 0;  ///< before the rank's call of that number; 0: see the others
  std::uint64_t at_file = 0;  ///< at the rank's operation on a file of that number: see SimulatedRank::touch_file
  std::uint64_t at_byte = 0;  ///< in the piece of the rank's link to `peer` that has that byte
  double amount = 0;

  /// Whether it is there from the beginning, for all of the run.
  bool lasts() const { return kind == Kind::slow || kind == Kind::delay; }
  bool is_of_link() const { return kind == Kind::cut || lasts(); }
  bool is_of_file() const { return kind >= Kind::full; }
};

/// The names of Fault::Kind, in its order.
inline constexpr std::array<std::string_view, 9> fault_names = {"kill", "hang",  "stop", "cut", "slow",
                                                             "delay", "full", "bad",  "part"};

/// `kill 2 @call 17`, `cut 0-1 @byte 4096`, `stop 3 @call 5 for 0.2`, `slow 1-2 x 50`, `delay 0-3 up to 0.001`, `full 0 @file 7`.
inline std::string text_of(const Fault& fault) {
  char amount[32] = {};
  std::to_chars(amount, amount + sizeof amount - 1, fault.amount);  // the shortest that reads as the same number
  std::string text = cat(fault_names[static_cast<std::size_t>(fault.kind)], ' ', fault.rank);
  if (fault.peer >= 0) text += cat('-', fault.peer);
  if (fault.kind == Fault::Kind::slow) return text + " x " + amount;
  if (fault.kind == Fault::Kind::delay) return text + " up to " + amount;
  text += fault.at_call > 0   ? cat(" @call ", fault.at_call)
          : fault.at_file > 0 ? cat(" @file ", fault.at_file)
                              : cat(" @byte ", fault.at_byte);
  return fault.kind == Fault::Kind::stop ? text + " for " + amount : text;
}

/// All that goes wrong in one simulation.
struct FaultPlan {
  std::vector<Fault> faults = {};
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
    while (!text.empty()) plan.faults.push_back(read_fault(taken(text, ',')));
    return plan;
  }

 private:
  /// The text up to `end`, which is taken off with it.
  static std::string_view taken(std::string_view& text, char end) {
    while (text.starts_with(' ')) text.remove_prefix(1);
    const auto length = std::min(text.find(end), text.size());
    const auto front = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    return front;
  }
  /// A whole text as a number that is not negative; -1: it is none.
  static double number(std::string_view text) {
    double number = -1;
    const auto [end, error] = chorus::detail::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() && number < 1e15 ? number : -1;
  }
  static Fault read_fault(std::string_view text) {
    const auto whole = text;
    const auto name = std::find(fault_names.begin(), fault_names.end(), taken(text, ' '));
    const bool known = name != fault_names.end();
    Fault fault{.kind = static_cast<Fault::Kind>(known ? name - fault_names.begin() : 0)};
    const bool lasts = known && fault.lasts();
    auto ranks = taken(text, ' ');
    const bool has_peer = ranks.find('-') != ranks.npos;
    fault.rank = static_cast<int>(number(taken(ranks, '-')));
    if (has_peer) fault.peer = static_cast<int>(number(ranks));
    const auto word = taken(text, ' ');
    if (fault.kind == Fault::Kind::delay && !text.starts_with("to ")) text = {};
    if (fault.kind == Fault::Kind::delay) taken(text, ' ');
    const double value = number(taken(text, ' '));
    auto& at = word == "@call" ? fault.at_call : word == "@file" ? fault.at_file : fault.at_byte;
    if (lasts)
      fault.amount = value;
    else
      at = static_cast<std::uint64_t>(std::max(value, 0.0));
    bool good = known && value >= 0;
    if (fault.kind == Fault::Kind::slow) good = good && word == "x";
    if (fault.kind == Fault::Kind::delay) good = good && word == "up";
    if (!lasts) good = good && value >= 1 && (word == "@call" || word == "@byte" || word == "@file");
    if (known && fault.is_of_file()) good = good && word == "@file";
    if (fault.kind == Fault::Kind::stop) {
      good = good && taken(text, ' ') == "for";
      fault.amount = number(taken(text, ' '));
    }
    const bool needs_peer = fault.is_of_link() || fault.at_byte > 0;
    check<UsageError>(good && text.empty() && fault.rank >= 0 && needs_peer == (fault.peer >= 0) &&
                          needs_peer == has_peer && fault.peer != fault.rank && fault.amount >= 0,
                      "fault plan: '", printable(whole),
                      "': expected such as kill 2 @call 17, hang 1 @call 3, stop 3 @call 5 for 0.2, "
                      "cut 0-1 @byte 4096, slow 1-2 x 50, delay 0-3 up to 0.001, full 0 @file 7");
    return fault;
  }
};

/// What a program does without faults: where a plan's faults can strike.
struct FaultRoom {
  int ranks = 2;
  std::uint64_t calls = 1;  ///< of a rank
  std::uint64_t bytes = 1;  ///< that a rank sends to another one, on average
  std::uint64_t files = 0;  ///< a rank's operations on files; 0: no plan has faults of files
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
  const std::size_t kinds = fault_names.size() - (room.files > 0 ? 0 : 3);
  const auto mask = draw((1U << kinds) - 2) + 1;  // at least one kind is there, and at least one is not
  FaultPlan plan;
  plan.timeout = timeout;
  plan.seed = seed;
  const auto ranks = static_cast<std::uint64_t>(room.ranks);
  const auto count = 1 + draw(4);
  while (plan.faults.size() < count) {
    const auto kind = draw(kinds);
    if ((mask >> kind & 1) == 0) continue;
    Fault fault{.kind = static_cast<Fault::Kind>(kind), .rank = static_cast<int>(draw(ranks))};
    if (fault.is_of_file() || (room.files > 0 && !fault.is_of_link() && draw(2) == 0)) {
      fault.at_file = 1 + draw(room.files);
      if (draw(2) == 0) fault.rank = 0;  // it writes where only one does
    } else if (fault.is_of_link() || draw(2) == 0) {
      fault.peer = static_cast<int>((static_cast<std::uint64_t>(fault.rank) + 1 + draw(ranks - 1)) % ranks);
      if (!fault.lasts()) fault.at_byte = 1 + draw(room.bytes);
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
