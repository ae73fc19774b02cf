#pragma once
/// Runs drawn programs as one of several ranks.

#include <unistd.h>

#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>

#include "random_runs.hpp"

namespace test::random {

/// Any optimizer of a net.
struct Stepper {
  std::function<void()> zero_grad, step, clip;
  std::function<bool()> unscale, step_scaled;
  std::function<void(const std::string&)> save, load;
};
template <class Opt, class Net>
Stepper stepper(Net& net, const auto& options, const Program& program, optim::GradScaler<Cpu>& scaler) {
  const double max_norm = program.clip;
  std::shared_ptr<Opt> optimizer;
  if constexpr (requires { Opt(net, options); })
    optimizer = std::make_shared<Opt>(net, options);
  else
    optimizer = std::make_shared<Opt>(net.parameters(), options);
  return {
      .zero_grad = [optimizer] { optimizer->zero_grad(); },
      .step = [optimizer] { optimizer->step(); },
      .clip =
          [&, optimizer, max_norm] {
            if constexpr (requires { optimizer->clip_grad_norm(max_norm); })
              optimizer->clip_grad_norm(max_norm);
            else
              optim::clip_grad_norm(net.parameters(), max_norm);
          },
      .unscale =
          [&, optimizer] {
            if constexpr (requires { scaler.unscale(*optimizer); }) return scaler.unscale(*optimizer);
            return scaler.unscale();
          },
      .step_scaled =
          [&, optimizer] {
            if constexpr (requires { scaler.step(*optimizer); }) return scaler.step(*optimizer);
            return false;  // an optimizer that steps in backward takes no scaler
          },
      .save = [=, &net, &scaler](const std::string& path) { io::save_checkpoint(net, *optimizer, {}, path, scaler); },
      .load = [=, &net, &scaler](const std::string& path) { io::load_checkpoint(net, *optimizer, path, scaler); }};
}
template <class Opt, class Net>
Stepper stepper_of(Net& net, const typename Opt::options_type& options, const Program& program,
                   optim::GradScaler<Cpu>& scaler) {
  if (program.stepping >= Stepping::sharded) return stepper<ShardedOptimizer<Opt>>(net, options, program, scaler);
  if constexpr (!requires { net.hook().in_parts; }) {
    if (program.stepping == Stepping::fused) return stepper<FusedOptimizer<Opt>>(net, options, program, scaler);
    return stepper<Opt>(net, options, program, scaler);
  }
  return {};
}

template <class Hook>
class Rank {
 public:
  using Net = DistributedDataParallel<Drawn<Cpu>, Hook>;

  Rank(const Program& program, const World& world)
      : program_(program), rank_(static_cast<std::size_t>(world.rank)), own_{Own{}, 3}, skew_(program.seed + rank_) {
    const auto backend = program.machines.empty()  ? comm::Backend::automatic
                         : program.machines == "t" ? comm::Backend::tcp
                                                   : comm::Backend::hierarchical;
    if (backend == comm::Backend::hierarchical) setenv("CHORUS_HOST_ID", program.machines.substr(rank_, 1).c_str(), 1);
    communicator_ = comm::connect(world, {.backend = backend});
    make_net();
  }

  std::string run() {
    if (program_.epochs.empty())
      for (std::size_t s = 0; s < program_.steps.size(); ++s) {
        if (static_cast<int>(s) == program_.saved_before) save_and_load(program_.steps[s]);
        take(program_.steps[s]);
        note();
      }
    std::size_t next = 0;
    for (const auto& epoch : program_.epochs) {
      net_->join(
          [&] {
            for (int s = 0; s < epoch[rank_]; ++s) take(program_.steps[next + static_cast<std::size_t>(s)]);
          },
          {.step = [&] { step(); }});
      next += static_cast<std::size_t>(*std::max_element(epoch.begin(), epoch.end()));
      note();
    }
    if (program_.ignores()) check_own();
    return test::text_of(shared_values(net_->module(), program_, *scaler_)) + "|" + notes_;
  }

 private:
  /// The layer whose parameters differ by rank, as a separate net for comparison.
  struct Own : nn::Module {
    nn::Linear<Cpu, double> side{16, 2};
    CHORUS_MODULE(Own, side)
    auto forward(const auto& x) const { return side(x); }
  };

  void make_net() {
    optimizer_ = {};
    scaler_.reset();
    net_.reset();
    auto model = program_.model(rank_ == 0 || !program_.options.init_sync ? 1 : 2);
    std::copy_n(model.side.weight.value().data(), 32, own_.module().side.weight.value().data());
    std::copy_n(model.side.bias.value().data(), 2, own_.module().side.bias.value().data());
    net_.emplace(std::move(model), communicator_, program_.options, 3);
    if (program_.asks)
      scaler_.emplace(*net_, scaling);
    else
      scaler_.emplace(net_->parameters(), scaling);
    if (program_.adam) {
      optimizer_ = stepper_of<optim::Adam<Cpu>>(*net_, adam, program_, *scaler_);
      own_optimizer_ = std::make_unique<optim::Adam<Cpu>>(own_.parameters(), adam);
    } else {
      optimizer_ = stepper_of<optim::Sgd<Cpu>>(*net_, sgd, program_, *scaler_);
      own_optimizer_ = std::make_unique<optim::Sgd<Cpu>>(own_.parameters(), sgd);
    }
  }

  void take(const Step& step) {
    const bool here = &step == &program_.steps[static_cast<std::size_t>(program_.faulty_step)];
    const bool faulty = here && static_cast<int>(rank_) == program_.faulty_rank;
    const auto fault = faulty ? program_.fault : Fault::none;
    freeze(net_->module(), step.frozen);
    if (fault == Fault::freezes) net_->module().out.bias.set_requires_grad(false);
    if (here && program_.fault == Fault::freezes_other)
      net_->module().blocks[faulty ? 0 : 1].weight.set_requires_grad(false);
    if (!step.keeps) optimizer_.zero_grad();
    for (std::size_t i = 0; i < step.passes.size(); ++i) {
      const bool bad = i + 1 == step.passes.size() && step.poisoned == static_cast<int>(rank_);
      Pass pass = step.passes[i];
      if (fault == Fault::misses_pass && i == 0) continue;
      if (fault == Fault::leaves_out) pass.uses[rank_] = 0;
      if (fault == Fault::quiet) pass.quiet_forward = pass.quiet_backward = true;
      if (fault == Fault::evaluates) net_->eval();
      if (fault == Fault::throws) {
        const auto loss = loss_of(*net_, pass, part_of(pass, rank_));
        fail<Error>("the program's own error");
      }
      backward(pass, bad ? INFINITY : 1);
    }
    if (fault == Fault::misses_step) return;
    const bool stepped = this->step(fault != Fault::misses_clip);
    if (program_.ignores()) take_own(step, stepped);
  }
  /// Whether the optimizer stepped; a scaler skips the step after an overflow.
  bool step(bool clips = true) {
    clips = clips && program_.clip > 0;
    if (!program_.scaled) {
      if (clips) optimizer_.clip();
      optimizer_.step();
      return true;
    }
    if (clips && optimizer_.unscale()) optimizer_.clip();
    return optimizer_.step_scaled();
  }
  void backward(const Pass& pass, double side) {
    auto& net = *net_;
    const auto within = [&](bool quietly, const auto& part) {
      const NoSync quiet = quietly ? net.no_sync() : NoSync();
      return part();
    };
    if (program_.skewed && skew_.chance(20)) usleep(skew_.below(3000));
    auto part = part_of(pass, rank_);
    part.side = side;
    auto loss = within(pass.quiet_forward, [&] { return loss_of(net, pass, part); });
    if (program_.scaled) loss = scaler_->scale(loss);
    if (pass.peeks >> rank_ & 1) peek(net, pass);
    const auto backward_again = [&] { loss.backward(true); };
    if (pass.again) within(pass.quiet_backward || pass.again_quiet, backward_again);
    within(pass.quiet_backward, [&] { loss.backward(); });
  }
  void save_and_load(const Step& other) {
    optimizer_.save(program_.file);
    take(other);
    communicator_.barrier();
    if (program_.loads_into_new) make_net();
    optimizer_.load(program_.file);
  }
  void take_own(const Step& step, bool stepped) {
    if (!step.keeps) own_optimizer_->zero_grad();
    for (const Pass& pass : step.passes)
      for (int again = 0; again <= pass.again; ++again)
        for (int pair = 0; pair <= pass.pair; ++pair) {
          const auto part = part_of(pass, rank_);
          const auto x = numbers(part.begin + part.rows, 16, pass.key + (pair ? 8u : 0u));
          mean(square(own_(contiguous(x.slice(0, part.begin, part.begin + part.rows))))).backward();
        }
    if (stepped) own_optimizer_->step();
  }
  void check_own() {
    const auto& side = net_->module().side;
    const auto& own = own_.module().side;
    check<Error>(distance(side.weight.value().to_vector(), own.weight.value().to_vector()) < rounding &&
                     distance(side.bias.value().to_vector(), own.bias.value().to_vector()) < rounding,
                 "rank ", rank_, ": not what this rank alone makes of its own layer");
  }
  void note() {
    const auto all = shared_values(net_->module(), program_, *scaler_);
    notes_ += cat(std::hash<std::string_view>{}({reinterpret_cast<const char*>(all.data()), all.size() * 8}), " ");
  }

  const Program& program_;
  std::size_t rank_;
  comm::AnyCommunicator communicator_;
  std::optional<Net> net_;
  std::optional<optim::GradScaler<Cpu>> scaler_;
  Stepper optimizer_;
  SingleDevice<Own> own_;
  std::unique_ptr<optim::Optimizer<Cpu>> own_optimizer_;
  Draw skew_;
  std::string notes_;
};

}  // namespace test::random
