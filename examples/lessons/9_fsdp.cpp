/// Lesson 9: fully sharded data parallel (ZeRO-3). In lesson 7 a rank keeps 1/N of the optimizer state. Here it also
/// keeps 1/N of the parameters and gradients: its part of each unit, which is a layer. When the forward pass reaches a
/// layer, all ranks gather its parameters, use them, and free them; backward gathers them again. A reduce-scatter
/// leaves the average of the rank's own part of the gradients, and the rank steps that part. In a step a rank sends at
/// most 3 (N-1)/N K bytes, where K is the size of all parameters. (The policy also gathers the next layer ahead.)

#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <cmath>
#include "toy.hpp"

using Policy = ch::FullyShardedDataParallel<Model>;

struct Unit {  // a layer's weight and bias
  ch::comm::AnyCommunicator& ranks;
  std::vector<Parameter> parameters;
  ch::Parameter<float, 1> own{};            // this rank's part
  ch::Tensor<float, 1> value{}, average{};  // its numbers and its gradient
  double weight = 1;                        // this rank's samples / all ranks'
  std::size_t part = 0, arrived = 0;        // the size of the part; gradients that have arrived

  Unit(ch::comm::AnyCommunicator& all, std::vector<Parameter> of) : ranks(all), parameters(std::move(of)) {
    for (const auto& p : parameters) {
      ranks.broadcast(numbers(p), /*root=*/0);
      p.parameter->on_grad([this] { gradient_is_final(); });
    }
    const auto row = in_a_row(numbers);
    part = row.size() / std::size_t(ranks.size());
    const auto mine = std::span(row).subspan(part * std::size_t(ranks.rank()), part);
    value = ch::Tensor<float, 1>::from(mine, {static_cast<ch::Index>(part)});
    average = ch::Tensor<float, 1>::zeros(value.shape());
    own = ch::Parameter<float, 1>{value};
    own.on<ch::Cpu>().bind(value.storage(), value.data(), average.storage(), average.data());
    give_back();
  }
  /// The layer's numbers or gradients, padded with zeros to a multiple of N.
  std::vector<float> in_a_row(std::span<float> (*what)(const Parameter&)) const {
    std::vector<float> row;
    for (const auto& p : parameters) row.insert(row.end(), what(p).begin(), what(p).end());
    while (row.size() % std::size_t(ranks.size()) != 0) row.push_back(0);
    return row;
  }
  void gather() {
    std::vector<float> row(part * static_cast<std::size_t>(ranks.size()));
    ranks.all_gather(value.to_vector(), std::span(row), {.traffic = Traffic::parameters});
    for (auto from = row.begin(); const auto& p : parameters)
      from = std::ranges::copy_n(from, p.parameter->count(), numbers(p).begin()).in;
  }
  void give_back() {  // the policy frees memory; here later reads would give NaNs
    for (const auto& p : parameters) std::ranges::fill(numbers(p), NAN);
  }
  auto forward(const auto& layer, const auto& x) {
    gather();
    const auto y = layer(x);
    give_back();
    // Backward needs the weight again for the gradient by x; but the first x are images.
    if constexpr (requires { x.requires_grad(); }) y.register_hook([this](const auto&) { gather(); });
    return y;
  }
  void gradient_is_final() {
    if (++arrived < parameters.size()) return;  // the other one is missing
    arrived = 0;
    give_back();
    ranks.reduce_scatter(in_a_row(gradient), std::span(average.data(), part), ch::comm::ReduceOp::sum,
                         {.scale = weight, .traffic = Traffic::gradients});
    own.on<ch::Cpu>().set_grad_arrived(true);  // by the ranks, not by backward
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    const auto all = ch::nn::named_parameters<ch::Cpu>(model);
    Unit units[] = {{ranks, {all[0], all[1]}}, {ranks, {all[2], all[3]}}, {ranks, {all[4], all[5]}}};
    std::vector<Parameter> parts;
    for (auto& unit : units) parts.push_back({"own", unit.own, &unit.own.on<ch::Cpu>()});
    ch::optim::Sgd optimizer{parts, sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        for (const auto& p : all) p.parameter->set_grad_arrived(false);
        const auto x = ch::relu(units[0].forward(model.fc1, ch::flatten(images)));
        const auto y = ch::relu(units[1].forward(model.fc2, x));
        const auto loss = ch::cross_entropy(units[2].forward(model.fc3, y), labels);
        double mine = double(labels.numel()), sums[] = {mine, mine * double{loss.item()}};
        ranks.all_reduce(std::span(sums));
        for (auto& unit : units) unit.weight = mine / sums[0];
        loss.backward();
        optimizer.step();
        mean.add(sums[1] / sums[0], sums[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    const auto kept = units[0].part + units[1].part + units[2].part;
    if (run.is_main()) std::printf("rank 0 keeps %zu numbers\n", kept), print_sent("rank", 0, data);
    for (auto& unit : units) unit.gather();  // for the comparison
    ch::optim::Sgd its_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, its_optimizer, 100 * tolerance(ranks.size()));  // its parts differ
  });
}
