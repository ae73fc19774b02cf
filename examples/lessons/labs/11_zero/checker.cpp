/// Measurements of lab 11: bytes of state and bytes sent under DDP, with a plain and a sharded optimizer. SPOILERS:
/// read this when your lab is right.

#include <chorus/chorus.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <cmath>

#include "zero.hpp"

namespace zero_lab {
namespace {

using ch::trace::Memory;
using Optimizer = ch::optim::Adam<ch::Cpu>;

/// The model of the predictions.
template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D> fc1{512, 512, {.bias = false}}, fc2{512, 512, {.bias = false}};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::relu(fc1(x))); }
};
using Model = Net<ch::Cpu>;

double sent(int rank, Traffic kind) { return static_cast<double>(ch::trace::bytes_sent(rank, kind)); }
double state_now() { return static_cast<double>(ch::trace::memory(0, Memory::optimizer)); }

/// Bytes of a rank: optimizer state, and sent in a step.
struct Cost {
  double state, gradients, parameters;
};
/// Two steps on n ranks; the second one is counted. All ranks' state is on one device, because they are threads.
template <class Net, class Opt>
Cost train(int n) {
  const double before = state_now();
  Cost cost{};
  lab::on_ranks(n, [&](Ranks& ranks) {
    Net net{Model{}, ranks};
    const auto begin = [&] {
      ranks.barrier();
      if (ranks.rank() == 0) ch::trace::reset_traffic();
      ranks.barrier();
    };
    const auto steps = [&](auto& optimizer) {
      for (int step = 0; step < 2; ++step) {
        begin();
        optimizer.zero_grad();
        ch::mean(net(ch::Tensor<float, 2>::zeros({2, 512}))).backward();
        optimizer.step();
      }
      ranks.barrier();
      if (ranks.rank() == 0)
        cost = {(state_now() - before) / n, sent(0, Traffic::gradients), sent(0, Traffic::parameters)};
      ranks.barrier();
    };
    if constexpr (std::is_same_v<Opt, Optimizer>) {
      Opt optimizer{net.parameters(), {.lr = 0.01}};
      steps(optimizer);
    } else {
      Opt optimizer{net, {.lr = 0.01}};
      steps(optimizer);
    }
  });
  return cost;
}

/// The library's Adam for a row of numbers, on the device of a rank. It keeps what it is given.
class RowAdam final : public Adam {
 public:
  explicit RowAdam(int rank) : device_{rank} {}
  std::vector<float> gradients;  // of the last step
  std::size_t count = 0;

  void step(std::span<float> parameters, std::span<const float> its_gradients) override {
    ch::check<ch::UsageError>(parameters.size() == its_gradients.size(), "Adam: ", parameters.size(),
                              " parameters have ", its_gradients.size(), " gradients");
    ch::check<ch::UsageError>(!made_ || parameters.size() == count, "Adam: the first step had ", count,
                              " parameters, this one has ", parameters.size());
    gradients.assign(its_gradients.begin(), its_gradients.end());
    count = parameters.size();
    made_ = true;
    if (count == 0) return;
    if (!optimizer_) {
      const ch::Shape<1> shape{static_cast<ch::Index>(count)};
      value_ = ch::Tensor<float, 1>::zeros(shape, device_);
      gradient_ = ch::Tensor<float, 1>::zeros(shape, device_);
      own_ = ch::Parameter<float, 1>{value_};
      own_.on<ch::Cpu>().bind(value_.storage(), value_.data(), gradient_.storage(), gradient_.data());
      optimizer_.emplace(std::vector<ch::nn::NamedParameter<ch::Cpu>>{{"own", own_, &own_.on<ch::Cpu>()}},
                         ch::optim::AdamOptions{.lr = 0.01});
    }
    std::copy(parameters.begin(), parameters.end(), value_.data());
    std::copy(gradients.begin(), gradients.end(), gradient_.data());
    own_.on<ch::Cpu>().set_grad_arrived(true);
    optimizer_->step();
    std::copy_n(value_.data(), count, parameters.begin());
  }

 private:
  ch::Cpu device_;
  bool made_ = false;
  ch::Tensor<float, 1> value_{}, gradient_{};
  ch::Parameter<float, 1> own_{};
  std::optional<Optimizer> optimizer_;
};

constexpr int steps = 3;
/// A rank's gradients. Their sums are exact, in any order.
std::vector<float> gradients_of(int rank, int step, std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; ++i)
    all[i] = static_cast<float>((i * 5 + static_cast<std::size_t>(rank * 3 + step) * 7) % 13 + 1) / 16;
  return all;
}
std::vector<float> sum_of_gradients(int ranks, int step, std::size_t count) {
  std::vector<float> sum(count);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto its = gradients_of(rank, step, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += its[i];
  }
  return sum;
}
std::vector<float> first_parameters(std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = 1 / static_cast<float>(i % 97 + 1);
  return all;
}

std::string look_at_parts(const Code& code, int n, std::size_t count) {
  std::vector<int> owner(count, -1);
  const auto most = (count + static_cast<std::size_t>(n) - 1) / static_cast<std::size_t>(n);
  for (int rank = 0; rank < n; ++rank) {
    const auto [begin, end] = code.part(count, n, rank);
    if (begin > end || end > count)
      return ch::cat("rank ", rank, "'s part ends outside of the row: [", begin, ", ", end, ")");
    for (std::size_t i = begin; i < end; ++i) {
      if (owner[i] >= 0) return ch::cat("number ", i, " is owned by rank ", owner[i], " and by rank ", rank);
      owner[i] = rank;
    }
    if (end - begin > most) return ch::cat("rank ", rank, " owns ", end - begin, " numbers, too large a part");
  }
  const auto free = std::find(owner.begin(), owner.end(), -1);
  return free == owner.end() ? "" : ch::cat("number ", free - owner.begin(), " is owned by no rank");
}

/// What is wrong with the gradients that Adam had on a rank in its last step.
std::string look_at_gradients(const RowAdam& adam, Part part, int n, int rank, std::size_t count) {
  if (adam.gradients.size() != part.end - part.begin) return "";
  const auto right = sum_of_gradients(n, steps - 1, count), own = gradients_of(rank, steps - 1, count);
  for (std::size_t i = 0; i < adam.gradients.size(); ++i) {
    const float got = adam.gradients[i], sum = right[part.begin + i];
    if (got != sum)
      return ch::cat("on rank ", rank, " number ", i, " of them is ",
                     got == own[part.begin + i]                                   ? "the rank's own gradient"
                     : std::abs(got * static_cast<float>(n) - sum) <= 1e-5f * sum ? "the ranks' mean"
                     : got > sum                                                  ? "more than the ranks' sum"
                                                                                  : "not the ranks' sum");
  }
  return "";
}

/// Returns whether the code ended.
bool judge(lab::Lab& lab, const Code& code, int n, std::size_t count) {
  const auto name = [&](const char* what) { return ch::cat(n, " ranks, ", count, " numbers: ", what); };
  std::string why;
  std::vector<Part> parts;
  if (!lab.run(name("part"), [&] {
        why = look_at_parts(code, n, count);
        for (int rank = 0; rank < n; ++rank) parts.push_back(code.part(count, n, rank));
      }))
    return false;
  if (!lab.require(name("each number has one owner"), why.empty(), why)) return true;

  auto one = first_parameters(count);  // one device's
  RowAdam whole(n);
  for (int step = 0; step < steps; ++step) whole.step(one, sum_of_gradients(n, step, count));

  std::vector<std::vector<float>> got(static_cast<std::size_t>(n), first_parameters(count));
  std::vector<std::size_t> stepped(got.size());
  std::vector<std::string> gradients(got.size());
  std::vector<double> state(got.size());
  ch::trace::reset_traffic();
  if (!lab.run(name("step"), [&] {
        lab::on_ranks(
            n,
            [&](Ranks& ranks) {
              const int rank = ranks.rank();
              const auto at = static_cast<std::size_t>(rank);
              const auto now = [&] { return static_cast<double>(ch::trace::memory(rank, Memory::optimizer)); };
              RowAdam adam(rank);
              const double before = now();
              for (int step = 0; step < steps; ++step) code.step(ranks, got[at], gradients_of(rank, step, count), adam);
              state[at] = now() - before;
              stepped[at] = adam.count;
              gradients[at] = look_at_gradients(adam, parts[at], n, rank, count);
              ranks.barrier();
            },
            std::chrono::seconds(5));
      }))
    return false;
  for (std::size_t rank = 0; rank < got.size() && why.empty(); ++rank)
    if (const auto own = parts[rank].end - parts[rank].begin; stepped[rank] != own)
      why = ch::cat("rank ", rank, " owns ", own, " numbers, and its Adam keeps ", state[rank], " bytes for ",
                    stepped[rank]);
  if (!lab.require(name("a rank's state is for its part only"), why.empty(), why)) return true;
  const auto wrong = std::find_if(gradients.begin(), gradients.end(), [](const auto& text) { return !text.empty(); });
  lab.require(name("the gradients that Adam has"), wrong == gradients.end(), wrong == gradients.end() ? "" : *wrong);
  why.clear();
  const auto first = first_parameters(count);
  for (std::size_t rank = 0; rank < got.size() && why.empty(); ++rank)
    for (std::size_t i = 0; i < count && why.empty(); ++i)
      if (got[rank][i] != one[i])
        why = ch::cat("on rank ", rank, " number ", i,
                      got[rank][i] == first[i] ? " is what it was before the first step" : " has other bits");
  lab.require(name("the parameters are one device's, to the bit"), why.empty(), why);

  const double each = std::ceil(static_cast<double>(count) / n), once = steps * (n - 1) * each * sizeof(float);
  const auto bytes = [&](const char* what, Traffic kind) {
    double most = 0;
    for (int rank = 0; rank < n; ++rank) most = std::max(most, sent(rank, kind));
    lab.require(name(what), most == once,
                most == 0          ? ch::cat("no bytes of that kind were sent")
                : most == 2 * once ? ch::cat("twice the needed bytes were sent. Which collective did that?")
                                   : ch::cat(most, " bytes were sent, which is ", most < once ? "less" : "more",
                                             " than each rank's part once to each other rank"));
  };
  bytes("gradients sent", Traffic::gradients);
  bytes("parameters sent", Traffic::parameters);
  return true;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  for (const auto& [n, count] : {std::pair(2, std::size_t{1000}), std::pair(3, std::size_t{1000}),
                                 std::pair(4, std::size_t{1001}), std::pair(4, std::size_t{5})})
    if (!judge(lab, code, n, count)) break;

  constexpr int n = 4;
  using Plain = ch::DistributedDataParallel<Model>;
  using InParts = ch::DistributedDataParallel<Model, ch::ReduceScatter>;
  using Sharded = ch::ShardedOptimizer<Optimizer>;
  const auto ddp = train<Plain, Optimizer>(n), after_all_reduce = train<Plain, Sharded>(n),
             zero = train<InParts, Sharded>(n);
  const auto bytes = [&](const char* key, double measured, double apart, const char* hint) {
    lab.compare(key, measured, apart, hint);
  };
  bytes("ddp: a rank's optimizer state", ddp.state, 0.01 * ddp.state, "Adam keeps two numbers for each parameter.");
  bytes("ddp: a rank sends", ddp.gradients + ddp.parameters, 0, "Lesson 6 counts what a ring all-reduce sends.");
  bytes("sharded state, all-reduce of gradients: a rank sends",
        after_all_reduce.gradients + after_all_reduce.parameters, 0, "What does the all-gather send after the step?");
  bytes("sharded state, reduce-scatter of gradients: a rank's optimizer state", zero.state, 0.01 * zero.state,
        "How many numbers does a rank step?");
  bytes("sharded state, reduce-scatter of gradients: a rank sends, gradients", zero.gradients, 0,
        "Which half of an all-reduce is it?");
  bytes("sharded state, reduce-scatter of gradients: a rank sends, parameters", zero.parameters, 0,
        "Which numbers has a rank that the others need?");
}

}  // namespace zero_lab
