/// Measurements of lab 14: tables in virtual time. SPOILERS: read this when your lab is right.

#include <algorithm>
#include <chorus/parallel/pipeline/check_schedule.hpp>
#include <chorus/simulate/pipelined.hpp>
#include <cstdio>
#include <string>

#include "schedule.hpp"

namespace schedule_lab {
namespace {

/// A step of the table in virtual time. A forward of a micro-batch in a stage takes 1 ms, a backward 2 ms.
ch::simulated::TrainingTimes in_virtual_time(const Schedule& table, const ch::comm::simulated::Links& links,
                                             std::size_t activation) {
  ch::comm::simulated::SimulationOptions options;
  options.ranks = table.size();
  options.links = links;
  options.keep_spans = true;
  const double parts = table.size() * table.micro_batches;
  return ch::simulated::simulate_pipeline(options, {table, 1e-3 * parts, 2e-3 * parts, 0, activation}, 1);
}
/// Links that cost nothing.
const ch::comm::simulated::Links& no_links() {
  static const ch::comm::simulated::Links links{.island = 0, .inside = {0, 1e15}, .between = {0, 1e15}};
  return links;
}
double idle(const Schedule& table) {
  return 1 - 3e-3 * table.micro_batches / in_virtual_time(table, no_links(), 0).step;
}
int kept(const Schedule& table, std::size_t rank) { return ch::check_schedule(table).kept_inputs[rank]; }

/// A line for each rank, two characters for each ms.
std::string drawn(const Schedule& table) {
  const auto run = in_virtual_time(table, no_links(), 0);
  const auto cell = [](ch::comm::simulated::Time time) {
    return static_cast<std::size_t>(time.count() / 1'000'000'000'000 * 2);
  };
  std::string text = "your table for 4 ranks and 8 micro-batches (forward 0, backward b0, weight w0, waits .):";
  for (std::size_t rank = 0; rank < run.times.ranks.size(); ++rank) {
    std::string line;
    for (int i = 0; i < static_cast<int>(run.step * 1e3 + 0.5); ++i) line += " .";
    for (const auto& mark : run.times.ranks[rank].marks) {
      const auto number = mark.name.find("of micro-batch ");
      if (number == std::string::npos || mark.kind == "bubble") continue;
      for (auto at = cell(mark.begun); at < cell(mark.ended); at += 2) {
        line[at] = mark.name[0] == 'f' ? ' ' : mark.name[0];
        line[at + 1] = mark.name[number + 15];
      }
    }
    text += ch::cat("\n  rank ", rank, "  ", line);
  }
  return text;
}

/// The first action of a rank that undoes what it has not done; empty if there is none.
std::string out_of_order(const Schedule& table) {
  for (const auto& actions : table.ranks)
    for (auto action = actions.begin(); action != actions.end(); ++action) {
      if (action->kind == Kind::forward) continue;
      const bool weight = action->kind == Kind::weight;
      const Schedule::Action first{weight ? Kind::backward : Kind::forward, action->micro_batch, action->stage};
      if (std::find(action, actions.end(), first) != actions.end())
        return ch::cat("rank ", &actions - table.ranks.data(), " has ", *action, " before ", first);
    }
  return "";
}

/// Whether the student's table for p ranks and m micro-batches is good enough.
bool judge(lab::Lab& lab, const Code& code, int p, int m) {
  const auto what = ch::cat(p, " ranks, ", m, " micro-batches");
  Schedule table;
  ch::ScheduleFacts facts;
  const auto follow = [&] {
    table = code.schedule(p, m);
    ch::check<ch::UsageError>(table.size() == p && table.stages == p && table.micro_batches == m,
                              "schedule: the table has ", table.size(), " ranks, ", table.stages, " stages and ",
                              table.micro_batches, " micro-batches");
    if (const auto wrong = out_of_order(table); !wrong.empty()) ch::fail<ch::UsageError>(wrong);
    facts = check_schedule(table);
  };
  if (!lab.run(what + ": all is done, once, and no rank waits for ever", follow)) return false;
  const auto most = std::max_element(facts.kept_inputs.begin(), facts.kept_inputs.end());
  const bool good =
      lab.require(ch::cat(what, ": no rank keeps more than ", p, " inputs"), *most <= p,
                  ch::cat("rank ", most - facts.kept_inputs.begin(), " keeps ", *most, ", and a step takes ",
                          facts.time, " units of time")) &&
      lab.require(ch::cat(what, ": at most ", 3 * m + p - 1, " units of time"), facts.time <= 3 * m + p - 1,
                  ch::cat("it takes ", facts.time, "; each rank computes for ", 3 * m));
  if (p == 4 && m == 8) lab.say(drawn(table));
  return good;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  const auto gpipe = ch::GPipe::of(4, 8), in_turn = ch::OneForwardOneBackward::of(4, 8);
  const auto longer = ch::OneForwardOneBackward::of(4, 32);
  const char* const bubble =
      "How long does the last rank wait for the first micro-batch, and the first rank at the end?";
  lab.compare("GPipe, 8 micro-batches, idle part of the time", idle(gpipe), 1e-3, bubble);
  lab.compare("1F1B, 8 micro-batches, idle part of the time", idle(in_turn), 1e-3, bubble);
  lab.compare("1F1B, 32 micro-batches, idle part of the time", idle(longer), 1e-3,
              "Does the time of waiting grow with the micro-batches?");
  const char* const memory = "How many forwards does the rank begin with, before its first backward?";
  lab.compare("GPipe, 8 micro-batches, most inputs that rank 0 keeps", kept(gpipe, 0), 0, memory);
  lab.compare("1F1B, 8 micro-batches, most inputs that rank 0 keeps", kept(in_turn, 0), 0, memory);
  lab.compare("1F1B, 32 micro-batches, most inputs that rank 0 keeps", kept(longer, 0), 0, memory);
  lab.compare("1F1B, 8 micro-batches, most inputs that rank 3 keeps", kept(in_turn, 3), 0, memory);
  for (const auto& [p, m] : {std::pair{4, 8}, {2, 4}, {4, 4}, {3, 7}, {8, 16}, {5, 12}})
    if (!judge(lab, code, p, m)) return;
  const auto links = ch::comm::simulated::links_named("25gbit");
  constexpr std::size_t activation = 1 << 19;
  const double mine = in_virtual_time(code.schedule(4, 8), links, activation).step;
  const double theirs = in_virtual_time(in_turn, links, activation).step;
  char text[160];
  std::snprintf(text, sizeof text, "over 25 Gbit/s, 512 KiB a message: your step takes %.2f ms, 1F1B's %.2f ms",
                1e3 * mine, 1e3 * theirs);
  lab.say(text);
}

}  // namespace schedule_lab
