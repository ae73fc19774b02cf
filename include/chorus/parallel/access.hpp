#pragma once
/// The door through which classes of the library reach what a policy has for them, and users don't call.

#include <chorus/parallel/join.hpp>

namespace chorus::detail {

/// A policy that has something for them specialises it. Here: one of one process, to which `join` has nothing to say.
template <class Net>
class Access {
 public:
  explicit Access(Net&) {}
  void begin_join(const JoinFacts&) {}
  void run_out_of_batches() {}
  JoinedPass take_part_in_pass() { return JoinedPass::none; }
  void all_have_run_out() {}
  void end_join() {}
};

}  // namespace chorus::detail
