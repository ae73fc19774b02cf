/// Lesson 13: a mesh of ranks, and checkpoints that fit any mesh. Each rank has a place on two axes. S neighbours form
/// a shard group, in which each keeps 1/S of the optimizer's state, as in lesson 7. The D ranks with the same part, one
/// of each shard group, form a data group, which averages it as in lesson 3. In a step a rank sends (S-1)/S K bytes of
/// gradients and as many of parameters to its neighbours, and only 2(D-1)/D K/S along the other axis, whose links may
/// be slower. A checkpoint has all numbers in one row, whatever the mesh was, so any mesh can read its parts of it.
/// Here one mesh trains an epoch and another one the rest. The policy does all of it on one mesh.

#include <chorus/comm/split.hpp>
#include <chorus/parallel/mesh.hpp>
#include <filesystem>
#include <fstream>

#include "toy.hpp"

using Policy = ch::Mesh<Model, ch::mesh::Data<ch::mesh::rest>, ch::mesh::Shard<ch::mesh::dynamic>>;

constexpr int divisible = 840;  // by 1 to 8: the row of all numbers can be cut into so many equal parts

/// Ranks with the same `color` form a group.
ch::comm::AnyCommunicator group(ch::Run& run, int color) {
  return ch::comm::connect(ch::comm::split(run.communicator(), run.world(), color));
}

struct MeshOfRanks {
  ch::comm::AnyCommunicator shard_group, data_group;
  std::vector<Parameter> parameters;
  std::vector<float> values;    // all, and zeros at the end
  std::vector<float> velocity;  // of this rank's part, for SGD with momentum
  std::size_t begin;            // of the part

  MeshOfRanks(ch::Run& run, Model& model, std::size_t shards)
      : shard_group(group(run, run.rank() / static_cast<int>(shards))),
        data_group(group(run, run.rank() % static_cast<int>(shards))),
        parameters(ch::nn::named_parameters<ch::Cpu>(model)),
        values(in_a_row(parameters, numbers, divisible)),
        velocity(values.size() / shards),
        begin(velocity.size() * static_cast<std::size_t>(shard_group.rank())) {}

  /// After backward. `weight`: this rank's samples / all ranks'.
  void step(double weight) {
    std::vector<float> average(velocity.size());
    shard_group.reduce_scatter(in_a_row(parameters, gradient, divisible), std::span(average), ch::comm::ReduceOp::sum,
                               {.scale = weight, .traffic = Traffic::gradients});
    data_group.all_reduce(std::span(average), ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
    const auto own = std::span(values).subspan(begin, velocity.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      velocity[i] = static_cast<float>(sgd.momentum) * velocity[i] + average[i];
      own[i] -= static_cast<float>(sgd.lr) * velocity[i];
    }
    shard_group.all_gather(own, std::span(values), {.traffic = Traffic::parameters});
    copy_row(values, parameters, numbers);
  }
  /// Rank 0 writes all values and then all velocities. All ranks call it.
  void save(const std::string& file) {
    auto row = values;
    row.resize(2 * values.size());
    shard_group.all_gather(velocity, std::span(row).subspan(values.size()));
    if (shard_group.rank() > 0 || data_group.rank() > 0) return;
    std::ofstream(file, std::ios::binary).write(reinterpret_cast<char*>(row.data()), 4 * std::ssize(row));
  }
  /// Each rank takes all values and its part of the velocities.
  void load(const std::string& file) {
    std::vector<float> row(2 * values.size());
    std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(row.data()), 4 * std::ssize(row));
    std::copy_n(row.data(), values.size(), values.data());
    std::copy_n(row.data() + values.size() + begin, velocity.size(), velocity.data());
    copy_row(values, parameters, numbers);
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    const int n = ranks.size();
    Data data{run.seed(), ranks.rank(), n};
    Model first, second;                                               // `second` begins with the checkpoint's numbers
    Policy net{ch::nn::copy_of(first), run, {.sizes = {.shard = n}}};  // for the comparison at the end
    const auto file = run.option("checkpoint", "lesson_13.checkpoint");

    const auto train_on_mesh = [&](int shards, Model& model, int begin, int end) {  // epochs [begin, end)
      MeshOfRanks mesh{run, model, static_cast<std::size_t>(shards)};
      if (begin > 0) mesh.load(file);
      ch::trace::reset_traffic();
      train_by_hand(run, data, model, begin, end, [&](double weight) { mesh.step(weight); });
      if (run.is_main())
        std::printf("%d x %d: rank 0 keeps %zu velocities\n", n / shards, shards, mesh.velocity.size());
      if (run.is_main()) print_sent("rank", 0, data.steps() * (end - begin) / epochs);
      mesh.save(file);
      ranks.barrier();  // now the file is complete
    };
    train_on_mesh(n % 2 == 0 ? n / 2 : 1, first, 0, 1);
    train_on_mesh(n, second, 1, epochs);
    if (run.is_main()) std::filesystem::remove(file);

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, second, net, policy_optimizer, 1e-4);  // many orders of sums: see lesson 6
  });
}
