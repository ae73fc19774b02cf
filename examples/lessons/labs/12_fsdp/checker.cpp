/// Measurements of lab 12: bytes sent under DDP and FSDP, memory of a rank whose units come and go. SPOILERS: read this
/// when your lab is right.

#include <chorus/chorus.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <cmath>

#include "fsdp.hpp"

namespace fsdp_lab {
namespace {

constexpr int layers = 8;
constexpr std::size_t numbers_of_unit = 512 * 256;

/// The model of the predictions: 8 linear layers, which have a unit each.
template <class D>
struct Net : ch::nn::Module {
  ch::nn::ModuleList<ch::nn::Linear<D>> fc;
  Net() {
    for (ch::Index i = 0; i < layers; ++i)
      fc.push_back(ch::nn::Linear<D>(i % 2 ? 256 : 512, i % 2 ? 512 : 256, {.bias = false}));
  }
  CHORUS_MODULE(Net, fc)
  ch::Variable<float, 2> forward(const auto& x) const {
    auto y = fc[0](x);
    for (std::size_t i = 1; i < fc.size(); ++i) y = fc[i](y);
    return y;
  }
};
using Model = Net<ch::Cpu>;
using Fsdp = ch::FullyShardedDataParallel<Model, ch::ByModule<ch::nn::Linear<ch::Cpu>>>;

double sent(int rank, Traffic kind) { return static_cast<double>(ch::trace::bytes_sent(rank, kind)); }

/// Two steps; bytes of the second one are counted.
template <class Policy>
void train(Policy& net, Ranks& ranks) {
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01}};
  const ch::Variable<float, 2> inputs(ch::Tensor<float, 2>::zeros({2, 512}), true);  // the first layer gathers, too
  for (int step = 0; step < 2; ++step) {
    ranks.barrier();
    if (ranks.rank() == 0) ch::trace::reset_traffic();
    ranks.barrier();
    optimizer.zero_grad();
    ch::mean(net(inputs)).backward();
    optimizer.step();
  }
  ranks.barrier();
}

/// The student's layer: y_i = w_i x_i + w_(count-1-i).
class Layer final : public Unit {
 public:
  Layer(const Ranks& ranks, std::size_t count, int number)
      : rank_(ranks.rank()),
        count_(count),
        part_((count + static_cast<std::size_t>(ranks.size()) - 1) / static_cast<std::size_t>(ranks.size())),
        parameters_(rank_, Memory::parameters, part_),
        gradients_(rank_, Memory::gradients, part_) {
    for (std::size_t i = 0; i < part_; ++i) {
      const auto at = part_ * static_cast<std::size_t>(rank_) + i;
      parameters_.numbers()[i] = at < count ? weight(number, at) : 0;
    }
  }
  static float weight(int number, std::size_t i) {
    return 1 + static_cast<float>((i * 7 + static_cast<std::size_t>(number) * 3) % 5) / 8;
  }

  std::span<const float> parameters() const override { return parameters_.numbers(); }
  std::span<float> gradients() const override { return gradients_.numbers(); }
  Values forward(const Numbers& whole, const Values& x) const override {
    check_whole("forward", "whole", whole);
    return output(whole.numbers(), x);
  }
  Values backward(const Numbers& whole, const Values& x, const Values& dy, const Numbers& gradients) const override {
    check_whole("backward", "whole", whole);
    check_whole("backward", "gradients", gradients);
    return gradient(whole.numbers(), x, dy, gradients.numbers());
  }

  static Values output(std::span<const float> w, const Values& x) {
    auto y = x;
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = w[i] * x[i] + w[x.size() - 1 - i];
    return y;
  }
  static Values gradient(std::span<const float> w, const Values& x, const Values& dy, std::span<float> dw) {
    auto dx = dy;
    for (std::size_t i = 0; i < x.size(); ++i) {
      dw[i] = x[i] * dy[i] + dy[x.size() - 1 - i];
      dx[i] = w[i] * dy[i];
    }
    return dx;
  }

 private:
  void check_whole(const char* call, const char* name, const Numbers& numbers) const {
    ch::check<ch::UsageError>(numbers.size() >= count_, call, ": `", name, "` has ", numbers.size(),
                              " numbers, and the layer has ", count_);
  }
  int rank_;
  std::size_t count_, part_;
  Numbers parameters_, gradients_;
};

/// What a rank's batch gives on one device: the output, and each layer's gradients.
struct Truth {
  Values output;
  std::vector<Values> gradients;
};
Values input(int rank, std::size_t count) {
  Values x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<float>((i + static_cast<std::size_t>(rank) * 5) % 11);
  return x;
}
Truth truth(int rank, std::size_t count, int number_of_layers) {
  std::vector<Values> xs{input(rank, count)}, weights;
  for (int i = 0; i < number_of_layers; ++i) {
    auto& w = weights.emplace_back(count);
    for (std::size_t j = 0; j < count; ++j) w[j] = Layer::weight(i, j);
    xs.push_back(Layer::output(w, xs.back()));
  }
  Truth truth{xs.back(), std::vector<Values>(weights.size(), Values(count))};
  Values dy(count, 1);
  for (std::size_t i = weights.size(); i-- > 0;) dy = Layer::gradient(weights[i], xs[i], dy, truth.gradients[i]);
  return truth;
}

/// What a rank's calls did.
struct Seen {
  std::string output, gradient;                  // what is wrong with them
  double after_forward = 0, after_backward = 0;  // bytes of parameters and of gradients beside the parts
  double sent_forward = 0, sent_backward = 0, sent_gradients = 0;  // in the second step
};

/// Runs two steps of the code on `n` ranks, and looks at the second.
class Run {
 public:
  Run(int n, std::size_t count, int number_of_layers) : n_(n), count_(count), layers_(number_of_layers) {
    for (int rank = 0; rank < n; ++rank) truths_.push_back(truth(rank, count, number_of_layers));
  }
  std::vector<Seen> seen;
  double most_parameters = 0, most_gradients = 0;  // of a rank, in bytes
  double part() const { return std::ceil(static_cast<double>(count_) / n_) * sizeof(float); }
  double unit() const { return n_ * part(); }
  double resting() const { return layers_ * part(); }

  void operator()(const Code& code) {
    seen.assign(static_cast<std::size_t>(n_), {});
    ch::trace::reset_traffic();
    auto& peaks = lab::Peaks::begin();
    try {
      lab::on_ranks(
          n_, [&](Ranks& ranks) { on_rank(code, ranks, peaks); }, std::chrono::seconds(5));
    } catch (...) {
      lab::Peaks::end();
      throw;
    }
    lab::Peaks::end();
    for (int rank = 0; rank < n_; ++rank) {
      most_parameters = std::max(most_parameters, peaks.most(rank, Memory::parameters));
      most_gradients = std::max(most_gradients, peaks.most(rank, Memory::gradients));
    }
  }

 private:
  void on_rank(const Code& code, Ranks& ranks, lab::Peaks& peaks) {
    const int rank = ranks.rank();
    Seen& own = seen[static_cast<std::size_t>(rank)];
    std::vector<Layer> units;
    for (int i = 0; i < layers_; ++i) units.emplace_back(ranks, count_, i);
    for (int step = 0; step < 2; ++step) {
      ranks.barrier();
      const double parameters = sent(rank, Traffic::parameters), gradients = sent(rank, Traffic::gradients);
      std::vector<Values> xs{input(rank, count_)};
      for (int i = 0; i < layers_; ++i) {
        xs.push_back(code.forward(ranks, units[static_cast<std::size_t>(i)], xs.back()));
        own.after_forward = std::max(own.after_forward, peaks.held(rank, Memory::parameters) - resting());
      }
      look_at_output(own, rank, xs.back());
      const double between = sent(rank, Traffic::parameters);
      own.sent_forward = between - parameters;
      Values dy(count_, 1);
      for (std::size_t i = units.size(); i-- > 0;) {
        dy = code.backward(ranks, units[i], xs[i], dy);
        own.after_backward = std::max(own.after_backward, peaks.held(rank, Memory::gradients) - resting());
        look_at_gradient(own, step, rank, i, units[i].gradients());
      }
      own.sent_backward = sent(rank, Traffic::parameters) - between;
      own.sent_gradients = sent(rank, Traffic::gradients) - gradients;
    }
    ranks.barrier();
  }
  void look_at_output(Seen& own, int rank, const Values& y) const {
    const auto& right = truths_[static_cast<std::size_t>(rank)].output;
    if (y.size() == right.size() && std::equal(y.begin(), y.end(), right.begin())) return;
    const auto first =
        static_cast<std::size_t>(std::mismatch(right.begin(), right.end(), y.begin(), y.end()).first - right.begin());
    if (own.output.empty())
      own.output = ch::cat("on rank ", rank, " number ", first, " of the last layer's output is not one device's");
  }
  void look_at_gradient(Seen& own, int step, int rank, std::size_t layer, std::span<const float> got) const {
    const auto begin = static_cast<std::size_t>(rank) * got.size();
    for (std::size_t i = 0; i < got.size() && begin + i < count_ && own.gradient.empty(); ++i) {
      const auto of_rank = [&](int r) {
        return double{truths_[static_cast<std::size_t>(r)].gradients[layer][begin + i]};
      };
      double sum = 0;
      for (int r = 0; r < n_; ++r) sum += of_rank(r);
      const auto is = [&](double x) { return std::abs(double{got[i]} - x) <= 1e-5 * std::abs(x); };
      if (!is(sum / n_))
        own.gradient = ch::cat("on rank ", rank, " number ", i, " of its part of layer ", layer,
                               step > 0                 ? " is right in the first step only: has it that step's, too?"
                               : is(sum)                ? " is the sum of the ranks' gradients"
                               : is(of_rank(rank))      ? " is the rank's own gradient"
                               : is(of_rank(rank) / n_) ? " is the rank's own gradient by the number of ranks"
                               : got[i] == 0            ? " is 0"
                                                        : " is not the mean");
    }
  }

  int n_;
  std::size_t count_;
  int layers_;
  std::vector<Truth> truths_;
};

/// Returns whether the code ended.
bool judge(lab::Lab& lab, const Code& code, int n, std::size_t count) {
  const auto name = [&](const char* what) { return ch::cat(n, " ranks, ", count, " numbers a unit: ", what); };
  Run run(n, count, 5);
  if (!lab.run(name("forward and backward"), [&] { run(code); })) return false;
  const auto first = [&](std::string Seen::*what) {
    for (const auto& rank : run.seen)
      if (!(rank.*what).empty()) return rank.*what;
    return std::string();
  };
  const auto most = [&](double Seen::*what) {
    double of_all = 0;
    for (const auto& rank : run.seen) of_all = std::max(of_all, rank.*what);
    return of_all;
  };
  lab.require(name("the output"), first(&Seen::output).empty(), first(&Seen::output));
  lab.require(name("the gradients"), first(&Seen::gradient).empty(), first(&Seen::gradient));
  const double once = 5 * (n - 1) * run.part();  // what one gather of all units sends, or one reduce-scatter
  const auto bytes = [&](const char* what, double got, const char* of) {
    lab.require(name(what), got == once,
                got == 0          ? ch::cat("no bytes of ", of, " were sent. Were they counted as another kind?")
                : got == 2 * once ? ch::cat("twice the needed bytes of ", of, " were sent, which an all-reduce does")
                                  : ch::cat(got, " bytes of ", of, " were sent, which is ",
                                            got < once ? "less" : "more", " than each part once to each other rank"));
  };
  bytes("bytes sent in forward", most(&Seen::sent_forward), "parameters");
  bytes("bytes of parameters sent in backward", most(&Seen::sent_backward), "parameters");
  bytes("bytes of gradients sent in backward", most(&Seen::sent_gradients), "gradients");
  const auto memory = [&](const char* what, double left, double at_most, const char* of) {
    lab.require(
        name(what), left == 0 && at_most > run.resting() && at_most <= run.resting() + run.unit(),
        left > 0 ? ch::cat("after that pass of a unit, ", left, " bytes of ", of, " are left in addition to the parts")
        : at_most <= run.resting()
            ? ch::cat("no whole unit was counted as ", of, " of its rank")
            : ch::cat("at most ", at_most, " bytes of ", of, ": more than the parts and one whole unit"));
  };
  memory("memory, forward", most(&Seen::after_forward), run.most_parameters, "parameters");
  memory("memory, backward", most(&Seen::after_backward), run.most_gradients, "gradients");
  return true;
}

/// The lab's own code, whose memory the predictions are about.
Numbers gathered(Ranks& ranks, const Unit& unit) {
  const Numbers whole(ranks.rank(), Memory::parameters,
                      unit.parameters().size() * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(unit.parameters(), whole.numbers(), {.traffic = Traffic::parameters});
  return whole;
}
const Code of_lab{
    [](Ranks& ranks, const Unit& unit, const Values& x) { return unit.forward(gathered(ranks, unit), x); },
    [](Ranks& ranks, const Unit& unit, const Values& x, const Values& dy) {
      Numbers whole = gathered(ranks, unit);
      const Numbers gradients(ranks.rank(), Memory::gradients, whole.size());
      auto dx = unit.backward(whole, x, dy, gradients);
      ranks.reduce_scatter(gradients.numbers(), unit.gradients(), ch::comm::ReduceOp::sum,
                           {.scale = 1.0 / ranks.size(), .traffic = Traffic::gradients});
      return dx;
    }};

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  for (const auto& [n, count] :
       {std::pair(2, std::size_t{96}), std::pair(3, std::size_t{100}), std::pair(4, std::size_t{101})})
    if (!judge(lab, code, n, count)) break;

  constexpr int n = 4;
  lab::on_ranks(n, [](Ranks& ranks) {
    ch::DistributedDataParallel<Model> net{Model{}, ranks};
    train(net, ranks);
  });
  lab.compare("ddp, a rank sends", sent(0, Traffic::gradients) + sent(0, Traffic::parameters), 0,
              "What does an all-reduce send of K bytes? Lab 1 and lesson 6 count it.");
  auto gathers = ch::comm::thread_group(n);
  lab::on_ranks(n, [&](Ranks& ranks) {
    Fsdp net{Model{}, ranks, gathers[static_cast<std::size_t>(ranks.rank())]};
    train(net, ranks);
  });
  lab.compare("fsdp, a rank sends of gradients", sent(0, Traffic::gradients), 0,
              "Which half of an all-reduce is a reduce-scatter?");
  lab.compare("fsdp, a rank sends of parameters", sent(0, Traffic::parameters), 0,
              "How often is each unit gathered? Is one of them an exception?");
  Run run(n, numbers_of_unit, layers);
  run(of_lab);
  lab.compare("a rank's parameters between steps, bytes", run.resting(), 0, "Which part of each unit does it keep?");
  lab.compare("a rank's parameters at most, bytes", run.most_parameters, 0,
              "How many whole units are there at once, in addition to the parts?");
  lab.compare("a rank's gradients at most, bytes", run.most_gradients, 0,
              "How many units have whole gradients at once, in addition to the parts?");
}

}  // namespace fsdp_lab
