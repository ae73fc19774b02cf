/// Simulates a plan for one of the puzzles, in virtual time, and says which of the three limits it keeps. See README.md.

#include <chorus/core/check_output.hpp>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "../../simulate_program.hpp"

namespace {

using nlohmann::json;
using ch::UsageError;

/// A JSON object of which every member has a meaning.
class Fields {
 public:
  explicit Fields(const std::string& path) : place_("'" + path + "'") {
    std::ifstream file(path);
    ch::check<UsageError>(bool(file), place_, ": can't read it");
    json values = json::parse(file, nullptr, false);
    ch::check<UsageError>(values.is_object(), place_, ": expected a JSON object");
    values_ = std::move(values);
  }
  Fields(std::string place, json values) : place_(std::move(place)), values_(std::move(values)) {
    ch::check<UsageError>(values_.is_object(), place_, ": expected an object");
  }

  template <class T>
  void take(const char* name, T& to, double least, double most) {
    std::string got;
    if (!next(name, got)) return;
    const bool is = std::is_same_v<T, int> ? values_[name].is_number_integer() : values_[name].is_number();
    const double number = is ? values_[name].template get<double>() : 0;
    ch::check<UsageError>(is && number >= least && number <= most, place_, ": ", name, ": expected ",
                          std::is_same_v<T, int> ? "a whole" : "a", " number from ", least, " to ", most, ", got ", got);
    to = static_cast<T>(number);
  }
  void take(const char* name, bool& to) {
    std::string got;
    if (!next(name, got)) return;
    ch::check<UsageError>(values_[name].is_boolean(), place_, ": ", name, ": expected true or false, got ", got);
    to = values_[name].get<bool>();
  }
  void take(const char* name, std::string& to, const std::vector<std::string>& known = {}) {
    std::string got;
    if (!next(name, got)) return;
    const auto text = values_[name].is_string() ? values_[name].get<std::string>() : "";
    const bool is = known.empty() ? !text.empty() : std::find(known.begin(), known.end(), text) != known.end();
    std::string all;
    for (const auto& word : known) all += (all.empty() ? "" : ", ") + word;
    ch::check<UsageError>(is, place_, ": ", name, ": expected ", all.empty() ? "a text" : all, "; got ", got);
    to = text;
  }
  void take(const char* name, std::vector<std::string>& to) {
    std::string got;
    ch::check<UsageError>(next(name, got) && values_[name].is_array(), place_, ": ", name, ": expected a list of texts");
    for (const auto& word : values_[name]) {
      ch::check<UsageError>(word.is_string(), place_, ": ", name, ": expected a list of texts, got ", got);
      to.push_back(word);
    }
  }
  Fields take(const char* name) {
    std::string got;
    ch::check<UsageError>(next(name, got), place_, ": ", name, ": expected it, got nothing");
    return {place_ + ": " + name, values_[name]};
  }
  /// Throws UsageError where there are others than those taken.
  void end() const {
    for (const auto& [name, value] : values_.items())
      ch::check<UsageError>(std::find(known_.begin(), known_.end(), name) != known_.end(), place_, ": expected ",
                            list(), "; got ", ch::printable(name));
  }
  const std::string& place() const { return place_; }

 private:
  bool next(const char* name, std::string& got) {
    known_.push_back(name);
    if (!values_.contains(name)) return false;
    got = ch::printable(values_[name].dump(-1, ' ', true, json::error_handler_t::replace));
    return true;
  }
  std::string list() const {
    std::string all;
    for (const auto& name : known_) all += (all.empty() ? "" : ", ") + name;
    return all;
  }

  std::string place_;
  json values_;
  std::vector<std::string> known_;
};

struct Puzzle {
  std::string title, links;
  int layers = 0, width = 0, tokens = 0, ranks = 0, samples = 0;
  double sample_ms = 0;                          // of computing a sample on one device, a third of it forward
  double step_ms = 0, sent_gb = 0, held_gb = 0;  // at most
  double best_ms = 0;                            // known
  std::vector<std::string> axes;                 // of a plan's mesh

  explicit Puzzle(const std::string& path) {
    Fields fields(path);
    fields.take("title", title);
    fields.take("links", links);
    ch::check<UsageError>(!links.empty(), fields.place(), ": links: expected them, got nothing");
    fields.take("layers", layers, 1, 1000);
    fields.take("width", width, 1, 100'000);
    fields.take("tokens", tokens, 1, 1'000'000);
    fields.take("ranks", ranks, 1, 64);
    fields.take("samples", samples, 1, 1'000'000);
    fields.take("sample_ms", sample_ms, 1e-3, 1e6);
    fields.take("best_ms", best_ms, 0, 1e9);
    fields.take("axes", axes);
    auto limits = fields.take("at_most");
    limits.take("step_ms", step_ms, 0, 1e9);
    limits.take("sent_gb", sent_gb, 0, 1e9);
    limits.take("held_gb", held_gb, 0, 1e9);
    limits.end();
    fields.end();
    ch::check<UsageError>(std::min({layers, width, tokens, ranks, samples}) > 0 && sample_ms > 0, fields.place(),
                          ": expected layers, width, tokens, ranks, samples and sample_ms; one of them is missing");
  }
};

struct Plan {
  sim::MeshAxes axes;
  std::string schedule = "1f1b", all_reduce = "auto";
  int micro_batches = 1;
  double bucket_cap = 25, first_bucket_cap = 1, unit_cap = 4;
  bool keep_parameters = false, recompute = false;

  Plan(const std::string& path, const Puzzle& puzzle) {
    Fields fields(path);
    auto mesh = fields.take("mesh");
    for (const auto& [name, ranks] :
         {std::pair("pipe", &axes.pipe), {"data", &axes.data}, {"shard", &axes.shard}, {"tensor", &axes.tensor}})
      if (std::find(puzzle.axes.begin(), puzzle.axes.end(), name) != puzzle.axes.end()) mesh.take(name, *ranks, 1, 64);
    mesh.end();
    constexpr double most_mib = 1e6;
    fields.take("schedule", schedule, {std::begin(schedules), std::end(schedules)});
    fields.take("micro_batches", micro_batches, 1, puzzle.samples);
    fields.take("bucket_cap", bucket_cap, 0, most_mib);
    fields.take("first_bucket_cap", first_bucket_cap, 0, most_mib);
    fields.take("unit_cap", unit_cap, 0, most_mib);
    fields.take("keep_parameters", keep_parameters);
    fields.take("recompute", recompute);
    fields.take("all_reduce", all_reduce, {"auto", "ring", "hierarchical"});
    fields.end();
    ch::check<UsageError>(axes.count() == puzzle.ranks, mesh.place(), ": expected ", puzzle.ranks,
                          " ranks, as the puzzle has, got ", axes.count());
    ch::check<UsageError>(puzzle.width % axes.tensor == 0, mesh.place(), ": tensor ", axes.tensor,
                          ": expected that it divides the width, ", puzzle.width);
    ch::check<UsageError>(puzzle.samples % (axes.shares() * micro_batches) == 0, fields.place(), ": ", puzzle.samples,
                          " samples in ", axes.shares(), " shares of ", micro_batches,
                          " micro-batches: expected the same number in each");
  }
};

sim::MeshTimes simulated(const Puzzle& puzzle, const Plan& plan, bool traced) {
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  const int share = puzzle.samples / plan.axes.shares();
  auto model = sim::gpt_sizes(puzzle.title, size(puzzle.layers), size(puzzle.width), size(puzzle.tokens));
  const auto activation = model.activation * size(share / plan.micro_batches);
  cs::SimulationOptions options;
  options.links = cs::links_named(puzzle.links);
  options.all_reduce = algorithm_in(plan.all_reduce);
  options.keep_spans = traced;
  const int stages = plan.axes.pipe;
  return sim::simulate_mesh(options,
                            {.axes = plan.axes,
                             .model = std::move(model),
                             .forward = share * puzzle.sample_ms * 1e-3 / 3,
                             .backward = share * puzzle.sample_ms * 1e-3 * 2 / 3,
                             .activation = activation,
                             .schedule = schedule_in(plan.schedule, stages, plan.micro_batches),
                             .accumulated = stages > 1 ? 1 : plan.micro_batches,
                             .caps = {.first_bucket_cap_mb = plan.first_bucket_cap, .bucket_cap_mb = plan.bucket_cap},
                             .unit_cap = plan.unit_cap,
                             .keeps_parameters = plan.keep_parameters,
                             .optimizer_slots = slots_in("adam"),
                             .holds_activations = true,
                             .recompute = plan.recompute},
                            1);
}

/// Whether the plan keeps all limits, which are printed.
bool judge(const Puzzle& puzzle, const sim::MeshTimes& times) {
  double sent = 0;
  for (const auto& axis : times.axes) sent += axis.bytes;
  std::printf("%s\n%d layers of width %d, %d tokens; %d samples a step, %g ms of computing each; %d ranks over %s\n\n",
              puzzle.title.c_str(), puzzle.layers, puzzle.width, puzzle.tokens, puzzle.samples, puzzle.sample_ms,
              puzzle.ranks, puzzle.links.c_str());
  bool keeps = true;
  std::printf("%-20s %12s %12s\n", "", "your plan", "at most");
  const auto limit = [&](const char* what, double got, double most) {
    keeps = keeps && got <= most;
    std::printf("%-20s %12.3f %12.3f   %s\n", what, got, most, got <= most ? "" : "too much");
  };
  limit("step, ms", times.step * 1e3, puzzle.step_ms);
  limit("a rank sends, GB", sent * 1e-9, puzzle.sent_gb);
  limit("a rank holds, GB", static_cast<double>(times.held) * 1e-9, puzzle.held_gb);
  std::printf("\nof the step a rank waits");
  for (const auto& axis : times.axes)
    if (axis.ranks > 1) std::printf(" %.3f ms for %s;", axis.exposed * 1e3, std::string(axis.name).c_str());
  std::printf(" the rest it computes\n%s. Score: %.3f ms a step; best known: %.3f ms\n", keeps ? "solved" : "not solved",
              times.step * 1e3, puzzle.best_ms);
  return keeps;
}

/// What a page can draw: of a pipeline the first rank of each stage, numbered by stages, else eight ranks. Ranks of a
/// stage are alike. Sums along tensor are left out of a pipeline: there are thousands.
cs::SimulatedTimes drawn(const cs::SimulatedTimes& times, const sim::MeshAxes& axes) {
  constexpr int most = 8;
  cs::SimulatedTimes out;
  if (axes.pipe == 1) {
    const auto count = std::min<std::ptrdiff_t>(most, std::ssize(times.ranks));
    out.ranks.assign(times.ranks.begin(), times.ranks.begin() + count);
    return out;
  }
  const int apart = axes.shares() * axes.tensor;
  for (int stage = 0; stage < axes.pipe; ++stage) {
    auto& rank = out.ranks.emplace_back(times.ranks[static_cast<std::size_t>(stage * apart)]);
    for (auto* const spans : {&rank.calls, &rank.waits}) {
      std::erase_if(*spans, [](const cs::Span& span) {
        return span.traffic == ch::trace::Traffic::activations && span.call.envelope.op != ch::comm::Op::message;
      });
      for (auto& span : *spans) {
        const bool along_pipe = span.call.envelope.op == ch::comm::Op::message;
        span.call.peer /= along_pipe ? apart : 1;
        span.members.clear();
        for (const auto& [to, bytes] : std::exchange(span.sent, {}))
          if (along_pipe) span.sent[to / apart] = bytes;
      }
    }
  }
  return out;
}

void write_trace(const std::string& path, const sim::MeshTimes& times, const Plan& plan, const std::string& name) {
  const auto shown = drawn(times.times, plan.axes);
  ch::io::write_file("trace", path, cs::trace_text(shown, static_cast<int>(shown.ranks.size()), name,
                                                   ch::cat(R"("ranks":)", shown.ranks.size())));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bool traced = argc == 6 && argv[3] == std::string_view("--trace");
    ch::check<UsageError>(argc == 3 || traced, "usage: puzzle PUZZLE.json PLAN.json [--trace FILE NAME]");
    const Puzzle puzzle(argv[1]);
    const Plan plan(argv[2], puzzle);
    const auto times = simulated(puzzle, plan, traced);
    const bool solved = judge(puzzle, times);
    if (traced) write_trace(argv[4], times, plan, argv[5]);
    ch::detail::check_output();
    return solved ? 0 : 1;
  } catch (const UsageError& error) {
    ch::detail::say(error.what());
    return 2;
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
