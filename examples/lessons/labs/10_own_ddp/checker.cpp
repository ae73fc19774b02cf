/// The requirements of lab 10: the library's tests of its own DistributedDataParallel.

#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/testing/policy_suite.hpp>

#include "own_ddp.hpp"

namespace own_ddp_lab {
namespace {

using Model = ch::testing::PolicyModel;

/// The bytes of gradients that a rank of two sends in one step of the library's DistributedDataParallel.
double bytes_of_a_step() {
  ch::trace::reset_traffic();
  lab::on_ranks(2, [](ch::comm::AnyCommunicator& ranks) {
    ch::DistributedDataParallel<Model> net(Model{}, ranks, {}, 3);
    ch::sum(net(ch::Tensor<double, 2>::zeros({4, 5}), true)).backward();
  });
  return static_cast<double>(ch::trace::bytes_sent(0, ch::trace::Traffic::gradients));
}

bool decays_unused() {
  ch::SingleDevice<Model> net(Model{{.extra = true}}, 3);
  const auto weight = [&] { return ch::value_of(net.module().extra->weight).to_vector(); };
  const auto before = weight();
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .weight_decay = 0.1}};
  ch::sum(net(ch::Tensor<double, 2>::zeros({4, 5}), false)).backward();
  optimizer.step();
  return weight() != before;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  lab.compare("bytes of gradients that a rank of two sends in a step", bytes_of_a_step(), 0,
              "How many numbers do three layers with biases have, and how many bytes has a double?");
  lab.compare("weight decay changes a parameter that no sample used", decays_unused(),
              "Does the optimizer step a parameter whose gradient never arrived?");
  const auto results = ch::testing::run_policy_suite(code.make, {.patience = std::chrono::seconds(2)});
  for (const auto& result : results) {
    lab.require(result.name, result.outcome == ch::testing::PolicyResult::passed, result.message);
    if (result.message.starts_with("lab: incomplete code")) return;  // all others would say the same
  }
}

}  // namespace own_ddp_lab
