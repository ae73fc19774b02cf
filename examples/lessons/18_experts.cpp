/// Lesson 18: experts on several ranks. A router sends each token to one of six small networks (Switch Transformer,
/// Fedus et al. 2022): six times the parameters, the arithmetic of one. Each of N ranks has 6/N experts and a share of
/// the batch. Tokens travel to the ranks of their experts, and what these make of them travels home: two all-to-alls,
/// and two more for gradients. With T tokens on each rank, D features and an even router, each moves (N-1)/N T D
/// numbers. The router decides anew in each step, so a small all-to-all tells first how many tokens come.
///
/// An expert's gradient has all ranks' contributions already, since their tokens came to it. So it isn't averaged; that
/// of the router and of the other layers is. Each loss has its weight in the batch from the start.
#include <chorus/parallel/expert.hpp>
#include "toy.hpp"

constexpr std::size_t n_experts = 6, n_features = 32;
struct Sparse : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1{49, n_features}, fc2{n_features, 10};
  ch::nn::MixtureOfExperts<ch::Cpu> mixture{n_features, {.experts = n_experts, .top_k = 1, .renormalize = false}};
  CHORUS_MODULE(Sparse, fc1, mixture, fc2)
  auto forward(const auto& images) const { return mixed(ch::relu(fc1(Deep::small(images)))); }
  auto mixed(const auto& tokens) const { return fc2(tokens + mixture(tokens).y); }
};
using Policy = ch::ExpertParallel<Sparse>;
using Matrix = ch::Tensor<float, 2>;
using Rows = ch::Tensor<std::int64_t, 1>;
using Leaf = ch::Variable<float, 2>;  // a piece of the computation begins here, and its gradient ends
using Counts = std::vector<std::size_t>;

/// The rows of `x` go to the ranks, one rank's after the other's. Returns those that come. Counts: rows, by rank.
Matrix exchange(ch::Run& run, const Matrix& x, Counts sends, Counts receives) {
  for (auto* counts : {&sends, &receives})
    for (auto& count : *counts) count *= n_features;
  std::vector<float> out(std::accumulate(receives.begin(), receives.end(), std::size_t{0}));
  ch::comm::all_to_all_v(run.communicator(), std::span(x.data(), static_cast<std::size_t>(x.numel())), sends,
                         std::span(out), receives, {.traffic = Traffic::activations});
  return Matrix::from(out, {static_cast<ch::Index>(out.size() / n_features), n_features});
}

/// This rank's loss times `weight`, whose gradients are left.
double forward_and_backward(ch::Run& run, Sparse& model, const auto& images, const auto& labels, float weight) {
  const auto n = static_cast<std::size_t>(run.communicator().size()), here = n_experts / n;
  const auto before = ch::relu(model.fc1(Deep::small(images)));
  const Leaf tokens(ch::value_of(before), true);
  const auto probabilities = ch::softmax(model.mixture.router(tokens), 1);
  const auto chosen = ch::argmax(ch::value_of(probabilities), 1);
  std::vector<std::int64_t> by_expert, arrivals;  // tokens here; arrived ones, which come by (rank, expert)
  Counts leave(n_experts), come(n_experts), sends(n), receives(n), begin(n_experts);
  for (std::size_t e = 0; e < n_experts; ++e)
    for (ch::Index t = 0; t < chosen.numel(); ++t)
      if (chosen(t) == static_cast<std::int64_t>(e)) by_expert.push_back(t), ++leave[e], ++sends[e / here];
  ch::comm::all_to_all(run.communicator(), leave, std::span(come));
  for (std::size_t i = 0, at = 0; i < n_experts; at += come[i++]) begin[i] = at, receives[i / here] += come[i];
  std::vector<ch::Index> of_expert(n_experts);
  for (std::size_t e = 0; e < here; ++e)
    for (std::size_t i = e; i < n_experts; i += here)
      for (std::size_t k = 0; k < come[i]; ++k, ++of_expert[here * static_cast<std::size_t>(run.rank()) + e])
        arrivals.push_back(static_cast<std::int64_t>(begin[i] + k));
  const auto order = Rows::from(by_expert, chosen.shape()), places = Rows::from(arrivals, {std::ssize(arrivals)});
  const Leaf there(exchange(run, ch::value_of(ch::index_select(tokens, 0, order)), sends, receives), true);
  const auto inner = ch::gelu(model.mixture.up(ch::index_select(there, 0, places), of_expert));
  const auto made = ch::index_add(Matrix::zeros(there.shape()), 0, places, model.mixture.down(inner, of_expert));
  const Leaf home(exchange(run, ch::value_of(made), receives, sends), true);
  const auto put = [&](const auto& x) { return ch::index_add(Matrix::zeros(tokens.shape()), 0, order, x); };
  const auto gate = ch::gather(probabilities, 1, ch::reshape(chosen, ch::Shape<2>{chosen.numel(), 1}));
  const auto loss = weight * ch::cross_entropy(model.fc2(tokens + put(home) * gate), labels);
  loss.backward();  // to `home` and, by the gate and the router, to `tokens`
  ch::sum(made * exchange(run, home.grad(), sends, receives)).backward();  // to `there`
  ch::sum(before * (tokens.grad() + put(exchange(run, there.grad(), receives, sends)))).backward();
  return double{loss.item()};
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Sparse model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    ch::optim::Sgd optimizer{parameters, sgd}, policy_optimizer{net.parameters(), sgd};
    const auto of_experts = [](const Parameter& p) { return p.name.starts_with("mixture.") && p.name[8] != 'r'; };
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        double all = static_cast<double>(labels.numel());
        ranks.all_reduce(std::span(&all, 1));
        double loss = forward_and_backward(run, model, images, labels, static_cast<float>(labels.numel()) / float(all));
        ranks.all_reduce(std::span(&loss, 1));
        for (const auto& p : parameters)
          if (!of_experts(p)) ranks.all_reduce(gradient(p), ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
        optimizer.step();
        mean.add(loss, all);
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) print_sent("rank", 0, data);
    for (const auto& p : parameters)  // each rank has trained its own experts
      if (const auto own = numbers(p).size() / static_cast<std::size_t>(ranks.size()); of_experts(p))
        ranks.all_gather(numbers(p).subspan(own * static_cast<std::size_t>(run.rank()), own), numbers(p));
    return compare(run, data, model, net, policy_optimizer, 1e-5);  // many orders of sums
  });
}
