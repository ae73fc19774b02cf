#pragma once
/// Random training programs for the policies that average in other ways: ParameterServer, LocalSgd, and
/// DistributedDataParallel with PostLocalSgd; and the expected results, computed on one device.

#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <memory>
#include <numeric>

#include <unit/parallel/random_runs.hpp>

namespace test::random::averaging {

enum class Kind { server, local, post_local };

/// The ranks' action before a step's first pass.
enum class Before { nothing, evaluate, synchronise };

struct Averaging {
  Program program;  // of DistributedDataParallel: its bucket options, for example, are unused here
  Kind kind = Kind::server;
  int start = 0, period = 1;
  std::vector<Before> before;  // per step
  std::vector<double> rates;   // learning rates
  int faulty_rank = -1, faulty_step = 0;
  bool fails_in_backward = false;

  std::string text() const {
    std::string out = cat("kind ", static_cast<int>(kind), ", start ", start, ", period ", period, ", before");
    for (const auto one : before) out += cat(" ", static_cast<int>(one));
    if (faulty_rank >= 0)
      out += cat(", rank ", faulty_rank, " fails in step ", faulty_step, fails_in_backward ? ", in backward" : "");
    return out + "\n" + program.text();
  }
};

inline const auto& features_of(const Averaging& a) { return a.program.features; }

inline Averaging draw_averaging(std::uint64_t seed) {
  Averaging a{.program = draw(seed), .before = {}, .rates = {}};
  Draw d(seed + 9'000'000);
  auto& p = a.program;
  p.features = {};
  p.machines = "";
  p.stepping = Stepping::plain;
  p.options = {};
  p.epochs = {};
  p.saved_before = -1;
  a.kind = static_cast<Kind>(d.below(3));
  ++p.features[cat("kind ", static_cast<int>(a.kind))];
  a.start = static_cast<int>(d.below(3));
  a.period = static_cast<int>(1 + d.below(3));
  const bool served = a.kind == Kind::server;
  if (!served) p.dropped = 0, p.uniform = false;
  p.hooked = p.hooked && served;
  p.options.find_unused_parameters = true;
  if (a.kind == Kind::post_local) p.norm = false;
  p.scaled = p.feature("scaled", d.chance(30));
  p.asks = p.scaled && (served || d.chance(50));
  p.feature("norm", p.norm), p.feature("dropout", p.dropped > 0), p.feature("clip", p.clip > 0);
  for (auto& step : p.steps) {
    if (a.kind == Kind::post_local) step.passes.erase(step.passes.begin(), step.passes.end() - 1);
    step.poisoned = -1;
    if (p.scaled && p.feature("overflow", d.chance(30))) {
      step.poisoned = static_cast<int>(d.below(static_cast<std::uint32_t>(p.ranks)));
      step.passes.back().rows[static_cast<std::size_t>(step.poisoned)] += 1;
    }
    for (auto& pass : step.passes) {
      const bool last = &pass == &step.passes.back();
      pass.quiet_forward = pass.quiet_backward =
          p.feature("no_sync", a.kind != Kind::post_local && !last && d.chance(70));
      const bool may_again = a.kind == Kind::local || (served && pass.quiet_backward);
      pass.again = p.feature("backward twice", may_again && d.chance(15));
      pass.again_quiet = false;
      for (auto& rows : pass.rows) rows += p.norm && !served ? 2 : 0;  // each rank has its own statistics
      p.feature("two forward passes", pass.pair);
    }
    p.feature("freezes", step.frozen != 0), p.feature("keeps gradients", step.keeps);
    a.before.push_back(d.chance(75) ? Before::nothing : d.chance(50) ? Before::evaluate : Before::synchronise);
    a.rates.push_back(served || d.chance(70) ? 1 : 0.5);
  }
  return a;
}

inline Drawn<Cpu> model_of(const Averaging& a, std::uint32_t key = 1) {
  auto model = a.program.model(key);
  if (model.norm) model.norm->set_synchronised(a.kind == Kind::server);
  return model;
}
/// Simulates all ranks of LocalSgd or PostLocalSgd, one after the other.
template <class Opt>
class AllRanks {
 public:
  AllRanks(const Averaging& a, const typename Opt::options_type& options, int way) : a_(a), options_(options) {
    for (int rank = 0; rank < a.program.ranks; ++rank) {
      ranks_.push_back(std::make_unique<One>(model_of(a), options));
      nudge(ranks_.back()->net, way);
    }
  }
  std::vector<double> run() {
    for (std::size_t s = 0; s < a_.program.steps.size(); ++s) {
      if (a_.before[s] != Before::nothing) come_together();
      for (auto& one : ranks_) one->optimizer.set_lr(options_.lr * a_.rates[s]);
      take(a_.program.steps[s]);
    }
    come_together();
    auto out = shared_values(ranks_[0]->net.module(), a_.program);
    if (a_.program.asks) out.push_back(std::log2(ranks_[0]->scale));
    return out;
  }

 private:
  struct One {
    SingleDevice<Drawn<Cpu>> net;
    Opt optimizer;
    double scale = scaling.init_scale, seen = 0;
    int good_steps = 0;
    One(Drawn<Cpu> model, const typename Opt::options_type& options)
        : net(std::move(model), 3), optimizer(net.parameters(), options) {}
    const ParameterOn<Cpu>& parameter(std::size_t k) { return *net.parameters()[k].parameter; }
  };

  void take(const Step& step) {
    for (auto& one : ranks_) {
      freeze(one->net.module(), step.frozen);
      if (!step.keeps) one->optimizer.zero_grad();
    }
    for (const Pass& pass : step.passes) {
      if (due_) come_together();
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        auto part = part_of(pass, r);
        const bool poisoned = static_cast<int>(r) == step.poisoned && &pass == &step.passes.back();
        if (poisoned) part.side = INFINITY;
        const auto loss = loss_of(ranks_[r]->net, pass, part) * (a_.program.scaled ? ranks_[r]->scale : 1);
        if (pass.again) loss.backward(true);
        loss.backward();
        ranks_[r]->seen += static_cast<double>(part.rows * (pass.again ? 2 : 1));
      }
      if (a_.kind == Kind::post_local) share_gradients(pass, ++averaged_ <= a_.start);
      apart_ = averaged_ == 0 || averaged_ > a_.start;
      if (pass.quiet_backward || !apart_) continue;
      steps_ += pass.again ? 2 : 1;
      due_ = a_.kind == Kind::local ? steps_ >= a_.period : steps_ % a_.period == 0;
    }
    std::vector<bool> finite;
    for (auto& one : ranks_) finite.push_back(!a_.program.scaled || unscale(*one));
    if (a_.program.asks && !std::all_of(finite.begin(), finite.end(), [](bool f) { return f; }))
      finite.assign(finite.size(), false);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      auto& one = *ranks_[r];
      if (finite[r] && a_.program.clip > 0) optim::clip_grad_norm(one.net.parameters(), a_.program.clip);
      if (finite[r]) one.optimizer.step();
      one.good_steps = finite[r] ? one.good_steps + 1 : 0;
      if (!finite[r]) one.scale /= 2;
      if (one.good_steps < scaling.growth_interval) continue;
      one.scale *= 2;
      one.good_steps = 0;
    }
  }
  /// Whether all gradients are finite.
  static bool unscale(One& one) {
    double all = 0;
    for (const auto& named : one.net.parameters())
      for (Index i = 0; named.parameter->grad_arrived() && i < named.parameter->count(); ++i)
        all += std::abs(static_cast<double*>(named.parameter->grad_data())[i] /= one.scale);
    return std::isfinite(all);
  }

  /// All take the mean of their parameters and of their norms' statistics.
  void come_together() {
    double all = 0;
    for (auto& one : ranks_) all += one->seen;
    const bool equal = a_.kind == Kind::post_local;
    if (apart_) {
      const auto count = ranks_[0]->net.parameters().size();
      for (std::size_t k = 0; k < count; ++k)
        mean_of(equal, all, [&](One& one) {
          const auto& p = one.parameter(k);
          return std::span(static_cast<double*>(p.value_data()), static_cast<std::size_t>(p.count()));
        });
      const auto norms = ranks_[0]->net.module().norm ? 2 : 0;
      for (int which = 0; which < norms; ++which)
        mean_of(equal, all, [&](One& one) {
          auto& norm = *one.net.module().norm;
          auto& values = which == 0 ? norm.running_mean.value() : norm.running_var.value();
          return std::span(values.data(), static_cast<std::size_t>(values.numel()));
        });
    }
    for (auto& one : ranks_) one->seen = 0;
    if (a_.kind == Kind::local) steps_ = 0;
    due_ = apart_ = false;
  }
  template <class Numbers>
  void mean_of(bool equal, double all, const Numbers& numbers) {
    std::vector<double> sum(numbers(*ranks_[0]).size());
    for (auto& one : ranks_)
      for (std::size_t i = 0; i < sum.size(); ++i)
        sum[i] += (equal || all == 0 ? 1 / static_cast<double>(ranks_.size()) : one->seen / all) * numbers(*one)[i];
    for (auto& one : ranks_) std::copy(sum.begin(), sum.end(), numbers(*one).begin());
  }

  /// As in DistributedDataParallel: all ranks have a gradient if any rank has; `average` divides it by the ranks.
  void share_gradients(const Pass& pass, bool average) {
    const auto all = std::accumulate(pass.rows.begin(), pass.rows.end(), Index{0});
    const auto count = ranks_[0]->net.parameters().size();
    for (std::size_t k = 0; k < count; ++k) {
      std::vector<double> sum(static_cast<std::size_t>(ranks_[0]->parameter(k).count()));
      bool any = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const auto& p = ranks_[r]->parameter(k);
        const double weight = all == 0 ? 1.0 / static_cast<double>(ranks_.size())
                                       : static_cast<double>(pass.rows[r]) / static_cast<double>(all);
        any = any || p.grad_arrived();
        for (std::size_t i = 0; i < sum.size() && p.grad_arrived() && weight != 0; ++i)
          sum[i] += weight * static_cast<const double*>(p.grad_data())[i];
      }
      for (auto& one : ranks_) {
        auto& p = *one->net.parameters()[k].parameter;
        if (!any || !p.wants_grad() || (p.grad_arrived() && !average)) continue;
        if (!average) std::fill(sum.begin(), sum.end(), 0.0);
        std::copy(sum.begin(), sum.end(), static_cast<double*>(p.grad_data()));
        p.set_grad_arrived(true);
      }
    }
  }

  const Averaging& a_;
  const typename Opt::options_type options_;
  std::vector<std::unique_ptr<One>> ranks_;
  int steps_ = 0, averaged_ = 0;
  bool due_ = false, apart_ = false;
};

}  // namespace test::random::averaging
