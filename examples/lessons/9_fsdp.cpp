/// Lesson 9: fully sharded data parallel (ZeRO-3). In lesson 7 a rank keeps 1/N of the optimizer state. Here it also
/// keeps 1/N of the parameters and gradients: a part of each unit, which is a layer. A layer is whole only while it
/// computes. Forward gathers its parameters from all ranks, uses them and gives them back; backward does the same
/// again. The layer's gradients are averaged by a reduce-scatter, which leaves each rank the average of its own part,
/// and the rank steps that part. In a step a rank sends at most 3 (N-1)/N K bytes, where K is the size of all
/// parameters. (The policy also gathers the next layer while this one computes.)

#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <cmath>

#include "toy.hpp"

using Layer = ch::nn::Linear<ch::Cpu>;
using Policy = ch::FullyShardedDataParallel<Deep, ch::ByModule<Layer>>;

std::size_t held = 0, most_held = 0;  // the parameters of whole layers on this rank: now, and at most

/// A layer whose parameters and gradients are spread over the ranks.
class Unit {
 public:
  double weight = 1;  // this rank's samples / all ranks'

  Unit(ch::comm::AnyCommunicator& ranks, Layer& layer)
      : ranks_(ranks), layer_(layer), whole_(ch::nn::named_parameters<ch::Cpu>(layer)), own_(part_of_rank_0()) {
    for (const auto& p : whole_) p.parameter->on_grad([this] { gradient_is_final(); });
    give_back();
  }
  Parameter part() { return own_.parameter(); }

  auto forward(const auto& x) {
    gather();
    const auto y = layer_(x);
    give_back();
    // Backward begins with the gradient of y. For the gradient of x it needs the parameters again; images need none.
    if constexpr (requires { x.requires_grad(); }) y.register_hook([this](const auto&) { gather(); });
    return y;
  }

  /// All ranks get the numbers of all parts.
  void gather() {
    std::vector<float> row(own_.values().size() * static_cast<std::size_t>(ranks_.size()));
    ranks_.all_gather(own_.values(), std::span(row), {.traffic = Traffic::parameters});
    copy_row(row, whole_, numbers);
    gathered_ = row.size();
    held += gathered_;
    most_held = std::max(most_held, held);
  }

 private:
  Part part_of_rank_0() {  // of rank 0's numbers
    for (const auto& p : whole_) ranks_.broadcast(numbers(p), /*root=*/0);
    return {in_a_row(whole_, numbers, ranks_.size()), ranks_.rank(), ranks_.size()};
  }
  /// The policy frees the memory. Here it is overwritten: whoever reads it would get NaN.
  void give_back() {
    for (const auto& p : whole_) std::ranges::fill(numbers(p), NAN);
    held -= std::exchange(gathered_, 0);
  }
  /// Backward calls this for the weight and for the bias.
  void gradient_is_final() {
    if (++ready_ < whole_.size()) return;
    ready_ = 0;
    give_back();
    ranks_.reduce_scatter(in_a_row(whole_, gradient, ranks_.size()), own_.new_gradient(), ch::comm::ReduceOp::sum,
                          {.scale = weight, .traffic = Traffic::gradients});
    for (const auto& p : whole_) p.parameter->set_grad_arrived(false);  // clears the whole gradient
  }

  ch::comm::AnyCommunicator& ranks_;
  Layer& layer_;
  std::vector<Parameter> whole_;  // weight and bias
  Part own_;                      // this rank's part of both
  std::size_t gathered_ = 0;      // the layer's numbers, if they are whole now
  std::size_t ready_ = 0;         // gradients that are final in this pass
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Deep model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    Unit units[] = {{ranks, model.fc1}, {ranks, model.fc2}, {ranks, model.fc3}, {ranks, model.fc4}};
    std::vector<Parameter> parts;
    for (auto& unit : units) parts.push_back(unit.part());
    ch::optim::Sgd optimizer{parts, sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        const auto x = ch::relu(units[0].forward(Deep::small(images)));
        const auto y = ch::relu(units[2].forward(ch::relu(units[1].forward(x))));
        const auto loss = ch::cross_entropy(units[3].forward(y), labels);
        const auto mine = static_cast<double>(labels.numel());
        double all[] = {mine, mine * double{loss.item()}};
        ranks.all_reduce(std::span(all));
        for (auto& unit : units) unit.weight = mine / all[0];
        loss.backward();
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    std::size_t kept = 0;
    for (const auto& part : parts) kept += numbers(part).size();
    if (run.is_main()) {
      std::printf("rank 0 keeps %zu parameters, and holds %zu more at most\n", kept, most_held);
      print_sent("rank", 0, data);
    }

    for (auto& unit : units) unit.gather();  // for the comparison
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
