/// Lesson 5: overlap. In lesson 4 ranks first compute and then communicate. But the last layer's gradients are final
/// long before the first layer's. A hook on each parameter reports that, and a bucket is sent as soon as it is full,
/// while backward continues. When backward ends, little is left to wait for. Nothing is copied: nn::FlatParameters
/// stores all gradients contiguously, the last layer's first, so that a bucket is a range of them. At the end the
/// program prints how long ranks have waited after backward, and how long the same sums take without overlap.

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;

/// Averages a model's gradients over the ranks while backward computes them.
struct Averager {
  struct Bucket {
    std::span<float> gradients{};
    std::size_t missing = 0;  // gradients that are still missing in this pass
    ch::comm::Work work{};
  };
  ch::comm::AnyCommunicator& ranks;
  ch::nn::FlatParameters<ch::Cpu> flat;
  std::vector<Bucket> buckets{3};     // one per layer, with its weight and its bias
  double weight = 1;                  // this rank's samples / all ranks'
  double left_early = 0, waited = 0;  // in all passes: buckets sent before the end, seconds after it
  std::size_t missing = 0, left = 0;  // in this pass: missing gradients, buckets that have been sent

  Averager(ch::comm::AnyCommunicator& all, Model& model) : ranks(all), flat(model) {
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const auto &first = flat.entries()[2 * b], &last = flat.entries()[2 * b + 1];
      buckets[b].gradients = {reinterpret_cast<float*>(flat.groups()[0].grad(first.begin)),
                              last.begin + last.count - first.begin};
      for (const auto* p : {&first, &last}) p->parameter().on_grad([this, b] { gradient_is_final(buckets[b]); });
    }
  }
  void gradient_is_final(Bucket& bucket) {
    if (missing == 0) {  // a pass begins
      for (Bucket& each : buckets) each.missing = 2;
      missing = 2 * buckets.size();
      left = 0;
      ch::at_backward_end([this] {
        const double end = seconds();
        for (Bucket& each : buckets) each.work.wait();
        waited += seconds() - end;
      });
    }
    --missing, --bucket.missing;
    // In the same order on all ranks, even if a later bucket is full first: collectives must match.
    for (; left < buckets.size() && buckets[left].missing == 0; ++left) {
      buckets[left].work = ranks.all_reduce_async(buckets[left].gradients, ch::comm::ReduceOp::sum,
                                                  {.scale = weight, .traffic = Traffic::gradients});
      if (missing > 0) ++left_early;
    }
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
    Averager averager{ranks, model};
    ch::optim::Sgd optimizer{parameters, sgd};
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);
        const auto mine = static_cast<double>(labels.numel());
        double all[] = {mine, mine * double{loss.item()}};
        ranks.all_reduce(std::span(all));
        averager.weight = mine / all[0];  // must be known before backward, which sends buckets
        loss.backward();
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    ranks.barrier();
    const double begin = seconds();
    for (int step = 0; step < static_cast<int>(data.steps()); ++step)
      for (auto& bucket : averager.buckets) ranks.all_reduce(bucket.gradients);
    const double alone = seconds() - begin;
    if (run.is_main()) {
      std::printf("in a step %.1f of 3 buckets leave during backward\n", averager.left_early / data.steps());
      std::printf("in a step rank 0 waits %.1f us after backward; the sums alone take %.1f us\n",
                  1e6 * averager.waited / data.steps(), 1e6 * alone / data.steps());
    }

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
