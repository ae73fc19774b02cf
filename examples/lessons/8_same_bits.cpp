/// Lesson 8: the same bits on any number of devices. Each floating-point addition is rounded, so sums depend on their
/// order: (a + b) + c is not a + (b + c). In lessons 2 to 7 the number of devices gives the order: each device adds up
/// its own samples, and then these sums are added. A run on 3 devices ends with slightly other numbers than one on 2.
///
/// Here a batch is cut into 6 shares on any number of devices. A device takes neighbouring shares and makes a pass over
/// each: a share's gradient has the same bits on any device. Then shares are added up in a binary tree, ((0 1) (2 3))
/// (4 5), independent of devices. A ring adds in its own order, so ranks exchange the gradients of all shares, and each
/// rank adds them itself. The price: smaller passes and more bytes. (The policies send less: one sum for shares that
/// are a node of the tree.)

#include <bit>
#include <chorus/same_bits.hpp>

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<ch::SameBits<Model, 6>>;
using Rows = std::vector<std::vector<float>>;

/// Adds rows [begin, end) into the first, in the tree's order: the left half's size is a power of two.
void add_up(Rows& rows, std::size_t begin, std::size_t end) {
  if (end - begin < 2) return;
  const std::size_t middle = begin + std::bit_floor(end - begin - 1);
  add_up(rows, begin, middle);
  add_up(rows, middle, end);
  for (std::size_t i = 0; i < rows[begin].size(); ++i) rows[begin][i] += rows[middle][i];
}

/// Trains with batches cut into `shares` shares, and prints a fingerprint of all parameters' bits.
void train(ch::Run& run, Model& model, std::size_t shares) {
  auto& ranks = run.communicator();
  const auto n = static_cast<std::size_t>(ranks.size());
  const auto mine = ch::same_bits::shares_of_device(shares, n, static_cast<std::size_t>(ranks.rank()));
  Data data{run.seed(), ranks.rank(), ranks.size(), static_cast<int>(shares)};
  const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
  ch::optim::Sgd optimizer{parameters, sgd};
  for (int epoch = 0; epoch < epochs; ++epoch) {
    MeanLoss mean;
    for (const auto& [images, labels] : data.epoch(epoch)) {
      double samples = static_cast<double>(labels.numel()), sum = 0;
      ranks.all_reduce(std::span(&samples, 1));
      std::vector<float> zeros;
      for (const auto& p : parameters) zeros.resize(zeros.size() + numbers(p).size());
      Rows rows(shares, zeros);  // the gradients of the shares; other ranks' are added later
      for (std::size_t i = 0; i < mine.count(); ++i) {
        const auto from = ch::share_begin(labels.numel(), mine.count(), i);
        const auto to = ch::share_begin(labels.numel(), mine.count(), i + 1);
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images.slice(0, from, to)), labels.slice(0, from, to),
                                            {.mean_over = samples});  // the share's part of the batch's mean
        loss.backward();
        sum += double{loss.item()};
        auto at = rows[mine.begin + i].begin();
        for (const auto& p : parameters) at = std::ranges::copy(gradient(p), at).out;
      }
      for (auto& row : rows) ranks.all_reduce(std::span(row));  // one rank's numbers and zeros: no rounding
      add_up(rows, 0, shares);
      auto at = rows[0].begin();
      for (const auto& p : parameters) at = std::ranges::copy_n(at, p.parameter->count(), gradient(p).begin()).in;
      optimizer.step();
      ranks.all_reduce(std::span(&sum, 1));
      mean.add(sum, samples);
    }
    if (run.is_main()) mean.print(epoch);
  }
  std::uint64_t bits = 0;
  for (const auto& p : parameters)
    for (const float x : numbers(p)) bits = 31 * bits + std::bit_cast<std::uint32_t>(x);
  if (run.is_main()) std::printf("shares %zu, devices %zu: the bits are %s\n", shares, n, ch::cat(bits).c_str());
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    for (const unsigned shares : {1u, 2u, 3u, 6u}) {  // 1 + 1/2 + ... + 1/1000; each share adds up its own terms
      Rows sums(shares, {0.0f});
      for (std::size_t i = 0; i < 1000; ++i) sums[i * shares / 1000][0] += 1 / static_cast<float>(i + 1);
      add_up(sums, 0, shares);
      if (run.is_main()) std::printf("the sum in shares, %u of them: %.8g\n", shares, double{sums[0][0]});
    }
    Model model, plain = ch::nn::copy_of(model);
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end
    train(run, plain, static_cast<std::size_t>(run.devices()));  // one share per device, as in lesson 3
    train(run, model, 6);
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    Data data{run.seed(), run.rank(), run.devices(), 6};
    return compare(run, data, model, net, policy_optimizer, /*allowed=*/0);
  });
}
