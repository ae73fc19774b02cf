/// Lesson 4: buckets. Even a short message costs time: it takes 2(N-1) hops in a ring. So gradients are sent together:
/// they are copied into flat buffers, the buckets, and one call averages a bucket. The sums are the same, in fewer and
/// larger messages.

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;

struct Bucket {
  std::vector<Parameter> parameters;
  std::vector<float> gradients;
};

/// At most `most` numbers per bucket, unless a parameter is larger. The last layers come first, because backward begins
/// with them: the next lesson needs that.
std::vector<Bucket> make_buckets(const std::vector<Parameter>& parameters, std::size_t most) {
  std::vector<Bucket> buckets(1);
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    const std::size_t count = numbers(*p).size();
    if (!buckets.back().parameters.empty() && buckets.back().gradients.size() + count > most) buckets.emplace_back();
    buckets.back().parameters.push_back(*p);
    buckets.back().gradients.resize(buckets.back().gradients.size() + count);
  }
  return buckets;
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
    auto buckets = make_buckets(parameters, run.option("bucket", std::size_t{10'000}));
    ch::optim::Sgd optimizer{parameters, sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);
        loss.backward();
        const auto mine = static_cast<double>(labels.numel());
        double all[] = {mine, mine * double{loss.item()}};
        ranks.all_reduce(std::span(all));
        for (auto& bucket : buckets) {
          auto to = bucket.gradients.begin();
          for (const auto& p : bucket.parameters) to = std::ranges::copy(gradient(p), to).out;
          ranks.all_reduce(std::span(bucket.gradients), ch::comm::ReduceOp::sum,
                           {.scale = mine / all[0], .traffic = Traffic::gradients});
          auto from = bucket.gradients.begin();
          for (const auto& p : bucket.parameters)
            from = std::ranges::copy_n(from, p.parameter->count(), gradient(p).begin()).in;
        }
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) {
      std::printf("%zu gradients go in %zu messages in a step, of", parameters.size(), buckets.size());
      for (const auto& bucket : buckets) std::printf(" %zu", bucket.gradients.size() * sizeof(float));
      std::printf(" bytes\n");
      print_sent("rank", 0, data);
    }

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
