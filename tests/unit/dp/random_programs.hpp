#pragma once
/// Random training programs for DataParallel, and their model. All are legal: one device trains to the same numbers.
/// Excluded, since one device has no equivalent: losses computed by the model after which another forward pass comes
/// before `mean_loss`.

#include <atomic>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chrono>
#include <thread>

#include <unit/parallel/random_draws.hpp>

namespace test::random::dp {

/// What one copy of the model does.
enum class Harm { none, throws, throws_in_backward, comes_late, comes_late_in_backward };

/// The settings of one call of the model, besides its inputs; all copies get it by reference.
struct Call {
  std::vector<unsigned> uses;  // blocks, by device
  bool columns = false;        // samples are columns
  bool recomputed = false;     // in backward, by `checkpoint`
  Harm harm = Harm::none;
  int where = 0;                         // the device that does the harm
  mutable std::atomic<bool> let = true;  // late copies continue
  int stands_for = -1;                   // the device whose work is done on device 0

  int here(const auto& x) const { return stands_for < 0 ? x.device().index : stands_for; }
  void harm_if(Harm now, int device) const {
    if (now != harm || device != where) return;
    if (now == Harm::throws || now == Harm::throws_in_backward) ch::fail<ch::ShapeError>("the program's own error");
    while (!let) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

/// An input with many members. V: Variable or GraphVariable.
template <class V>
struct Letter {
  V x;
  std::map<std::string, ch::Tensor<double, 2>> masks;
  std::optional<ch::Variable<double, 0>> scale;  // has no axis: every device gets it
  std::vector<std::pair<V, int>> more;
  auto fields() { return std::tie(x, masks, scale, more); }
};

template <class D>
struct Parcel : ch::nn::Module {
  Drawn<D> core;
  std::optional<ch::nn::BatchNorm<D, double>> own_norm;  // each copy's own statistics
  CHORUS_MODULE(Parcel, core, own_norm)
  explicit Parcel(Drawn<D> drawn) : core(std::move(drawn)) {}

  /// Five numbers per sample.
  auto forward(const ch::Operand auto& input, const Call& call) const {
    const int device = call.here(input);
    call.harm_if(Harm::throws, device);
    call.harm_if(Harm::comes_late, device);
    const auto pass = [&, uses = call.uses[static_cast<std::size_t>(device)]](const auto& x) {
      const auto [scores, side] = core(x, uses);
      const auto joined = ch::concat(1, scores, side);
      if (!own_norm) return joined;
      return ch::flatten((*own_norm)(ch::reshape(joined, std::array<Index, 3>{joined.size(0), 5, 1})));
    };
    if constexpr (ch::detail::is_graph_variable<std::remove_cvref_t<decltype(input)>>) {
      return turned(pass(turned(input, call)), call);
    } else {
      const auto x = turned(input, call);
      const auto y = call.recomputed ? ch::checkpoint(pass, x) : pass(x);
      const auto harmed = call.harm < Harm::throws_in_backward || call.harm == Harm::comes_late
                              ? y
                              : ch::record(
                                    "harm", y.value(),
                                    [&call, device](const auto& dy, auto dx) {
                                      call.harm_if(Harm::throws_in_backward, device);
                                      call.harm_if(Harm::comes_late_in_backward, device);
                                      dx->add(ch::contiguous(dy));
                                    },
                                    y);
      return turned(harmed, call);
    }
  }
  /// The model takes the sum of its members; the output has members, too.
  template <class V>
  auto forward(const Letter<V>& letter, const Call& call) const {
    auto x = letter.x * 1.0;
    if (letter.masks.contains("mask")) x = x * letter.masks.at("mask");
    if (letter.scale) x = x * *letter.scale;
    for (const auto& [other, factor] : letter.more) x = x + other * static_cast<double>(factor);
    const auto y = forward(x, call);
    const int axis = call.columns ? 0 : 1;
    const auto scores = ch::slice(y, axis, 0, 3), side = ch::slice(y, axis, 3, 5);
    return std::tuple(std::vector{scores}, std::map<std::string, std::remove_const_t<decltype(side)>>{{"side", side}},
                      std::optional(ch::value_of(y)), call.here(letter.x));
  }
  /// The mean loss of its share. labels: one row or column.
  auto forward(const auto& x, const ch::Tensor<std::int64_t, 2, D>& labels, const Call& call) const {
    return loss_of(forward(x, call), ch::reshape(labels, ch::Shape<1>{labels.numel()}), call);
  }

  static auto loss_of(const auto& y, const ch::Tensor<std::int64_t, 1, D>& labels, const Call& call) {
    const auto rows = turned(y, call);
    const auto side = ch::slice(rows, 1, 3, 5);
    if (labels.numel() == 0) return ch::sum(ch::square(rows));
    return ch::cross_entropy(ch::slice(rows, 1, 0, 3), labels) + ch::mean(ch::square(side));
  }
  static auto turned(const auto& x, const Call& call) { return call.columns ? ch::transpose(x, 0, 1) : x; }
};

enum class Form { tensor, variable, letter, inner_loss, graph, graph_letter };
enum class Then { backward, twice, grad_first, after_the_next };

/// A forward pass and the use of its result.
struct Pass {
  std::uint32_t key = 0;
  Index rows = 0;
  Form form = Form::tensor;
  Then then = Then::backward;
  std::vector<unsigned> uses;  // by device
  bool recomputed = false;
  bool output_hook = false;
  bool peek = false, evaluated_peek = false;  // a forward pass without gradients in between
};
struct Step {
  std::vector<Pass> passes;
  std::uint64_t frozen = 0;  // bits of parameters
  bool keeps = false;        // gradients of the step before
  bool overflows = false;    // in its last pass
  Harm harm = Harm::none;    // in a pass before the others
  int where = 0;
};
enum class Rule { sgd, adam, rmsprop, adagrad };

struct Program : Structure {
  std::uint64_t seed = 0;
  std::vector<int> ids;
  int output = -1, dim = 0;
  bool own_norm = false, by_shares = false, hooked = false, counted = false;
  bool scaled = false;  // by a GradScaler
  Rule rule = Rule::sgd;
  double clip = 0;
  std::vector<Step> steps;
  int saved_before = -1;         // the step before which a checkpoint is written
  std::vector<int> resumed_ids;  // into a new net on these; empty: into the same one
  std::chrono::milliseconds timeout{60'000};

  Parcel<ch::Cpu> model() const {
    Parcel<ch::Cpu> model(Structure::model());
    if (own_norm) model.own_norm.emplace(5);
    return model;
  }
  std::string text() const {
    std::string out = ch::cat("seed ", seed, ", ", Structure::text(), "\n  devices");
    for (const int id : ids) out += ch::cat(" ", id);
    out += ch::cat(", output ", output, ", dim ", dim, own_norm ? ", own norm" : "", by_shares ? ", by shares" : "",
                   hooked ? ", hooked" : "", counted ? ", counted" : "", scaled ? ", scaled" : "", ", rule ",
                   static_cast<int>(rule), ", clip ", clip, ", saved before ", saved_before, ", resumed on");
    for (const int id : resumed_ids) out += ch::cat(" ", id);
    for (const auto& step : steps) {
      out += ch::cat("\n  step: frozen ", step.frozen % 65536, step.keeps ? ", keeps" : "",
                     step.overflows ? ", overflows" : "", ", harm ", static_cast<int>(step.harm), " on ", step.where);
      for (const auto& pass : step.passes) {
        out += ch::cat("\n    ", pass.rows, " rows, form ", static_cast<int>(pass.form), ", then ",
                       static_cast<int>(pass.then), pass.recomputed ? ", recomputed" : "",
                       pass.output_hook ? ", output hook" : "", pass.peek ? ", peek" : "",
                       pass.evaluated_peek ? ", evaluated peek" : "", ", uses");
        for (const auto uses : pass.uses)
          out += ch::cat(" ", uses & backwards ? "-" : "", uses % (1u << blocks.size()));
      }
    }
    return out + "\n";
  }
};

inline Program draw(std::uint64_t seed) {
  Draw d(seed);
  Program p;
  p.seed = seed;
  const auto list_of_devices = [&](bool repeats) {
    std::vector<int> ids;
    const auto count = 1 + d.below(5);
    for (std::uint32_t i = 0; i < count; ++i) ids.push_back(static_cast<int>(repeats ? d.below(3) : i));
    for (auto i = count; i > 1; --i) std::swap(ids[i - 1], ids[d.below(i)]);
    return ids;
  };
  // Copies are identified by their devices.
  const bool repeats = p.feature("repeated devices", d.chance(15));
  p.ids = list_of_devices(repeats);
  ++p.features[ch::cat(p.ids.size(), " devices")];
  if (p.feature("output elsewhere", d.chance(20))) p.output = static_cast<int>(d.below(6));
  p.dim = p.feature("columns", d.chance(20));
  p.width = p.feature("wide", d.chance(10)) ? 30 + d.below(90) : 1 + d.below(9);
  p.draw_blocks(d, 25);
  p.conv = p.feature("conv", d.chance(30));
  p.norm = p.feature("norm", d.chance(20));
  p.own_norm = p.feature("own norm", !p.norm && d.chance(15));
  if (p.feature("dropout", d.chance(30))) p.dropped = 0.3;
  const bool differ = p.feature("uses differ", !repeats && !p.norm && d.chance(25));
  p.by_shares = p.own_norm || differ;
  p.rule = static_cast<Rule>(d.below(4));
  if (p.feature("clip", d.chance(30))) p.clip = 0.05 + 0.1 * d.below(4);
  p.hooked = p.feature("hook on a parameter", d.chance(25));
  p.counted = p.feature("hooks counted", d.chance(40));
  Draw more(seed + 7'000'000);  // keeps older programs unchanged
  p.scaled = p.feature("scaled", more.chance(30));
  const bool freezes = p.feature("freezes", d.chance(35)), harms = !repeats && d.chance(25);
  const bool graphs = p.feature("graph", d.chance(25));
  const auto devices = static_cast<std::uint32_t>(p.ids.size());

  const auto uses = [&] { return (d.chance(25) ? 0 : d.below(256)) | (d.chance(30) ? backwards : 0); };
  const auto count = 2 + d.below(4);
  for (std::uint32_t s = 0; s < count; ++s) {
    Step step;
    if (freezes && d.chance(60)) step.frozen = d.bits() & d.bits();
    step.keeps = p.feature("keeps gradients", s > 0 && d.chance(10));
    step.overflows = p.feature("overflow", p.scaled && more.chance(30));
    const auto passes = d.chance(50) ? 1 : 1 + d.below(3);
    for (std::uint32_t i = 0; i < passes; ++i) {
      Pass pass;
      pass.key = 16 * s + i;
      pass.rows = p.feature("fewer than devices", d.chance(20)) ? d.below(devices) : d.below(14);
      if (p.norm && pass.rows < 4) pass.rows += 4;
      if (p.own_norm) pass.rows += 2 * static_cast<Index>(devices);
      p.feature("empty", pass.rows == 0);
      pass.form = static_cast<Form>(d.below(4));
      if (graphs && d.chance(50)) pass.form = d.chance(60) ? Form::graph : Form::graph_letter;
      if (p.by_shares && pass.form == Form::graph_letter) pass.form = Form::graph;
      if (p.by_shares && pass.form < Form::graph) pass.form = d.chance(50) ? Form::tensor : Form::variable;
      ++p.features[ch::cat("form ", static_cast<int>(pass.form))];
      pass.then = static_cast<Then>(d.below(4) * d.below(2));
      if (pass.then == Then::after_the_next && i + 1 == passes) pass.then = Then::backward;
      ++p.features[ch::cat("then ", static_cast<int>(pass.then))];
      pass.recomputed = p.feature("recomputed", pass.form < Form::graph && d.chance(15));
      // A second pass would change the norms' statistics twice.
      if (p.norm || p.own_norm || pass.then == Then::grad_first) pass.recomputed = false;
      pass.output_hook = p.feature("output hook", pass.form < Form::letter && d.chance(15));
      pass.peek = p.feature("peek", d.chance(15));
      pass.evaluated_peek = pass.peek && d.chance(50);
      const auto of_all = d.chance(50) ? all_blocks : uses();
      for (std::uint32_t r = 0; r < 6; ++r) pass.uses.push_back(differ ? uses() : of_all);
      step.passes.push_back(pass);
    }
    if (harms && !p.norm && !p.own_norm && d.chance(50)) {
      step.harm = static_cast<Harm>(1 + d.below(20) % 11 % 4);
      step.where = p.ids[d.below(devices)];
      const bool late = step.harm == Harm::comes_late || step.harm == Harm::comes_late_in_backward;
      if (late && (step.where == p.ids[0] || seed % 4 != 0)) step.harm = Harm::throws;
      ++p.features[ch::cat("harm ", static_cast<int>(step.harm))];
      if (step.harm >= Harm::comes_late) p.timeout = std::chrono::milliseconds(300);
      if (step.harm == Harm::throws_in_backward || step.harm == Harm::comes_late_in_backward) step.keeps = false;
    }
    p.steps.push_back(step);
  }
  if (p.feature("checkpoint", d.chance(30))) {
    p.saved_before = static_cast<int>(d.below(count));
    p.steps[static_cast<std::size_t>(p.saved_before)].keeps = false;  // a checkpoint has no gradients
    if (p.feature("resumed on other devices", d.chance(50) && !differ && !p.own_norm && !harms))
      p.resumed_ids = list_of_devices(false);
  }
  return p;
}

}  // namespace test::random::dp
