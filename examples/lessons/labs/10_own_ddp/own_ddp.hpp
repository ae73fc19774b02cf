#pragma once
/// Lab 10: what the student's code is.

#include <chorus/parallel/own_policy.hpp>
#include <chorus/testing/policy_net.hpp>

#include "../lab.hpp"

namespace own_ddp_lab {

inline constexpr const char* title = "Lab 10: your own DDP";

struct Code {
  ch::testing::MakePolicyNet make;
};
/// The student's policy, around the model of the suite.
template <template <class> class Policy>
Code code() {
  return {ch::testing::make_policy_net<Policy<ch::testing::PolicyModel>>()};
}
/// Runs chorus/testing/policy_suite.hpp on a policy.
void check(lab::Lab& lab, const Code& code);

}  // namespace own_ddp_lab
