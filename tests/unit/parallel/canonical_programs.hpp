#pragma once
/// Training programs under canonical shares, in float, where rounding shows: the programs, their setups, and their
/// results. Even a single rank runs in its own process, since it starts threads.

#include <unistd.h>

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/attention.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <chorus/same_bits.hpp>
#include <cstdio>
#include <memory>
#include <optional>

#include "ranks.hpp"

namespace test::canonical {

using namespace test::names;
using namespace chorus::same_bits;

/// Calls `body` with SameBits of that many shares, or with the model itself if `shares` is 0.
template <class M, class Body>
auto in_shares(M model, int shares, const Body& body) {
  return shares == 0 ? body(std::move(model)) : body(SameBits{std::move(model), shares});
}

/// Layers that depend on the batch, on random numbers and on tokens; `side` is used by some shares only.
template <class D>
struct Parts : nn::Module {
  nn::Conv2d<D> conv{1, 4, {.kernel = 3}};
  std::optional<nn::BatchNorm2d<D>> norm;
  std::optional<nn::SyncBatchNorm<D>> synced;
  nn::Dropout drop;
  nn::Linear<D> image;
  std::optional<nn::Linear<D>> side;
  std::optional<nn::Embedding<D>> embedding;
  std::optional<nn::MultiheadAttention<D>> attention;
  std::optional<nn::LayerNorm<D>> layer_norm;
  nn::Linear<D> rows, head;
  bool recomputes = false;
  CHORUS_MODULE(Parts, conv, norm, synced, drop, image, side, embedding, attention, layer_norm, rows, head)

  explicit Parts(Index width) : image{64, width}, rows{width, 5}, head{width, 3} {}
  /// images: [batch, 1, 6, 6], tokens: [batch, 4] -> scores: [batch, 3], and [batch * 4, 5] or [batch, 5]
  auto forward(const auto& images, const auto& tokens) const {
    const auto seen = [this](const auto& from) {
      auto h = conv(from);
      if (norm) h = (*norm)(h);
      if (synced) h = (*synced)(h);
      return drop(image(flatten(relu(h))));
    };
    auto x = recomputes ? checkpoint(seen, images) : seen(images);
    const auto& pixels = value_of(images);
    if (side && pixels.size(0) > 0 && pixels.data()[0] > 0) x = x + (*side)(tanh(x));
    if (!attention) {
      x = tanh(x);
      return std::tuple(head(x), rows(x));
    }
    const auto e = (*embedding)(tokens);
    const auto t = (*layer_norm)((*attention)(e, e, e) + e);
    return std::tuple(head(tanh(x + mean(t, 1))), reshape(rows(t), Shape<2>{-1, 5}));
  }
};
using Model = Parts<Cpu>;

/// One forward pass and its backward pass.
struct Pass {
  std::uint32_t key = 0;
  Index size = 1;
  bool quiet = false;  // under no_sync
  bool pair = false;   // of two forward passes, on batches of one size
  bool again = false;  // backward goes through the graph twice
};
struct Step {
  std::vector<Pass> passes;
  bool keeps = false;        // accumulates on the gradients of the previous step
  bool poisoned = false;     // a pixel is not finite: a scaler skips the step
  bool evaluates = false;    // evaluates the net after the step
  std::uint32_t frozen = 0;  // layers, by their bits
};
enum class Loss { cross_entropy, smoothed, mse, mean_of_samples, over_given };
enum class Stepping { sgd, adam, muon };

struct Program {
  int shares = 4;
  Index width = 8;
  bool norm = false, synced = false, attends = false, has_side = false;
  double dropped = 0;
  Loss loss = Loss::cross_entropy;
  bool rows_loss = false;  // a second one, with ignored tokens and class weights
  bool penalty = false;    // on weights
  Stepping stepping = Stepping::sgd;
  double clip = 0;
  bool scaled = false;
  bool recomputes = false;  // a part of the model, in backward
  bool hooked = false;      // a hook changes the whole batch's gradient by a non-linear function
  std::uint32_t frozen_first = 0;
  std::vector<Step> steps;

  std::string text() const {
    std::string out = cat("shares ", shares, ", width ", width, norm ? ", norm" : "", synced ? ", synced norm" : "",
                          attends ? ", attends" : "", has_side ? ", side" : "", ", dropped ", dropped, ", loss ",
                          static_cast<int>(loss), rows_loss ? ", loss of rows" : "", penalty ? ", penalty" : "",
                          stepping == Stepping::adam ? ", adam" : ", sgd", ", clip ", clip, scaled ? ", scaled" : "",
                          recomputes ? ", recomputes" : "", hooked ? ", hooked" : "", ", frozen ", frozen_first);
    for (const auto& step : steps) {
      out += cat("\n  step", step.keeps ? ", keeps" : "", step.poisoned ? ", poisoned" : "",
                 step.evaluates ? ", evaluates" : "", ", frozen ", step.frozen, ":");
      for (const auto& pass : step.passes)
        out +=
            cat(" ", pass.size, pass.quiet ? " quiet" : "", pass.pair ? " pair" : "", pass.again ? " again" : "", ";");
    }
    return out;
  }
};

enum class Who { single, dp, ddp, server };
enum class Steps { whole, fused, sharded };
/// The policy and devices that run a program.
struct Setup {
  Who who = Who::single;
  int devices = 1;
  comm::Backend backend = comm::Backend::automatic;
  int threads = 1;
  std::optional<double> bucket_mb = {};
  bool own_buffers = false;  // not broadcast: each rank has its own
  bool find_unused = false;
  bool plain = false;          // without shares
  Steps steps = Steps::whole;  // each rank steps all parameters; in backward; sharded (ddp)

  std::string text() const {
    const char* const names[] = {"single", "dp", "ddp", "server"};
    return cat(names[static_cast<int>(who)], " of ", devices, ", ", comm::name(backend), ", threads ", threads,
               ", buckets ", bucket_mb.value_or(-1), find_unused ? ", find_unused" : "",
               ", steps ", static_cast<int>(steps), plain ? ", plain" : "", own_buffers ? ", buffers of its own" : "");
  }
};

inline Tensor<float, 4> images(Index size, std::uint32_t key) {
  auto out = Tensor<float, 4>::empty({size, 1, 6, 6});
  const auto from = numbers(size, 36, key);
  std::transform(from.data(), from.data() + from.numel(), out.data(), [](double x) { return static_cast<float>(x); });
  return out;
}
inline Tensor<float, 2> targets(Index size, std::uint32_t key) {
  auto out = Tensor<float, 2>::empty({size, 3});
  const auto from = numbers(size, 3, key + 500);
  std::transform(from.data(), from.data() + from.numel(), out.data(), [](double x) { return static_cast<float>(x); });
  return out;
}

inline Model model_of(const Program& program) {
  Model model(program.width);
  if (program.norm) model.norm.emplace(4);
  if (program.synced) model.synced.emplace(4);
  if (program.attends) {
    model.embedding.emplace(7, program.width);
    model.attention.emplace(program.width, 2);
    model.layer_norm.emplace(program.width);
  }
  model.drop.p = program.dropped;
  model.recomputes = program.recomputes;
  if (program.has_side) model.side.emplace(program.width, program.width);
  if (program.hooked) model.head.weight.register_hook([](const auto& gradient) { return tanh(gradient * 3.0F); });
  std::uint32_t key = 1000;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    const auto values = numbers(1, named.parameter->count(), key++);
    auto* const to = static_cast<float*>(named.parameter->value_data());
    for (Index i = 0; i < values.numel(); ++i) to[i] = static_cast<float>(0.4 * values.data()[i]);
  }
  return model;
}
/// Freezes the layers whose bits are set, except for the head and the layer that no loss uses.
inline void freeze(Model& model, const Program& program, std::uint32_t frozen) {
  std::uint32_t bit = 0;
  std::string layer;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    const auto name = named.name.substr(0, named.name.find('.'));
    if (name != layer) ++bit;
    layer = name;
    named.parameter->set_wants_grad(name == "head" || (name == "rows" ? program.rows_loss : !(frozen >> bit & 1)));
  }
}

inline std::string digits(double number) {
  char text[40];
  std::snprintf(text, sizeof text, "%a ", number);
  return number != number ? "nan " : text;
}
/// All parameters and buffers of a model, with all digits.
inline std::string numbers_of(nn::Module& model) {
  std::string out;
  const auto add = [&](const auto& place, const auto* data) {
    for (Index i = 0; i < place.count(); ++i) out += digits(static_cast<double>(data[i]));
  };
  for (const auto& named : nn::named_parameters<Cpu>(model))
    add(*named.parameter, static_cast<const float*>(named.parameter->value_data()));
  out += "& ";
  for (const auto& named : nn::named_buffers<Cpu>(model)) {
    if (named.buffer->dtype() == DType::f32)
      add(*named.buffer, static_cast<const float*>(named.buffer->data()));
    else
      add(*named.buffer, static_cast<const std::int64_t*>(named.buffer->data()));
  }
  return out;
}

/// A rank's samples of a batch, as from the sampler.
struct Part {
  int shares = 1, devices = 1, rank = 0;

  template <class T, int Rank>
  Tensor<T, Rank> operator()(const Tensor<T, Rank>& batch, Index rows_each = 1) const {
    const Index count = batch.size(0) / rows_each;
    const auto of = static_cast<std::size_t>(shares);
    const auto run = shares_of_device(of, static_cast<std::size_t>(devices), static_cast<std::size_t>(rank));
    return batch.slice(0, rows_each * share_begin(count, of, run.begin), rows_each * share_begin(count, of, run.end));
  }
};

template <class Net>
class Run {
 public:
  Run(const Program& program, const Part& part, Steps steps, Net& net) : program_(program), part_(part), net_(net) {
    if (program.stepping == Stepping::muon)
      step_by<optim::Muon<Cpu>>(steps, {.lr = 0.02});
    else if (program.stepping == Stepping::adam)
      step_by<optim::Adam<Cpu>>(steps, {.lr = 0.02});
    else
      step_by<optim::Sgd<Cpu>>(steps, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
    if (program.scaled) scaler_.emplace(net, optim::GradScalerOptions{.init_scale = 16, .growth_interval = 2});
  }

  std::string operator()() {
    for (const auto& step : program_.steps) take(step);
    net_.eval();  // only then a server's workers have its parameters
    std::string numbers;
    const auto read = [&](auto& model) { numbers = numbers_of(model); };
    if constexpr (std::string_view(Net::name) == "fsdp" || std::string_view(Net::name) == "mesh")
      net_.gathered(read);
    else
      read(net_.module());
    return losses_ + "|" + numbers;
  }

 private:
  template <class Opt>
  void step_by(Steps steps, const typename Opt::options_type& options) {
    if (steps == Steps::fused) return own(std::make_shared<FusedOptimizer<Opt>>(net_, options));
    if constexpr (chorus::detail::DistributedInBuckets<Net>)
      if (steps == Steps::sharded) return own(std::make_shared<ShardedOptimizer<Opt>>(net_, options));
    own(std::make_shared<Opt>(net_.parameters(), options));
  }
  template <class Optimizer>
  void own(const std::shared_ptr<Optimizer>& optimizer) {
    zero_grad_ = [optimizer] { optimizer->zero_grad(); };
    step_ = [&, optimizer] {
      if constexpr (requires { scaler_->step(*optimizer); })
        if (scaler_) {
          scaler_->step(*optimizer);
          return;
        }
      optimizer->step();
    };
    clip_ = [optimizer, this] {
      if constexpr (requires { optimizer->clip_grad_norm(1.0); })
        optimizer->clip_grad_norm(program_.clip);
      else
        optim::clip_grad_norm(net_.parameters(), program_.clip);
    };
  }
  void take(const Step& step) {
    freeze(net_.module(), program_, step.frozen | program_.frozen_first);
    if (!step.keeps) zero_grad_();
    for (const auto& pass : step.passes) {
      if (pass.quiet) {
        const auto scope = net_.no_sync();
        backward(pass, step.poisoned);
      } else {
        backward(pass, step.poisoned);
      }
    }
    if (program_.clip > 0) {
      if (scaler_) scaler_->unscale();
      clip_();
    }
    step_();
    if (step.evaluates) evaluate();
  }
  void backward(const Pass& pass, bool poisoned) {
    auto loss = loss_of(pass.key, pass.size, poisoned);
    if (pass.pair) loss = loss + loss_of(pass.key + 100, pass.size, false);
    losses_ += digits(loss.item());
    if (scaler_) loss = scaler_->scale(loss);
    if (pass.again) loss.backward(true);
    loss.backward();
  }
  auto loss_of(std::uint32_t key, Index size, bool poisoned) {
    auto x = images(size, key);
    if (poisoned && size > 0) x.data()[x.numel() - 1] = std::numeric_limits<float>::infinity();
    const auto [scores, rows] = net_(part_(x), part_(reshape(labels(4 * size, 7, key), Shape<2>{size, 4})));
    auto loss = loss_of_scores(scores, size, key);
    if (program_.rows_loss) {
      const Index each = program_.attends ? 4 : 1;
      const auto weights = Tensor<float, 1>::from({0.5F, 1, 2, 0.25F, 1.5F}, {5});
      loss = loss + cross_entropy(rows, part_(labels(each * size, 5, key + 40), each), weights, {.ignore_index = 2});
    }
    if (program_.penalty) loss = loss + mean(square(net_.module().head.weight)) * 0.1F;
    return loss;
  }
  Variable<float, 0> loss_of_scores(const auto& scores, Index size, std::uint32_t key) {
    const auto classes = part_(labels(size, 3, key + 60));
    switch (program_.loss) {
      case Loss::cross_entropy:
        return cross_entropy(scores, classes);
      case Loss::smoothed:
        return cross_entropy(scores, classes, {.ignore_index = 1, .label_smoothing = 0.1});
      case Loss::mse:
        return mse_loss(scores, part_(targets(size, key)));
      case Loss::mean_of_samples:
        return mean(cross_entropy_per_sample(scores, classes) * 0.7F, 0);
      case Loss::over_given:
        break;
    }
    return cross_entropy(scores, classes, {.mean_over = 11});
  }
  void evaluate() {
    net_.eval();
    {
      const NoGrad no_grad;
      const auto scores = std::get<0>(net_(images(5, 7), reshape(labels(20, 7, 7), Shape<2>{5, 4})));
      check(scores.size(0) == 5, "evaluation: one row for each sample");
    }
    net_.train();
  }

  const Program& program_;
  Part part_;
  Net& net_;
  std::function<void()> zero_grad_, step_, clip_;
  std::optional<optim::GradScaler<Cpu>> scaler_;
  std::string losses_;
};

template <class Net>
std::string run_of(const Program& program, const Setup& setup, int rank, Net& net) {
  const bool ranks = setup.who == Who::ddp || setup.who == Who::server;
  Run<Net> run(program, {program.shares, ranks ? setup.devices : 1, rank}, setup.steps, net);
  return run();
}

/// The losses of all steps, then "|" and the final parameters and buffers, on one rank.
inline std::string result_of_rank(const Program& program, const Setup& setup, const World& world) {
  const int shares = setup.plain ? 0 : program.shares;
  alarm(60);  // kills a rank that hangs
  set_num_threads(setup.threads);
  auto model = model_of(program);
  freeze(model, program, program.frozen_first);
  if (setup.who == Who::single) {
    return in_shares(std::move(model), shares, [&]<class M>(M cut) {
      SingleDevice<M> net(std::move(cut), 3);
      return run_of(program, setup, 0, net);
    });
  }
  if (setup.who == Who::dp) {
    std::vector<int> ids;
    for (int i = 0; i < setup.devices; ++i) ids.push_back(i);
    return in_shares(std::move(model), shares, [&]<class M>(M cut) {
      DataParallel<M> net(std::move(cut), {.device_ids = ids}, 3);
      return run_of(program, setup, 0, net);
    });
  }
  if (setup.backend == comm::Backend::hierarchical) setenv("CHORUS_HOST_ID", world.rank < 2 ? "a" : "b", 1);
  auto communicator = comm::connect(world, {.backend = setup.backend});
  if (setup.who == Who::server) {
    return in_shares(std::move(model), shares, [&]<class M>(M cut) {
      ParameterServer<M> net(std::move(cut), communicator, {}, 3);
      return run_of(program, setup, world.rank, net);
    });
  }
  DistributedDataParallelOptions options{.find_unused_parameters = setup.find_unused};
  options.broadcast_buffers = !setup.own_buffers;
  if (setup.bucket_mb) options.first_bucket_cap_mb = options.bucket_cap_mb = *setup.bucket_mb;
  return in_shares(std::move(model), shares, [&]<class M>(M cut) {
    DistributedDataParallel<M> net(std::move(cut), communicator, options, 3);
    return run_of(program, setup, world.rank, net);
  });
}

/// The common result of all ranks, or how they differ. Takes rank 0's buffers if ranks have their own.
inline std::string result(const Program& program, const Setup& setup) {
  const bool ranks = setup.who == Who::ddp || setup.who == Who::server;
  const auto texts = Ranks(ranks ? setup.devices : 1, [&](const World& world) {
                       return result_of_rank(program, setup, world);
                     }).texts();
  const auto compared = [&](const std::string& text) {
    return setup.own_buffers ? text.substr(0, text.find('&')) : text;
  };
  std::string lines;
  for (const auto& text : texts) lines += "\n  " + text.substr(0, 600);
  for (const auto& text : texts)
    if (compared(text) != compared(texts[0]) || text.find('|') == text.npos) return "ranks end differently:" + lines;
  return texts[0];
}

/// For foreign backends: layers that communicate, and ranks that own several sums.
inline Program program_for_engines() {
  Program program{.shares = 7, .synced = true, .attends = true, .dropped = 0.3, .stepping = Stepping::adam, .steps = {}};
  for (const Index size : {8, 7, 5})
    program.steps.push_back({.passes = {{.key = static_cast<std::uint32_t>(size), .size = size}}});
  return program;
}

/// The difference from `expected`, or "".
inline std::string difference(const std::string& got, const std::string& expected) {
  if (got == expected) return "";
  if (got.find('|') == got.npos || expected.find('|') == expected.npos)
    return cat(got.substr(0, 600), "\nexpected ", expected.substr(0, 100));
  const auto at = static_cast<std::size_t>(
      std::mismatch(got.begin(), got.end(), expected.begin(), expected.end()).first - got.begin());
  const auto number = std::count(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(at), ' ');
  const auto begin = got.rfind(' ', at) == got.npos ? 0 : got.rfind(' ', at);
  const bool in_losses = at <= got.find('|');
  return cat(in_losses ? "losses" : "the model", " from number ", number, ": ", got.substr(begin, 60), ", expected ",
             expected.substr(begin, 60));
}

}  // namespace test::canonical
