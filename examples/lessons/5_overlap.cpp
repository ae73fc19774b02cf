/// Lesson 5: overlap. In lesson 4 ranks first compute and then communicate. But backward begins with the last layer,
/// whose gradients are final long before the first layer's. Here each layer's gradients are a bucket. It is sent as
/// soon as it is full, while backward computes the next layer. After backward little is left to wait for. That wait is
/// the exposed communication; what happens during backward is hidden. The memory between these ranks is too fast to
/// show it. So after training the lesson measures passes in which a layer takes 10 ms, over a slow link, both ways.

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Deep>;

struct Bucket {
  std::span<float> gradients;  // a layer's: of its weight and its bias
  int ready = 0;               // how many of these two are final in this pass
  ch::comm::Work sum{};        // under way
};

/// Averages a model's gradients over the ranks while backward computes them.
class Averager {
 public:
  bool overlaps = true;
  double weight = 1;         // this rank's samples / all ranks'
  double layer_seconds = 0;  // how much longer a layer computes in backward
  double link_rate = 1e18;   // bytes per second

  Averager(ch::comm::AnyCommunicator& ranks, Deep& model) : ranks_(ranks), flat_(model), buckets_(4) {
    // All gradients lie in a row, the last layer's first: a bucket is a part of the row, and nothing is copied.
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const auto &first = flat_.entries()[2 * b], &second = flat_.entries()[2 * b + 1];
      auto* begin = reinterpret_cast<float*>(flat_.groups()[0].grad(first.begin));
      buckets_[b].gradients = {begin, second.begin + second.count - first.begin};
      for (const auto* p : {&first, &second}) p->parameter().on_grad([this, b] { gradient_is_final(buckets_[b]); });
    }
  }

  /// Call it after backward: waits until all gradients are averages. Returns how long that took, in seconds.
  double wait() {
    const double begin = seconds();
    for (Bucket& bucket : buckets_) {
      if (!overlaps) send(bucket);
      bucket.sum.wait();
    }
    sleep(link_free_ - seconds());
    return seconds() - begin;
  }

 private:
  static void sleep(double time) { std::this_thread::sleep_for(std::chrono::duration<double>(time)); }

  /// Backward calls this for each parameter. Layers form a chain: all ranks fill, and send, buckets in the same order.
  void gradient_is_final(Bucket& bucket) {
    if (++bucket.ready < 2) return;
    bucket.ready = 0;
    sleep(layer_seconds);
    if (overlaps) send(bucket);
  }

  void send(Bucket& bucket) {
    bucket.sum = ranks_.all_reduce_async(bucket.gradients, ch::comm::ReduceOp::sum,
                                         {.scale = weight, .traffic = Traffic::gradients});
    // The slow link carries one bucket after the other; 2(N-1)/N times its bytes, see lesson 6.
    const double bytes = 2 * (ranks_.size() - 1) * static_cast<double>(bucket.gradients.size_bytes()) / ranks_.size();
    link_free_ = std::max(link_free_, seconds()) + bytes / link_rate;
  }

  ch::comm::AnyCommunicator& ranks_;
  ch::nn::FlatParameters<ch::Cpu> flat_;
  std::vector<Bucket> buckets_;
  double link_free_ = 0;  // when the slow link will have carried all that was sent, in seconds
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Deep model;
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
        averager.wait();
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }

    averager.layer_seconds = run.option("layer-ms", 10.0) / 1e3;
    averager.link_rate = run.option("link-mb", 10.0) * 1e6;
    const auto exposed_ms = [&](bool overlaps) {  // the least of 9 passes: what disturbs them only adds to it
      averager.overlaps = overlaps;
      double least = 1e9;
      for (int passes = 0; const auto& [images, labels] : data.epoch(0)) {
        if (++passes > 9) break;
        optimizer.zero_grad();
        ch::cross_entropy(model(images), labels).backward();
        least = std::min(least, 1e3 * averager.wait());
      }
      return least;
    };
    const double without = exposed_ms(false), with = exposed_ms(true);
    if (run.is_main() && ranks.size() > 1)
      std::printf("slow link: rank 0 waits %.2f ms after backward without overlap, %.2f ms with it: %.0f %% hidden\n",
                  without, with, 100 * (1 - with / without));

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
