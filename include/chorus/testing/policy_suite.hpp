#pragma once
/// The tests that a data-parallel policy has to pass, for any policy type: the library's own, or one of yours.

#include <algorithm>
#include <chorus/comm/thread_group.hpp>
#include <chorus/core/shares.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/testing/policy_net.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace chorus::testing {

/// What a case has found.
struct PolicyResult {
  enum Outcome { passed, failed, unsupported } outcome;
  std::string name;
  std::string message;  ///< why it failed; empty if it passed
};

struct PolicySuiteOptions {
  /// Names of cases that the policy does not claim. They are not run, and reported as unsupported.
  std::vector<std::string> unsupported = {};
  /// How long ranks wait for each other before a case fails.
  std::chrono::milliseconds patience = std::chrono::seconds(5);
};

namespace detail {

/// A training program, and what its ranks have at the end.
struct PolicyProgram {
  int ranks = 2;
  PolicyModelOptions model = {};
  std::vector<Index> sizes = {8, 4, 8};  // of the steps' global batches
  int ignored = 0;                       // labels of the first samples that don't count
  bool adam = false;
  double weight_decay = 0, max_norm = 0;
  int passes = 1;        // backward passes before a step
  bool no_sync = false;  // all but the last of them under no_sync
  bool own_seeds = false;
  int late = -1;  // a rank that sleeps before backward
  comm::Algorithm all_reduce = comm::Algorithm::automatic;
  std::function<bool(int rank, std::size_t step)> uses = [](int, std::size_t) { return true; };
  std::function<void(int rank)> in_backward = {};
  std::function<void(PolicyNet&, int rank)> at_end = {};
};
struct PolicyRun {
  std::vector<std::vector<double>> values, statistics;  // by rank
  std::vector<double> norms;                            // of rank 0's clipping
  std::vector<std::uint64_t> sent, sent_early;          // bytes by rank; before a step's last pass
};

inline Tensor<double, 2> policy_inputs(Index samples, std::size_t step) {
  auto x = Tensor<double, 2>::empty({samples, 5});
  for (Index i = 0; i < samples * 5; ++i)
    x.data()[i] = std::sin(static_cast<double>(i * 7 + 1) * 0.37 + static_cast<double>(step) * 1.9);
  return x;
}
inline Tensor<std::int64_t, 1> policy_labels(Index samples, std::size_t step, int ignored) {
  auto y = Tensor<std::int64_t, 1>::empty({samples});
  for (Index i = 0; i < samples; ++i)
    y.data()[i] = i < ignored ? -100 : (i * 2 + i / 3 + static_cast<Index>(step)) % 3;
  return y;
}

inline std::vector<double> values_of(PolicyModel& model) {
  std::vector<double> out;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    const auto* const at = static_cast<const double*>(named.parameter->memory());
    out.insert(out.end(), at, at + named.parameter->count());
  }
  return out;
}

/// One rank of a program. `plays`: one device computes the losses of all ranks' shares, one after the other.
inline void run_rank(const PolicyProgram& program, PolicyNet& net, int rank, int ranks, bool plays, PolicyRun& run) {
  const auto me = static_cast<std::size_t>(rank);
  std::unique_ptr<optim::Optimizer<Cpu>> optimizer;
  if (program.adam)
    optimizer = std::make_unique<optim::Adam<Cpu>>(net.parameters(), optim::AdamOptions{.lr = 0.02});
  else
    optimizer = std::make_unique<optim::Sgd<Cpu>>(
        net.parameters(),
        optim::SgdOptions{.lr = 0.3, .momentum = 0.9, .weight_decay = program.weight_decay});
  for (std::size_t step = 0; step < program.sizes.size(); ++step) {
    optimizer->zero_grad();
    for (int pass = 0; pass < program.passes; ++pass) {
      const auto number = step * 10 + static_cast<std::size_t>(pass);
      const Index all = program.sizes[step];
      const auto x = policy_inputs(all, number);
      const auto y = policy_labels(all, number, program.ignored);
      const bool last = pass + 1 == program.passes;
      const auto scope = program.no_sync && !last ? net.no_sync() : nullptr;
      if (last && !plays) run.sent_early[me] += trace::bytes_sent(rank, trace::Traffic::gradients);
      for (int part = plays ? 0 : rank; part < (plays ? program.ranks : rank + 1); ++part) {
        const auto n = static_cast<std::size_t>(plays ? program.ranks : ranks), at = static_cast<std::size_t>(part);
        const Index begin = share_begin(all, n, at), end = share_begin(all, n, at + 1);
        const auto loss = cross_entropy(net.forward(x.slice(0, begin, end), program.uses(part, step)),
                                        y.slice(0, begin, end), {.ignore_index = -100});
        if (part == program.late && !plays) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        if (plays)
          (loss * (static_cast<double>(end - begin) / static_cast<double>(all))).backward();
        else
          loss.backward();
      }
    }
    if (program.max_norm > 0) {
      const double norm = net.clip_grad_norm(program.max_norm);
      if (rank == 0) run.norms.push_back(norm);
    }
    optimizer->step();
    if (program.no_sync) break;
  }
  if (!plays) run.sent[me] = trace::bytes_sent(rank);
  net.eval();  // a policy that averages parameters may do so here
  if (program.at_end) program.at_end(net, rank);
  net.gathered([&](PolicyModel& model) {
    run.values[me] = values_of(model);
    if (model.norm) run.statistics[me] = model.norm->running_mean.value().to_vector();
  });
}

/// The models have the same numbers on all ranks, unless ranks have seeds of their own.
inline PolicyModel policy_model(const PolicyProgram& program, int rank) {
  PolicyModel model{program.model};
  std::size_t k = 0;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    auto* const at = static_cast<double*>(named.parameter->memory());
    for (Index i = 0; i < named.parameter->count(); ++i)
      at[i] = 0.4 * std::sin(static_cast<double>(++k) * 1.7 + (program.own_seeds ? rank : 0));
  }
  if (program.in_backward)
    model.in_backward = [&program, rank] { program.in_backward(rank); };
  return model;
}
inline std::uint64_t policy_seed(const PolicyProgram& program, int rank) {
  return program.own_seeds ? 3 + static_cast<std::uint64_t>(rank) : 3;
}

inline PolicyRun empty_run(int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  PolicyRun run;
  run.values.resize(n), run.statistics.resize(n), run.sent.resize(n), run.sent_early.resize(n);
  return run;
}
/// One device's numbers. `plays`: see run_rank.
inline PolicyRun run_one_device(PolicyProgram program, bool plays = false) {
  auto run = empty_run(1);
  program.in_backward = {};
  program.at_end = {};
  PolicyNetOf<SingleDevice<PolicyModel>> net(policy_model(program, 0), policy_seed(program, 0));
  run_rank(program, net, 0, 1, plays, run);
  return run;
}

class PolicySuite {
 public:
  PolicySuite(const MakePolicyNet& make, const PolicySuiteOptions& options) : make_(make), options_(options) {}

  /// The program under the policy. Throws what the first rank that failed has thrown.
  PolicyRun run_ranks(const PolicyProgram& program) const {
    auto run = empty_run(program.ranks);
    trace::reset_traffic();
    auto group = comm::thread_group(program.ranks, options_.patience, program.all_reduce);
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr first;
    for (auto& own : group)
      threads.emplace_back([&] {
        try {
          const auto net = make_(policy_model(program, own.rank()), own, policy_seed(program, own.rank()));
          run_rank(program, *net, own.rank(), own.size(), false, run);
        } catch (const std::exception& error) {
          {
            const std::lock_guard lock(mutex);
            if (!first) first = std::current_exception();
          }
          own.abort(error.what());
        }
      });
    for (auto& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
    return run;
  }

  /// Why the ranks' parameters are not those of one device; empty if they are.
  std::string compare(const PolicyProgram& program, bool plays = false) const {
    return differ(run_ranks(program), run_one_device(program, plays));
  }
  static std::string differ(const PolicyRun& ranks, const PolicyRun& one, double apart = 1e-12) {
    for (std::size_t rank = 0; rank < ranks.values.size(); ++rank)
      for (std::size_t i = 0; i < one.values[0].size(); ++i) {
        const double is = ranks.values[rank][i], right = one.values[0][i];
        if (!(std::abs(is - right) <= apart))
          return cat("after the last step rank ", rank, "'s parameters are not one device's: number ", i, " is ", is,
                     ", and ", right, " there");
      }
    for (std::size_t i = 0; i < one.norms.size(); ++i)
      if (!(std::abs(ranks.norms[i] - one.norms[i]) <= 1e-12))
        return cat("the norm of the gradients in step ", i, " is ", ranks.norms[i], ", and ", one.norms[i],
                   " on one device");
    return {};
  }

  std::string one_rank() const {
    PolicyProgram program{.ranks = 1};
    return differ(run_ranks(program), run_one_device(program), 0);
  }
  std::string even_shares() const { return compare({.ranks = 4}); }
  std::string uneven_shares() const { return compare({.ranks = 3, .sizes = {7, 8, 2}}); }
  std::string tokens_that_count() const { return compare({.ignored = 3}); }
  std::string tied_weights() const { return compare({.model = {.extra = true, .tied = true}}); }
  std::string one_rank_uses() const {
    const auto uses = [](int rank, std::size_t step) { return rank == 1 || step == 0; };
    return compare({.model = {.extra = true}, .uses = uses}, true);
  }
  std::string no_rank_uses() const {
    const auto uses = [](int, std::size_t step) { return step != 1; };
    return compare({.model = {.extra = true}, .weight_decay = 0.1, .uses = uses});
  }
  std::string frozen_parameters() const { return compare({.model = {.frozen = true}, .weight_decay = 0.1}); }
  std::string adam() const { return compare({.adam = true}); }
  std::string no_sync() const {
    PolicyProgram program{.sizes = {8}, .passes = 3, .no_sync = true};
    const auto run = run_ranks(program);
    for (std::size_t rank = 0; rank < run.sent_early.size(); ++rank)
      if (run.sent_early[rank] != 0)
        return cat("rank ", rank, " has sent ", run.sent_early[rank], " bytes of gradients under no_sync");
    if (trace::bytes_sent(0, trace::Traffic::gradients) == 0)
      return "no bytes of the kind trace::Traffic::gradients were sent: give CollectiveOptions this traffic";
    return differ(run, run_one_device(program));
  }
  std::string gradients_add_up() const { return compare({.passes = 3}); }
  std::string clipping() const { return compare({.max_norm = 0.1}); }
  std::string dropout() const { return compare({.model = {.dropout = 0.4}}); }
  std::string own_seeds() const { return compare({.model = {.dropout = 0.4}, .own_seeds = true}); }
  std::string buffers() const {
    const auto run = run_ranks({.model = {.norm = true}});
    for (std::size_t i = 0; i < run.statistics[0].size(); ++i)
      if (run.statistics[0][i] != run.statistics[1][i])
        return cat("after eval() running mean ", i, " is ", run.statistics[1][i], " on rank 1, and ",
                   run.statistics[0][i], " on rank 0");
    return {};
  }
  std::string late_rank() const {
    PolicyProgram program{.ranks = 3, .sizes = {6, 6, 6}};
    const auto at_once = run_ranks(program);
    program.late = 1;
    return run_ranks(program).values == at_once.values
               ? std::string()
               : "a rank that was 0.1 s late has changed the parameters' bits";
  }
  std::string bytes() const {
    PolicyProgram program{.sizes = {8}};
    const auto run = run_ranks(program);
    program.sizes = {8, 8, 8, 8, 8};
    const auto longer = run_ranks(program);
    const std::size_t numbers = run.values[0].size();
    // On two ranks an all-reduce sends each number once; and 600 bytes for what ranks agree on.
    for (std::size_t rank = 0; rank < 2; ++rank)
      if (const auto step = (longer.sent[rank] - run.sent[rank]) / 4; step > numbers * sizeof(double) + 600)
        return cat("rank ", rank, " has sent ", step, " bytes in a step; an all-reduce of the gradients sends ",
                   numbers * sizeof(double));
    return {};
  }
  std::string same_bits() const {
    for (const auto algorithm : {comm::Algorithm::ring, comm::Algorithm::direct, comm::Algorithm::in_place}) {
      const auto run = run_ranks({.ranks = 4, .all_reduce = algorithm});
      for (std::size_t rank = 1; rank < run.values.size(); ++rank)
        if (run.values[rank] != run.values[0])
          return cat("with the all-reduce '", algorithm, "' ranks 0 and ", rank, " have parameters of different bits");
    }
    return {};
  }
  std::string overlap() const {
    PolicyProgram program{.model = {.wide = true}, .sizes = {4}};
    std::string late[2];
    program.in_backward = [&](int rank) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
      const auto sent = [&] { return trace::bytes_sent(rank, trace::Traffic::gradients); };
      while (sent() == 0 && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (sent() == 0)
        late[rank] = cat("rank ", rank, " has sent no gradients when 4 MB of them were final and backward went on");
    };
    run_ranks(program);
    return late[0] + (late[0].empty() || late[1].empty() ? "" : "; ") + late[1];
  }
  std::string evaluation() const {
    PolicyProgram program{.sizes = {8}};
    program.at_end = [](PolicyNet& net, int rank) {
      const NoGrad no_grad;
      if (rank == 0) net.forward(policy_inputs(3, 0), true);
    };
    run_ranks(program);
    return {};
  }

 private:
  const MakePolicyNet& make_;
  const PolicySuiteOptions& options_;
};

struct NamedPolicyCase {
  const char* name;
  std::string (PolicySuite::*run)() const;
};
inline constexpr NamedPolicyCase all_policy_cases[] = {
    {"one rank has one device's bits", &PolicySuite::one_rank},
    {"even shares", &PolicySuite::even_shares},
    {"uneven and empty shares", &PolicySuite::uneven_shares},
    {"tokens that count", &PolicySuite::tokens_that_count},
    {"tied weights", &PolicySuite::tied_weights},
    {"a parameter that one rank uses", &PolicySuite::one_rank_uses},
    {"a parameter that no rank uses", &PolicySuite::no_rank_uses},
    {"frozen parameters", &PolicySuite::frozen_parameters},
    {"Adam", &PolicySuite::adam},
    {"no_sync", &PolicySuite::no_sync},
    {"gradients that add up", &PolicySuite::gradients_add_up},
    {"clipping", &PolicySuite::clipping},
    {"dropout", &PolicySuite::dropout},
    {"a seed for each rank", &PolicySuite::own_seeds},
    {"buffers", &PolicySuite::buffers},
    {"a late rank", &PolicySuite::late_rank},
    {"bytes", &PolicySuite::bytes},
    {"the same bits on all ranks", &PolicySuite::same_bits},
    {"overlap", &PolicySuite::overlap},
    {"one rank evaluates", &PolicySuite::evaluation},
};

}  // namespace detail

/// The names of all cases, in their order.
inline std::vector<std::string> policy_cases() {
  std::vector<std::string> names;
  for (const auto& each : detail::all_policy_cases) names.push_back(each.name);
  return names;
}

/// Runs the cases: ranks are threads, and SingleDevice has the right numbers, up to 1e-12. Each case tests one promise
/// of a data-parallel policy, and keeps to what others test elsewhere: only one has uneven shares, for example. Throws
/// UsageError for unsupported cases without such a name. A policy that loops forever without its communicator hangs.
inline std::vector<PolicyResult> run_policy_suite(const MakePolicyNet& make, const PolicySuiteOptions& options) {
  const auto names = policy_cases();
  for (const auto& name : options.unsupported)
    check<UsageError>(std::find(names.begin(), names.end(), name) != names.end(),
                      "run_policy_suite: expected unsupported cases from policy_cases(), got '", name, "'");
  const detail::PolicySuite suite(make, options);
  std::vector<PolicyResult> results;
  for (const auto& each : detail::all_policy_cases) {
    if (std::find(options.unsupported.begin(), options.unsupported.end(), each.name) != options.unsupported.end()) {
      results.push_back({PolicyResult::unsupported, each.name, "the policy does not claim it"});
      continue;
    }
    std::string message;
    try {
      message = (suite.*each.run)();
    } catch (const std::exception& error) {
      message = error.what();
    }
    results.push_back({message.empty() ? PolicyResult::passed : PolicyResult::failed, each.name, message});
  }
  return results;
}

/// `run_policy_suite<MyDdp<testing::PolicyModel>>()`: `Net` has a constructor from model, communicator and seed.
template <class Net>
std::vector<PolicyResult> run_policy_suite(const PolicySuiteOptions& options = {}) {
  return run_policy_suite(make_policy_net<Net>(), options);
}

}  // namespace chorus::testing
