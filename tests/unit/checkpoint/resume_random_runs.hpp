#pragma once
/// Runs random programs: whole, up to a checkpoint, and resumed from there.

#include <chorus/data/loader.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/data/transforms.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/hooks/sparse_rows.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <type_traits>

#include <unit/parallel/ranks.hpp>
#include "resume_random_optimizers.hpp"

namespace test::random::resume {

/// A part of a program's run: from the checkpoint `from`, if named, to the end, where it writes `to`; after the
/// program's `saved_after` it writes `middle`, if named.
struct Job {
  std::string from, middle, to;
};

template <class Net, class Optimizer>
class Training {
  static constexpr bool sharded = requires(Optimizer & optimizer) { optimizer.make_largest(nullptr); };
  static constexpr bool fused = !sharded && !std::is_base_of_v<optim::Optimizer<Cpu>, Optimizer>;

 public:
  Training(Net& net, Optimizer& optimizer, const Program& p, const World& world)
      : net_(net),
        optimizer_(optimizer),
        p_(p),
        rank_(static_cast<std::size_t>(world.rank)),
        rates_(rates(p, optimizer)),
        scaler_(make_scaler(net, p)),
        average_(net.parameters(), p.average < 0 ? optim::equal_weights() : optim::exponential(p.average)),
        plateau_(optimizer, {.factor = 0.5, .patience = 1, .threshold = 0.01}) {}

  /// Returns each step's loss and this rank's final state, as text.
  std::string run(const Job& job) {
    const data::SyntheticImages images{p_.samples, 1, data::Split::train, {1, 8, 8}};
    data::LoaderOptions loading{.batch = p_.batch, .workers = p_.workers, .drop_last = p_.drop_last};
    if (p_.augments) loading.transforms = {data::RandomCrop{1}, data::RandomHorizontalFlip{}};
    data::DataLoader loader{images, net_.sampler(images, {.shuffle = p_.shuffle, .padding = p_.padding}), loading};
    if (!job.from.empty()) {
      if (p_.frozen_before) freeze(net_.module(), step().frozen);
      at_ = io::load_checkpoint(net_, optimizer_, job.from, scaler_, average_, plateau_);
    } else if (!job.middle.empty() && p_.saved_after == 0) {
      save(job.middle);
    }
    while (at_.step < count()) {
      loader.set_epoch(at_.epoch);
      loader.skip(at_.batch);
      int micro = 0;
      for (const auto& batch : loader) {
        ++at_.batch;
        if (!take(batch, micro++)) continue;
        micro = 0;
        ++at_.step;
        if (p_.epoch_ends_saved) end_epoch(loader.size());
        if (!job.middle.empty() && at_.step == p_.saved_after) save(job.middle);
        if (at_.step == count() || at_.batch == 0) break;
      }
      end_epoch(loader.size());
    }
    save(job.to);
    return losses_ + "|" + io::parameters_sha256(net_.module());
  }

 private:
  // A NonFinite policy and a scaler can't be combined.
  static optim::GradScaler<Cpu> make_scaler(Net& net, const Program& p) {
    const optim::GradScalerOptions options{.init_scale = p.loss_scale, .backoff_factor = 1e-3, .growth_interval = 2};
    if (p.options.non_finite == NonFinite::propagate) return optim::GradScaler(net, options);
    return optim::GradScaler(net.parameters(), options);
  }
  std::int64_t count() const { return static_cast<std::int64_t>(p_.steps.size()); }
  const Step& step() const { return p_.steps[static_cast<std::size_t>(at_.step)]; }
  void end_epoch(Index batches) {
    if (at_.batch >= batches) at_ = {.epoch = at_.epoch + 1, .batch = 0, .step = at_.step};
  }

  /// Trains on micro-batch `micro` of this step; returns true if it was the last one and the optimizer stepped.
  bool take(const data::Batch& batch, int micro) {
    const Step& step = this->step();
    if (micro == 0) {
      optimizer_.zero_grad();
      freeze(net_.module(), step.frozen);
      rates_(static_cast<int>(at_.step));
    }
    const bool last = micro + 1 == step.micro_batches;
    const double loss = backward(batch, step, last);
    if (!last) return false;
    if constexpr (!fused) {
      if (p_.scales) unscale();
      if (p_.clip > 0) clip();
      p_.scales ? void(scaler_.step(optimizer_)) : optimizer_.step();
    } else {
      optimizer_.step();
    }
    if (p_.averages) average_.update();
    if (p_.rate == Rate::plateau) plateau_.step(loss);
    losses_ += cat(loss, " ");
    if (step.evaluates) evaluate(batch, step);
    return true;
  }
  /// The mean loss over all ranks.
  double backward(const data::Batch& batch, const Step& step, bool last) {
    if constexpr (requires { net_.no_sync(); }) {
      if (last) return backward(batch, step);
      const auto quiet = net_.no_sync();
      return backward(batch, step);
    }
    return backward(batch, step);
  }
  double backward(const data::Batch& batch, const Step& step) {
    auto loss = cross_entropy(net_(batch.images, step.uses[rank_]), batch.labels);
    if (step.poisoned == static_cast<int>(rank_)) loss = loss * std::nanf("");
    const double value = net_.mean(loss.item(), batch.labels.numel());
    if (p_.scales)
      scaler_.scale(loss).backward();
    else
      loss.backward();
    return value;
  }
  void unscale() {
    if constexpr (sharded)
      scaler_.unscale(optimizer_);
    else
      scaler_.unscale();
  }
  void clip() {
    if constexpr (sharded)
      optimizer_.clip_grad_norm(p_.clip);
    else
      optim::clip_grad_norm(net_.parameters(), p_.clip);
  }
  void evaluate(const data::Batch& batch, const Step& step) {
    const NoGrad scope;
    net_.eval();
    const auto scores = net_(batch.images, step.uses[rank_]);
    losses_ += cat("(", net_.mean(scores.value().numel() == 0 ? 0 : mean(scores).item(), batch.labels.numel()), ") ");
    net_.train();
  }
  void save(const std::string& path) {
    io::save_checkpoint(net_, optimizer_, at_, path, scaler_, average_, plateau_);
  }

  Net& net_;
  Optimizer& optimizer_;
  const Program& p_;
  std::size_t rank_;
  std::function<void(int)> rates_;
  optim::GradScaler<Cpu> scaler_;
  optim::ParameterAverage<Cpu> average_;
  optim::ReduceOnPlateau plateau_;
  io::TrainingPosition at_;
  std::string losses_;
};

/// Whether nets also have fused and sharded optimizers.
template <class Net>
constexpr bool has_forms = false;
template <class Hook>
requires(std::is_same_v<Hook, AllReduce> || std::is_same_v<Hook, ReduceScatter> ||
         std::is_same_v<Hook, Bf16Compress>) constexpr bool has_forms<DistributedDataParallel<Trained<Cpu>, Hook>> =
    true;

template <class Net>
std::string train(Net& net, const Program& p, const World& world, const Job& job) {
  const auto with = [&](auto& optimizer) { return Training(net, optimizer, p, world).run(job); };
  if constexpr (has_forms<Net>)
    if (p.form == Form::sharded) {
      ShardedOptimizer<optim::Adam<Cpu>> optimizer{net, adam};
      return with(optimizer);
    }
  if constexpr (!requires { requires detail::AccessTo<Net>::averages_in_parts; }) {
    if constexpr (has_forms<Net>)
      if (p.form == Form::fused) {
        FusedOptimizer<optim::Sgd<Cpu>> optimizer{net, sgd};
        return with(optimizer);
      }
    const auto optimizer = plain_optimizer(p.rule, net.parameters());
    if (p.groups) optimizer->no_decay_on_biases_and_norms();
    return with(*optimizer);
  }
  return "no such program";
}

/// Trains under the program's policy.
template <class Model>
std::string train_model(Model model, const Program& p, const World& world, const Job& job) {
  constexpr std::uint64_t seed = 3;
  const auto connected = [&]<class Net>(std::type_identity<Net>, const auto&... options) {
    auto communicator = comm::connect(world);
    Net net{std::move(model), communicator, options...};
    return train(net, p, world, job);
  };
  const auto under = [&]<class Hook>(const Hook& hook) {
    return connected(std::type_identity<DistributedDataParallel<Model, Hook>>{}, p.options, seed, hook);
  };
  if (p.kind == Kind::local)
    return connected(std::type_identity<LocalSgd<Model>>{}, LocalSgdOptions{.period = p.period}, seed);
  if (p.kind == Kind::served) return connected(std::type_identity<ParameterServer<Model>>{}, seed);
  if (p.kind == Kind::single) {
    SingleDevice<Model> net{std::move(model), seed};
    return train(net, p, world, job);
  }
  if (p.kind == Kind::data_parallel) {
    std::vector<int> ids;
    for (int i = 0; i < p.devices; ++i) ids.push_back(i);
    DataParallel<Model> net{std::move(model), {.device_ids = ids}, seed};
    return train(net, p, world, job);
  }
  if (p.hook == Hook::all_reduce) return under(AllReduce{});
  if constexpr (std::is_same_v<Model, Trained<Cpu>>) {
    if (p.hook == Hook::bf16) return under(Bf16Compress{.error_feedback = p.error_feedback});
    if (p.hook == Hook::reduce_scatter) return under(ReduceScatter{});
    if (p.hook == Hook::fp16) return under(Fp16Compress{.error_feedback = p.error_feedback});
    if (p.hook == Hook::quantize) return under(Quantize8Bit{});
    if (p.hook == Hook::power_sgd)
      return under(PowerSgd{.matrix_approximation_rank = p.powersgd_rank, .start_powersgd_iter = p.warmup});
    if (p.hook == Hook::post_local_sgd)
      return under(PostLocalSgd{.start_local_sgd_iter = p.warmup, .period = p.period});
    if (p.hook == Hook::sparse_rows) return under(SparseRows{});
  }
  return "no such program";
}

/// One rank's part of a job.
inline std::string run(const Program& p, const World& world, const Job& job) {
  // A new run begins with everything different from the old one.
  auto model = p.model(job.from.empty() ? 1 : 2 + static_cast<std::uint32_t>(world.rank));
  if (p.narrowing == Narrowing::bf16)
    return train_model(nn::MixedPrecision<Trained<Cpu>, bf16>{std::move(model)}, p, world, job);
  if (p.narrowing == Narrowing::half)
    return train_model(nn::MixedPrecision<Trained<Cpu>, half>{std::move(model)}, p, world, job);
  return train_model(std::move(model), p, world, job);
}

}  // namespace test::random::resume
