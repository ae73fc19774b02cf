/// Lesson 15: ranks that are killed, and others that come. As in lesson 8 a batch is cut into 6 shares, so a step has the
/// same bits on any number of ranks. Then a lost rank costs a step, and not the run:
///   1. A call fails on the ranks that live. A rank steps only when it has the sums of all shares, so nobody is further
///      than one step ahead, and a rank that has not stepped has its old parameters: there is nothing to undo.
///   2. They meet (ch::elastic::Processes): a new list of ranks, a new communicator. That is a new epoch.
///   3. One that is ahead gives its parameters to the others, also to a newcomer.
///   4. They divide the shares again, and go on with the first step that is not done.
/// With --kill 40 the last rank ends itself in the middle of step 40; its launcher starts another process. (The launcher
/// itself may be killed, too: a process stands by.) The lesson ends with one device's bits. `ch::Elastic` does the same
/// behind a loop that does not know of it.

#include <bit>
#include <chorus/parallel/elastic/processes.hpp>
#include <chorus/same_bits.hpp>
#include <csignal>

#include "toy.hpp"

using Rows = std::vector<std::vector<float>>;
constexpr int shares = 6;
constexpr ch::optim::SgdOptions plain{.lr = 0.2};  // without momentum: parameters are all the state

/// As in lesson 8.
void add_up(Rows& rows, std::size_t begin, std::size_t end) {
  if (end - begin < 2) return;
  const std::size_t middle = begin + std::bit_floor(end - begin - 1);
  add_up(rows, begin, middle);
  add_up(rows, middle, end);
  for (std::size_t i = 0; i < rows[begin].size(); ++i) rows[begin][i] += rows[middle][i];
}

/// The batch's gradient, by all ranks. Returns its mean loss. `knocks`: somebody waits to be let in, as a rank knows; then
/// all know it.
double backward(ch::comm::AnyCommunicator& ranks, Model& model, const auto& images, const auto& labels, bool dies,
                bool& knocks) {
  const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
  const auto mine = ch::same_bits::shares_of_device(shares, static_cast<std::size_t>(ranks.size()),
                                                    static_cast<std::size_t>(ranks.rank()));
  double sums[] = {0, static_cast<double>(labels.numel()), knocks ? 1.0 : 0.0};
  ranks.all_reduce(std::span(sums).subspan(1));
  Rows rows(shares, std::vector<float>(in_a_row(parameters, numbers).size()));
  for (std::size_t i = 0; i < mine.count(); ++i) {
    const auto from = ch::share_begin(labels.numel(), mine.count(), i);
    const auto to = ch::share_begin(labels.numel(), mine.count(), i + 1);
    for (const auto& p : parameters) p.parameter->set_grad_arrived(false);
    const auto loss = ch::cross_entropy(model(images.slice(0, from, to)), labels.slice(0, from, to),
                                        {.mean_over = sums[1]});
    loss.backward();
    sums[0] += double{loss.item()};
    rows[mine.begin + i] = in_a_row(parameters, gradient);
    if (dies) std::raise(SIGKILL);
  }
  for (auto& row : rows) ranks.all_reduce(std::span(row));
  ranks.all_reduce(std::span(sums).first(1));
  add_up(rows, 0, shares);
  copy_row(rows[0], parameters, gradient);
  knocks = sums[2] > 0;
  return sums[0];
}

/// Steps from `done` on. Returns whether all are done; otherwise somebody waits to be let in.
bool make_steps(ch::Run& run, Model& model, ch::elastic::Processes& members, int& done) {
  auto& ranks = run.communicator();
  Data data{run.seed(), ranks.rank(), ranks.size(), shares};
  ch::optim::Sgd optimizer{ch::nn::named_parameters<ch::Cpu>(model), plain};
  const int steps = static_cast<int>(data.steps()) / epochs, kill = run.option("kill", -1);
  for (int epoch = done / steps; epoch < epochs; ++epoch) {
    auto& loader = data.epoch(epoch);
    loader.skip(done % steps);
    MeanLoss mean;
    for (const auto& [images, labels] : loader) {
      const bool dies = members.epoch == 1 && done == kill && ranks.rank() + 1 == ranks.size();
      bool knocks = members.knocked();
      mean.add(backward(ranks, model, images, labels, dies, knocks), 1);
      optimizer.step();
      ++done;
      if (knocks) return false;
    }
    if (run.is_main()) mean.print(epoch);
  }
  ranks.barrier();  // all have made all steps: nobody needs another one any more
  return true;
}

void train(ch::Run& run, Model& model) {
  ch::elastic::Processes members(run.world());
  int done = 0;
  std::string why;
  for (bool all_done = false; !all_done;) {
    run.regroup(members.regroup(why));
    try {
      auto& ranks = run.communicator();
      std::vector<int> all(static_cast<std::size_t>(ranks.size()));
      ranks.all_gather(std::span<const int>(&done, 1), std::span(all), {});
      const auto ahead = std::ranges::max_element(all);
      for (const auto& p : ch::nn::named_parameters<ch::Cpu>(model))
        ranks.broadcast(numbers(p), static_cast<int>(ahead - all.begin()));
      done = *ahead;
      if (run.is_main()) std::printf("%d ranks, from step %d on\n", ranks.size(), done);
      all_done = make_steps(run, model, members, done);
      why.clear();
    } catch (const ch::CommError& lost) {
      why = lost.what();
    }
  }
}

int main(int argc, char** argv) {
  return ch::launch<ch::DistributedDataParallel<Model>>(argc, argv, [](ch::Run& run) {
    Model model;
    ch::SingleDevice<ch::SameBits<Model, shares>> net{{ch::nn::copy_of(model)}, run.seed()};
    train(run, model);
    Data data{run.seed(), 0, 1, shares};
    ch::optim::Sgd policy_optimizer{net.parameters(), plain};
    train(data, net, policy_optimizer);
    return compare_parameters(run, "single, SameBits", ch::nn::named_parameters<ch::Cpu>(model),
                              ch::nn::named_parameters<ch::Cpu>(net.module()), /*allowed=*/0);
  });
}
