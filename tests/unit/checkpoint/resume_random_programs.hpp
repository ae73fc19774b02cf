#pragma once
/// Random training programs to be interrupted and resumed: a policy, a hook, an optimizer in one of its forms, a model,
/// its data, and each step's actions. All are legal.

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>

#include <unit/parallel/random_draws.hpp>

namespace test::random::resume {

enum class Kind { single, data_parallel, distributed, local, served };
enum class Hook { all_reduce, reduce_scatter, bf16, fp16, quantize, power_sgd, post_local_sgd, sparse_rows };
enum class Rule { sgd, adam, adamw, lion, rmsprop, adagrad, lamb, lars };
enum class Form { plain, fused, sharded };
enum class Narrowing { none, bf16, half };
enum class Rate { constant, decay, milestones, exponential, ramp, cosine, warmup, one_cycle, plateau };

/// Convolution, norm, dropout, and blocks that a pass may skip and that backward may recompute.
template <class D>
struct Trained : ch::nn::Module {
  std::optional<ch::nn::Conv2d<D>> conv;
  ch::nn::Linear<D> in, out;
  std::optional<ch::nn::BatchNorm<D>> norm;
  std::optional<ch::nn::SyncBatchNorm<D>> synced;
  ch::nn::ModuleList<ch::nn::Linear<D>> blocks;
  ch::nn::Dropout drop;
  bool recomputed = false;
  CHORUS_MODULE(Trained, conv, in, out, norm, synced, blocks, drop)

  Trained(Index width, bool convolves, double dropped) : in{convolves ? 72 : 64, width}, out{width, 10}, drop{dropped} {
    if (convolves) conv.emplace(1, 2, ch::nn::Conv2dOptions{.kernel = 3});
  }
  auto forward(const auto& x, unsigned uses) const {
    auto h = ch::tanh(conv ? in(ch::flatten(ch::tanh((*conv)(x)))) : in(ch::flatten(x)));
    const std::array<Index, 3> channels{-1, 3, h.size(1) / 3};
    if (norm) h = ch::flatten((*norm)(ch::reshape(h, channels)));
    if (synced) h = ch::flatten((*synced)(ch::reshape(h, channels)));
    const auto body = [this, uses](const auto& from) {
      auto y = drop(from);
      for (std::size_t i = 0; i < blocks.size(); ++i)
        if (uses >> i & 1) y = drop(ch::tanh(blocks[i](y))) + y * 0.5f;
      return y;
    };
    return out(recomputed ? ch::checkpoint(body, h) : body(h));
  }
};

struct Step {
  int micro_batches = 1;       // all but the last under no_sync
  std::vector<unsigned> uses;  // by rank
  std::uint64_t frozen = 0;
  int poisoned = -1;       // the rank with non-finite gradients
  bool evaluates = false;  // afterwards, on the last batch
};

struct Program {
  std::uint64_t seed = 0;
  std::map<std::string, int> features;
  Kind kind = Kind::single;
  Hook hook = Hook::all_reduce;
  Form form = Form::plain;
  Rule rule = Rule::sgd;
  Narrowing narrowing = Narrowing::none;
  Rate rate = Rate::constant;
  int devices = 1, period = 1, warmup = 0, powersgd_rank = 1;
  bool error_feedback = true;
  Index width = 6, blocks = 0, samples = 30, batch = 8;
  bool conv = false, norm = false, synced = false, recomputed = false, drop_last = false, shuffle = true,
       padding = false, augments = false;
  int workers = 0;
  double dropped = 0, clip = 0, average = -1, loss_scale = 1;
  bool scales = false, averages = false, groups = false;
  ch::DistributedDataParallelOptions options;
  std::vector<Step> steps;
  std::int64_t saved_after = 0;
  bool frozen_before = false;  // when a net is resumed, the parameters that its next step freezes are already frozen
  bool epoch_ends_saved = false;

  int processes() const { return kind == Kind::single || kind == Kind::data_parallel ? 1 : devices; }
  bool feature(const std::string& name, bool there) {
    if (there) ++features[name];
    return there;
  }
  Trained<ch::Cpu> model(std::uint32_t key) const {
    Trained<ch::Cpu> model(width, conv, dropped);
    if (norm) model.norm.emplace(3);
    if (synced) model.synced.emplace(3);
    for (Index i = 0; i < blocks; ++i) model.blocks.push_back(ch::nn::Linear<ch::Cpu>(width, width));
    model.recomputed = recomputed;
    for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
      const auto values = numbers(1, named.parameter->count(), key++ * 100);
      for (Index i = 0; i < values.numel(); ++i)
        static_cast<float*>(named.parameter->value_data())[i] = 0.4f * static_cast<float>(values.data()[i]);
    }
    return model;
  }
  std::string text() const {
    std::string out = ch::cat("seed ", seed, ", policy ", static_cast<int>(kind), ", hook ", static_cast<int>(hook),
                              ", form ", static_cast<int>(form), ", rule ", static_cast<int>(rule), ", narrowing ",
                              static_cast<int>(narrowing), ", rate ", static_cast<int>(rate), ", devices ", devices,
                              ", period ", period, ", warmup ", warmup, ", width ", width, ", blocks ", blocks,
                              ", samples ", samples, ", batch ", batch, ", saved after ", saved_after);
    for (const auto& [name, count] : features) out += ch::cat(", ", name);
    out += "\n  " + options.describe<ch::Cpu>();
    for (const auto& step : steps) {
      out += ch::cat("  step: ", step.micro_batches, " batches, frozen ", step.frozen % 65536, ", poisoned ",
                     step.poisoned, step.evaluates ? ", evaluates" : "", ", uses");
      for (const auto uses : step.uses) out += ch::cat(" ", uses % (1u << blocks));
      out += "\n";
    }
    return out;
  }
};

inline void draw_hook(Program& p, Draw& d) {
  p.hook = d.chance(35) ? Hook::all_reduce : static_cast<Hook>(1 + d.below(7));
  ++p.features[ch::cat("hook ", static_cast<int>(p.hook))];
  p.powersgd_rank = 1 + static_cast<int>(d.below(2));
  p.warmup = static_cast<int>(d.below(4));
  p.period = 1 + static_cast<int>(d.below(3));
  p.error_feedback = !d.chance(15);
  if (p.hook == Hook::reduce_scatter)
    p.form = Form::sharded;
  else if (p.hook == Hook::all_reduce || p.hook == Hook::bf16)
    p.form = static_cast<Form>(d.below(3));
}

inline void draw_options(Program& p, Draw& d, bool any_unused) {
  auto& o = p.options;
  const double kib = 1.0 / 1024;
  if (p.feature("small buckets", d.chance(70))) {
    o.first_bucket_cap_mb = d.below(3) * 0.5 * kib;
    o.bucket_cap_mb = d.below(4) * 0.5 * kib;
  }
  // If ranks' buffers differ, a checkpoint has rank 0's, unless post-local SGD makes ranks differ entirely.
  o.broadcast_buffers = !p.feature("no broadcast_buffers", p.hook != Hook::post_local_sgd && d.chance(20));
  o.find_unused_parameters = p.feature("find_unused", any_unused || (!o.static_graph && d.chance(20)));
}

inline Program draw(std::uint64_t seed) {
  Draw d(seed);
  Program p;
  p.seed = seed;
  p.kind = d.chance(15) ? Kind::single : d.chance(20) ? Kind::data_parallel : Kind::distributed;
  if (p.kind == Kind::distributed && d.chance(25)) p.kind = d.chance(70) ? Kind::local : Kind::served;
  const bool ranks = p.kind == Kind::distributed;
  p.devices = p.kind == Kind::single ? 1 : 1 + static_cast<int>(d.below(4));
  ++p.features[ch::cat("policy ", static_cast<int>(p.kind), " on ", p.devices)];
  if (ranks) draw_hook(p, d);
  if (p.kind == Kind::local) p.period = 1 + static_cast<int>(d.below(4));
  ++p.features[ch::cat("form ", static_cast<int>(p.form))];
  p.narrowing = d.chance(70) ? Narrowing::none : static_cast<Narrowing>(1 + d.below(2));
  if (p.hook != Hook::all_reduce) p.narrowing = Narrowing::none;
  if (p.narrowing != Narrowing::none) p.form = Form::plain;
  ++p.features[ch::cat("narrowing ", static_cast<int>(p.narrowing))];
  p.rule = p.form == Form::plain ? static_cast<Rule>(d.below(8)) : p.form == Form::fused ? Rule::sgd : Rule::adam;
  ++p.features[ch::cat("rule ", static_cast<int>(p.rule))];
  p.rate = static_cast<Rate>(d.below(9));
  ++p.features[ch::cat("rate ", static_cast<int>(p.rate))];
  const bool fused = p.form == Form::fused;

  p.width = 3 * (2 + d.below(4));
  p.blocks = d.below(4);
  p.conv = p.feature("conv", d.chance(30));
  if (p.narrowing == Narrowing::none) p.recomputed = p.feature("recomputed", d.chance(25));
  if (p.feature("dropout", d.chance(40))) p.dropped = 0.3;
  p.batch = Index{p.devices} * (2 + d.below(4)) + d.below(3);
  p.samples = p.batch * (1 + d.below(4)) + d.below(static_cast<std::uint32_t>(p.batch));
  p.drop_last = p.feature("drop_last", d.chance(30));
  p.shuffle = d.chance(80);
  p.padding = p.feature("padding", p.processes() > 1 && d.chance(20));
  p.augments = p.feature("augments", d.chance(40));
  p.workers = static_cast<int>(d.below(3));
  // A share without samples has no statistics.
  const Index last = p.drop_last || p.samples % p.batch == 0 ? p.batch : p.samples % p.batch;
  const bool freezes = p.feature("freezes", d.chance(30));
  p.frozen_before = freezes && d.chance(50);
  // 0: all blocks; 1: on each rank the same in all passes; 2: varying between passes; 3: varying between ranks, too.
  const auto use = d.below(4);
  ++p.features[ch::cat("use ", use)];
  if (p.narrowing == Narrowing::none && last >= p.devices && d.chance(50)) {
    p.synced = p.feature("synced norm", use % 2 == 0 && d.chance(40));
    p.norm = p.feature("norm", !p.synced);
  }
  if (ranks && use < 2 && !freezes) p.options.static_graph = p.feature("static_graph", d.chance(40));
  if (ranks) draw_options(p, d, use > 0 && !p.options.static_graph);
  const bool poison =
      p.feature("non-finite skipped", ranks && !fused && p.hook != Hook::post_local_sgd && d.chance(15));
  if (poison) p.options.non_finite = ch::NonFinite::skip_step;
  p.scales = p.feature("loss scale", !fused && !poison && (p.narrowing == Narrowing::half || d.chance(30)));
  p.loss_scale = p.feature("overflow", p.scales && d.chance(40)) ? 3e38 : 64;
  if (p.feature("clip", !fused && d.chance(30))) p.clip = 0.1;
  p.averages = p.feature("averages", d.chance(40));
  p.average = d.chance(50) ? 0.9 : -1;
  p.groups = p.feature("groups", p.form == Form::plain && d.chance(30));

  const auto uses = [&] { return d.below(256); };
  std::vector<unsigned> fixed;
  for (int r = 0; r < p.devices; ++r) fixed.push_back(use == 0 ? all_blocks : uses());
  const auto count = 2 + d.below(6);
  const auto accumulates = p.feature("accumulates", d.chance(35));
  const Index batches = p.samples / p.batch + (p.samples % p.batch > 0 && !p.drop_last ? 1 : 0);
  for (std::uint32_t s = 0; s < count; ++s) {
    Step step;
    step.uses = fixed;
    if (use == 2) step.uses.assign(fixed.size(), uses());
    if (use == 3)
      for (auto& u : step.uses) u = uses();
    if (accumulates)
      step.micro_batches = 1 + static_cast<int>(d.below(static_cast<std::uint32_t>(std::min<Index>(batches, 3))));
    if (freezes && d.chance(60)) step.frozen = d.bits() & d.bits();
    if (poison && d.chance(25)) step.poisoned = static_cast<int>(d.below(static_cast<std::uint32_t>(p.devices)));
    step.evaluates = (p.options.broadcast_buffers || !p.norm) && d.chance(15);
    p.steps.push_back(step);
  }
  p.saved_after = d.below(count);
  p.epoch_ends_saved = d.chance(50);
  return p;
}

}  // namespace test::random::resume
