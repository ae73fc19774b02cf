#pragma once
/// Runs drawn programs, under DataParallel and on one device.

#include <chorus/io/checkpoint.hpp>
#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <functional>
#include <memory>
#include <numeric>

#include "random_shares.hpp"

namespace test::random::dp {

/// Runs a program and records all numbers.
template <class Net>
class Runner {
 public:
  static constexpr bool parallel = std::is_same_v<Net, DataParallel<Model>>;

  Runner(const Program& program, std::string file) : program_(program), file_(std::move(file)) {
    make_net(program.ids);
  }
  Net& net() { return *net_; }

  std::vector<double> run() {
    for (std::size_t s = 0; s < program_.steps.size(); ++s) {
      if (parallel && !file_.empty() && static_cast<int>(s) == program_.saved_before) save_and_load(program_.steps[s]);
      take(program_.steps[s]);
    }
    note(test::values(net_->module()));
    for (const auto& named : nn::named_buffers<Cpu>(net_->module()))
      if (named.buffer->dtype() == DType::f64)
        for (Index i = 0; i < named.buffer->count(); ++i)
          notes_.push_back(static_cast<const double*>(named.buffer->data())[i]);
    return notes_;
  }

 private:
  void make_net(const std::vector<int>& ids) {
    optimizer_.reset(), net_.reset();
    if constexpr (parallel)
      net_ = std::make_unique<Net>(
          program_.model(),
          DataParallelOptions{
              .device_ids = ids, .output_device = program_.output, .dim = program_.dim, .timeout = program_.timeout},
          3);
    else if constexpr (std::is_same_v<Net, ByShares>)
      net_ = std::make_unique<Net>(program_);
    else
      net_ = std::make_unique<Net>(program_.model(), 3);
    const auto parameters = net_->parameters();
    scaler_.emplace(parameters, scaling);
    switch (program_.rule) {
      case Rule::sgd:
        optimizer_ = std::make_unique<optim::Sgd<Cpu>>(parameters, sgd);
        break;
      case Rule::adam:
        optimizer_ = std::make_unique<optim::Adam<Cpu>>(parameters, adam);
        break;
      case Rule::rmsprop:
        optimizer_ = std::make_unique<optim::RmsProp<Cpu>>(
            parameters, optim::RmsPropOptions{.lr = 0.05, .eps = 0.1, .momentum = 0.5});
        break;
      case Rule::adagrad:
        optimizer_ = std::make_unique<optim::Adagrad<Cpu>>(parameters, optim::AdagradOptions{.lr = 0.05, .eps = 0.1});
    }
    auto& model = net_->module().core;
    if (program_.hooked) model.in.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
    if (!program_.counted) return;
    const auto count = [this](const auto& parameter) { parameter.register_hook([this] { ++fired_; }); };
    count(model.in.weight), count(model.out.bias);
    for (const auto& block : model.blocks) count(block.weight);
  }

  void take(const Step& step) {
    freeze(net_->module(), step.frozen);
    if (step.harm != Harm::none) suffer(step);
    if (!step.keeps) optimizer_->zero_grad();
    std::function<void()> waiting;
    for (const Pass& pass : step.passes) {
      overflows_ = step.overflows && &pass == &step.passes.back();
      auto backward = forward(pass);
      if (pass.then == Then::after_the_next && !waiting) {
        waiting = backward;
        continue;
      }
      backward();
      if (waiting) std::exchange(waiting, nullptr)();
    }
    if (waiting) waiting();
    for (const auto& named : net_->parameters()) notes_.push_back(named.parameter->grad_arrived());
    if (program_.scaled && !scaler_->unscale()) {
      notes_.push_back(scaler_->step(*optimizer_));
      return;
    }
    if (program_.clip > 0) notes_.push_back(optim::clip_grad_norm(net_->parameters(), program_.clip));
    if (program_.scaled)
      notes_.push_back(scaler_->step(*optimizer_) ? scaler_->loss_scale() / 8 : -1);
    else
      optimizer_->step();
  }

  Call& call_of(const Pass& pass) {
    Call& call = calls_.emplace_back();
    call.uses = pass.uses, call.columns = program_.dim == 1, call.recomputed = pass.recomputed;
    return call;
  }
  Tensor<double, 2> batch(const Pass& pass, std::uint32_t other = 0) const {
    const auto x = numbers(pass.rows, 16, pass.key + 1000 * other);
    return program_.dim == 1 ? contiguous(transpose(x, 0, 1)) : x;
  }
  /// On the device of the outputs.
  auto near(const auto& x) const {
    if constexpr (parallel) return to_device(x, Cpu{net_->options().output_device});
    return x;
  }
  template <class V>
  Letter<V> letter(const Pass& pass) const {
    Letter<V> out{.x = V(near(batch(pass)), true), .masks = {}, .scale = {}, .more = {}};
    if (pass.key % 2) out.masks.emplace("mask", near(batch(pass, 1)));
    if (pass.key % 3) out.scale.emplace(near(Tensor<double, 0>::full({}, 0.7)), true);
    for (std::uint32_t i = 0; i < pass.key % 3; ++i) out.more.emplace_back(V(near(batch(pass, 2 + i)), i == 0), 2);
    return out;
  }
  /// A function that takes the gradients of one forward pass.
  std::function<void()> forward(const Pass& pass) {
    const Call& call = call_of(pass);
    const auto host = labels(pass.rows, 3, pass.key);
    const auto loss_of = [&](const auto& y) { return Model::loss_of(y, to_device(host, y.device()), call); };
    const auto joined = [&](const auto& output) {
      const auto& [scores, sides, whole, devices] = output;
      note(whole->to_vector());
      return concat(program_.dim == 1 ? 0 : 1, scores.at(0), sides.at("side"));
    };
    const auto noting = [this](const auto& gradient) {
      notes_.push_back(gradient.defined());
      if (gradient.defined()) note(gradient.to_vector());
    };
    switch (pass.form) {
      case Form::tensor: {
        const auto y = (*net_)(batch(pass), call);
        if (pass.output_hook) y.register_hook([](const auto& gradient) { return gradient * 2.0; });
        return then(pass, loss_of(y), net_->module().core.side.weight, [] {});
      }
      case Form::variable: {
        const Variable<double, 2> x(batch(pass), true);
        const auto y = (*net_)(x * 1.5, call);
        if (pass.output_hook) y.register_hook([](const auto& gradient) { return gradient * 2.0; });
        return then(pass, loss_of(y), x, [=] { noting(x.grad()); });
      }
      case Form::graph: {
        const GraphVariable x(near(batch(pass)), true);
        return penalize(pass, loss_of((*net_)(x, call)), x, [=] { noting(x.grad()); });
      }
      default:
        break;
    }
    if constexpr (!std::is_same_v<Net, ByShares>) {
      const auto note_letter = [noting](const auto& in) {
        noting(in.x.grad());
        if (in.scale) noting(in.scale->grad());
        for (const auto& [x, factor] : in.more) noting(x.grad());
      };
      if (pass.form == Form::letter) {
        const auto in = letter<Variable<double, 2>>(pass);
        return then(pass, loss_of(joined((*net_)(in, call))), in.x, [=] { note_letter(in); });
      }
      if (pass.form == Form::graph_letter) {
        const auto in = letter<GraphVariable<double, 2>>(pass);
        return penalize(pass, loss_of(joined((*net_)(in, call))), in.x, [=] { note_letter(in); });
      }
      const Variable<double, 2> x(batch(pass), true);
      const auto shape = program_.dim == 1 ? Shape<2>{1, pass.rows} : Shape<2>{pass.rows, 1};
      return then(pass, net_->mean_loss((*net_)(x, reshape(host, shape), call)), x, [=] { noting(x.grad()); });
    }
    return {};
  }
  /// With a penalty on the slope by the input.
  std::function<void()> penalize(const Pass& pass, const auto& loss, const auto& x, const auto& note_inputs) {
    return then(pass, loss + sum(square(grad(loss, x, {.create_graph = true}))) * 0.1, x, note_inputs);
  }
  std::function<void()> then(const Pass& pass, const auto& loss, const auto& wanted, const auto& note_inputs) {
    notes_.push_back(loss.item());
    if (pass.peek) peek(pass);
    return [this, &pass, loss = scaled(loss), wanted, note_inputs, finite = !overflows_] {
      if (pass.then == Then::grad_first && finite) {
        const auto gradients = grad(loss, std::tie(wanted, net_->module().core.out.weight), {.retain_graph = true});
        note(value_of(std::get<0>(gradients)).to_vector()), note(value_of(std::get<1>(gradients)).to_vector());
      }
      if (pass.then == Then::twice) loss.backward(true);
      loss.backward();
      notes_.push_back(fired_);
      const auto gradients = test::gradients(net_->module());
      if (!finite || !std::isfinite(std::accumulate(gradients.begin(), gradients.end(), 0.0))) return;
      note(gradients);
      note_inputs();
    };
  }

  auto scaled(const auto& loss) {
    if (!program_.scaled) return loss * 1.0;
    return scaler_->scale(loss * (overflows_ ? INFINITY : 1.0));
  }

  void peek(const Pass& pass) {
    const NoGrad scope;
    Pass other;
    other.key = pass.key + 9, other.rows = program_.own_norm ? 11 : 7, other.uses = pass.uses;
    if (pass.evaluated_peek) net_->eval();
    note((*net_)(batch(other), call_of(other)).value().to_vector());
    net_->train();
  }

  /// A pass in which one copy errs; it must have no effect.
  void suffer(const Step& step) {
    Pass pass = step.passes[0];
    pass.rows = 12, pass.key += 11;
    const bool forward = step.harm == Harm::throws || step.harm == Harm::comes_late;
    const bool late = step.harm >= Harm::comes_late;
    const int fired = fired_;
    Call& call = call_of(pass);
    call.harm = step.harm, call.where = step.where, call.let = !late;
    const auto message = [&](const auto& part) -> std::string {
      try {
        part();
      } catch (const TimeoutError& error) {
        return cat("late: ", error.what());
      } catch (const ShapeError& error) {
        return error.what();
      }
      return "nothing";
    };
    const auto all = [&] { sum((*net_)(batch(pass), call)).backward(); };
    if constexpr (parallel) {
      const auto text = message(all);
      call.let = true;
      const auto& ids = net_->options().device_ids;
      const auto number = std::find(ids.begin(), ids.end(), step.where) - ids.begin();
      const auto name = cat("DataParallel: replica ", number, " on device cpu:", step.where);
      const auto expected = late ? cat("late: ", name, " did not return within") : name + ": the program's own error";
      if (text.find(expected) != 0) fail<Error>("expected '", expected, "', got '", text, "'");
    } else if (!forward) {
      call.harm = Harm::none;
      (*net_)(batch(pass), call);
    }
    fired_ = fired;
  }

  void save_and_load(const Step& other) {
    io::save_checkpoint(*net_, *optimizer_, {}, file_, *scaler_);
    const auto notes = notes_;
    const int fired = fired_;
    take(other);
    if (!program_.resumed_ids.empty()) make_net(program_.resumed_ids);
    io::load_checkpoint(*net_, *optimizer_, file_, *scaler_);
    notes_ = notes, fired_ = fired;
  }
  void note(const std::vector<double>& numbers) { notes_.insert(notes_.end(), numbers.begin(), numbers.end()); }

  const Program& program_;
  std::string file_;
  std::unique_ptr<Net> net_;
  std::unique_ptr<optim::Optimizer<Cpu>> optimizer_;
  std::optional<optim::GradScaler<Cpu>> scaler_;
  bool overflows_ = false;
  std::list<Call> calls_;
  std::vector<double> notes_;
  int fired_ = 0;
};

}  // namespace test::random::dp
