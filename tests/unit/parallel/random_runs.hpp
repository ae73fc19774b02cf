#pragma once
/// Runs drawn programs on one device, and the parts that ranks have in common with it.

#include "random_programs.hpp"

namespace test::random {

/// The rows of rank `rank`, or of all ranks together.
struct Part {
  Index begin = 0, rows = 0;
  unsigned uses;
  double side = 1;  // the weight of the second head's loss; if infinite, only its gradients overflow
};
inline Part part_of(const Pass& pass, std::size_t rank) {
  Part part{.uses = pass.uses[rank]};
  for (std::size_t r = 0; r < rank; ++r) part.begin += pass.rows[r];
  part.rows = pass.rows[rank];
  return part;
}

template <class Net>
auto loss_of(Net& net, std::uint32_t key, const Part& part) {
  const auto x = contiguous(numbers(part.begin + part.rows, 16, key).slice(0, part.begin, part.begin + part.rows));
  const auto y = contiguous(labels(part.begin + part.rows, 3, key).slice(0, part.begin, part.begin + part.rows));
  const auto [scores, side] = net(x, part.uses);
  return cross_entropy(scores, y) + mean(square(side)) * part.side;
}
/// The loss of both forward passes if there are two.
template <class Net>
auto loss_of(Net& net, const Pass& pass, const Part& part) {
  const auto loss = loss_of(net, pass.key, part);
  return pass.pair ? loss + loss_of(net, pass.key + 8, part) : loss;
}
template <class Net>
void peek(Net& net, const Pass& pass) {
  const NoGrad scope;
  loss_of(net, pass.key + 9, {.begin = 0, .rows = 3, .uses = all_blocks});
}

/// All parameters and buffers that the ranks have in common.
inline std::vector<double> shared_values(Drawn<Cpu>& model, const Program& program) {
  std::vector<double> out;
  const auto add = [&](const auto& name, const auto& data, Index count) {
    if (program.ignores() && name.starts_with("side.")) return;
    out.insert(out.end(), static_cast<const double*>(data), static_cast<const double*>(data) + count);
  };
  for (const auto& named : nn::named_parameters<Cpu>(model))
    add(named.name, named.parameter->value_data(), named.parameter->count());
  for (const auto& named : nn::named_buffers<Cpu>(model))
    if (named.buffer->dtype() == DType::f64) add(named.name, named.buffer->data(), named.buffer->count());
  return out;
}
/// The same, and a scaler's state.
inline std::vector<double> shared_values(Drawn<Cpu>& model, const Program& program,
                                         const optim::GradScaler<Cpu>& scaler) {
  auto out = shared_values(model, program);
  for (const double number : scaler.kept()) out.push_back(std::log2(1 + number) / 8);
  return out;
}

inline void backward_alone(SingleDevice<Drawn<Cpu>>& net, const Program& program, const Pass& pass,
                           const std::vector<bool>& here, double scale, double side) {
  Index all = 0;
  for (std::size_t r = 0; r < here.size(); ++r) all += here[r] ? pass.rows[r] : 0;
  const auto run = [&](const Part& part, double weight) {
    const auto loss = loss_of(net, pass, part) * weight * scale;
    if (pass.peeks != 0 && program.dropped > 0) peek(net, pass);
    if (pass.again) loss.backward(true);
    loss.backward();
  };
  if (program.uniform && all > 0) return run({.begin = 0, .rows = all, .uses = pass.uses[0], .side = side}, 1);
  for (std::size_t r = 0; r < pass.rows.size(); ++r) {
    if (!here[r] && !program.options.static_graph) continue;
    auto part = part_of(pass, r);
    const double weight = all == 0 || !here[r] ? 0 : static_cast<double>(part.rows) / static_cast<double>(all);
    if (weight == 0) part.rows = 1;  // for gradients that are 0 but present
    part.side = weight == 0 ? 1 : side;
    run(part, weight);
    if (program.uniform) break;
  }
}

/// The final numbers of a training run; `way`: see `nudge`.
template <class Opt>
std::vector<double> alone(const Program& program, const typename Opt::options_type& options, int way) {
  SingleDevice<Drawn<Cpu>> net{program.model(), 3};
  nudge(net, way);
  Opt optimizer{net.parameters(), options};
  optim::GradScaler scaler{net.parameters(), scaling};
  const auto take = [&](const Step& step, const std::vector<bool>& here) {
    freeze(net.module(), step.frozen);
    if (!step.keeps) optimizer.zero_grad();
    const bool poisoned = step.poisoned >= 0 && here[static_cast<std::size_t>(step.poisoned)];
    const double scale = program.scaled ? scaler.loss_scale() : 1;
    for (const Pass& pass : step.passes)
      backward_alone(net, program, pass, here, scale, poisoned && &pass == &step.passes.back() ? INFINITY : 1);
    if (program.scaled) {
      const bool finite = scaler.unscale();
      if (finite && program.clip > 0) optim::clip_grad_norm(net.parameters(), program.clip);
      scaler.step(optimizer);
      return;
    }
    if (poisoned) optimizer.zero_grad();
    if (program.clip > 0) optim::clip_grad_norm(net.parameters(), program.clip);
    optimizer.step();
  };
  std::vector<bool> here(static_cast<std::size_t>(program.ranks), true);
  if (program.epochs.empty())
    for (const Step& step : program.steps) take(step, here);
  std::size_t next = 0;
  for (const auto& epoch : program.epochs)
    for (int s = 0; s < *std::max_element(epoch.begin(), epoch.end()); ++s) {
      for (std::size_t r = 0; r < here.size(); ++r) here[r] = s < epoch[r];
      take(program.steps[next++], here);
    }
  return shared_values(net.module(), program, scaler);
}

}  // namespace test::random
