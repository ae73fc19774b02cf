#pragma once
/// Randomly drawn nets with several SyncBatchNorms, and their training programs.

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/containers.hpp>

#include "check_programs.hpp"
#include "random_draws.hpp"

namespace test::random::sync_norm {

inline constexpr Index width = 12;

/// The construction and use of a layer.
struct LayerPlan {
  Index channels = 1;
  bool fused = false, residual = false, twice = false, recomputed = false;
};

template <class D>
struct Layer : nn::Module {
  LayerPlan plan;
  nn::Linear<D, double> linear{width, width};
  std::optional<nn::SyncBatchNorm<D, double>> norm;
  std::optional<nn::BatchNormReLU<D, double>> fused;
  CHORUS_MODULE(Layer, linear, norm, fused)

  explicit Layer(const LayerPlan& how) : plan(how) {
    if (!how.fused)
      norm.emplace(how.channels);
    else
      fused.emplace(how.channels).set_synchronised(true);
  }
  auto forward(const auto& x) const {
    const auto by_channel = [&](const auto& y) {
      return reshape(y, std::array<Index, 3>{-1, plan.channels, width / plan.channels});
    };
    const auto h = by_channel(linear(x));
    const auto y = norm ? tanh((*norm)(h)) : plan.residual ? (*fused)(h, by_channel(x)) : (*fused)(h);
    return flatten(y) + x * 0.5;
  }
};

template <class D>
struct Net : nn::Module {
  nn::Linear<D, double> in{5, width}, out{width, 3};
  nn::ModuleList<Layer<D>> layers;
  CHORUS_MODULE(Net, in, layers, out)

  /// `fails`: the layer before which a share throws if its first number is 2 or more.
  auto forward(const auto& x, int fails) const {
    auto h = tanh(in(x));
    for (std::size_t i = 0; i < layers.size(); ++i) {
      check<UsageError>(static_cast<int>(i) != fails || x.size(0) == 0 || value_of(x)(0, 0) < 2, "a two is too much");
      const auto& layer = layers[i];
      for (int turn = 0; turn <= layer.plan.twice; ++turn)
        h = layer.plan.recomputed ? checkpoint([&layer](const auto& y) { return layer.forward(y); }, h)
                                  : layer.forward(h);
    }
    return out(h);
  }
};

struct Pass {
  std::uint32_t key = 0;
  std::vector<Index> rows;  // by rank or device
  bool quiet = false, again = false, peeks = false;
};
struct Step {
  std::vector<Pass> passes;
  std::uint64_t frozen = 0, evaluates = 0;  // bits of parameters and of layers
};
enum class Kind { data_parallel, distributed, groups, server };

struct Program {
  std::uint64_t seed = 0;
  Kind kind = Kind::distributed;
  std::vector<LayerPlan> layers;
  std::vector<int> colors;  // by rank
  std::vector<Step> steps;
  bool static_graph = false, small_buckets = false;
  int fails = -1, faulty = -1;  // a layer, and the rank or device whose share fails
  std::map<std::string, int> features;

  bool feature(const std::string& name, bool there) {
    if (there) ++features[name];
    return there;
  }
  Net<Cpu> model() const {
    Net<Cpu> model;
    for (const auto& plan : layers) model.layers.push_back(Layer<Cpu>(plan));
    std::uint32_t key = 100;
    for (const auto& named : nn::named_parameters<Cpu>(model)) {
      const auto values = numbers(1, named.parameter->count(), key++);
      for (Index i = 0; i < values.numel(); ++i)
        static_cast<double*>(named.parameter->value_data())[i] = 0.7 * values.data()[i];
    }
    return model;
  }
  std::string text() const {
    auto out = cat("seed ", seed, ", kind ", static_cast<int>(kind), static_graph ? ", static graph" : "",
                   small_buckets ? ", small buckets" : "", ", colors");
    for (const int color : colors) out += cat(" ", color);
    if (faulty >= 0) out += cat(", share ", faulty, " fails at layer ", fails);
    for (const auto& l : layers)
      out += cat("\n  ", l.channels, " channels", l.fused ? ", fused" : "", l.residual ? ", residual" : "",
                 l.twice ? ", twice" : "", l.recomputed ? ", recomputed" : "");
    for (const auto& step : steps) {
      out += cat("\n  step: frozen ", step.frozen % 65536, ", evaluates ", step.evaluates);
      for (const auto& pass : step.passes) {
        out += "; rows";
        for (const auto rows : pass.rows) out += cat(" ", rows);
        out += cat(pass.quiet ? ", quiet" : "", pass.again ? ", again" : "", pass.peeks ? ", peeks" : "");
      }
    }
    return out + "\n";
  }
};

inline Program draw(std::uint64_t seed) {
  Draw d(seed);
  Program p;
  p.seed = seed;
  p.kind = static_cast<Kind>(d.below(4));
  constexpr const char* kinds[] = {"data parallel", "distributed", "groups", "server"};
  ++p.features[kinds[static_cast<int>(p.kind)]];
  const auto ranks = 1 + d.below(4) + (p.kind == Kind::groups);
  for (std::uint32_t r = 0; r < ranks; ++r)
    p.colors.push_back(p.kind == Kind::groups ? static_cast<int>(d.below(2)) : 0);
  for (auto n = 1 + d.below(3); n > 0; --n) {
    LayerPlan l{.channels = d.one_of<Index>({1, 2, 3, 4, 6, 12})};
    l.fused = p.feature("fused", d.chance(40));
    l.residual = l.fused && d.chance(50);
    l.twice = p.feature("twice", d.chance(25));
    l.recomputed = p.feature("recomputed", d.chance(30));
    p.layers.push_back(l);
  }
  p.static_graph = p.feature("static graph", d.chance(25));
  p.small_buckets = p.feature("small buckets", d.chance(50));
  const bool freezes = p.feature("freezes", !p.static_graph && d.chance(40));
  for (std::uint32_t s = 0, count = 2 + d.below(4); s < count; ++s) {
    Step step;
    if (freezes && d.chance(60)) step.frozen = d.bits() & d.bits();
    if (p.feature("layers evaluate", d.chance(25))) step.evaluates = 1 + d.below(7);
    const auto passes = d.chance(60) ? 1 : 1 + d.below(3);
    for (std::uint32_t i = 0; i < passes; ++i) {
      Pass pass{.key = 16 * s + i, .rows = {}};
      for (std::uint32_t r = 0; r < ranks; ++r) pass.rows.push_back(d.chance(30) ? 0 : 1 + d.below(5));
      // One rank of each group has at least two rows.
      for (int color = 0; color < 2; ++color) {
        const auto first = std::find(p.colors.begin(), p.colors.end(), color) - p.colors.begin();
        if (first < static_cast<std::ptrdiff_t>(ranks)) pass.rows[static_cast<std::size_t>(first)] += 2;
      }
      const bool averages = p.kind == Kind::distributed || p.kind == Kind::groups;
      pass.quiet = p.feature("no_sync", averages && i + 1 < passes && !p.static_graph && d.chance(60));
      pass.again = p.feature("backward twice", !p.static_graph && p.kind != Kind::server && d.chance(15));
      pass.peeks = p.feature("peeks", d.chance(20));
      step.passes.push_back(pass);
    }
    p.steps.push_back(step);
  }
  return p;
}

}  // namespace test::random::sync_norm
