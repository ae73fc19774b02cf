#pragma once
/// Post-local SGD: averages gradients in the first steps, later averages parameters every few steps.

#include <array>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/local_steps.hpp>
#include <string_view>

namespace chorus {

/// Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020. The average is taken at the
/// start of the next forward pass. Between averages ranks have different parameters: call the policy's `eval()` on all
/// ranks before testing or saving. Each of n ranks sends 2 (n - 1) / n of the model's bytes in each of the first
/// `start_local_sgd_iter` steps, then every `period` steps.
struct PostLocalSgd {
  static constexpr bool own_gradients = true;

  int start_local_sgd_iter = 100;
  int period = 4;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (!averages()) return {};
    return AllReduce{}.start(bucket, communicator);
  }

  bool averages() const { return steps < start_local_sgd_iter; }
  /// A synchronising backward pass has ended; the optimizer's step follows.
  void after_backward() {
    check<UsageError>(period > 0, "PostLocalSgd: expected a period of at least 1, got ", period);
    if (steps++ < start_local_sgd_iter) return;
    ++stepped.steps;
    due = (steps - start_local_sgd_iter) % period == 0;
  }
  template <Device D, class Communicator, class Shared>
  void before_forward(const nn::FlatParameters<D>& flat, Communicator& communicator, const Shared& shared) {
    if (!averages()) stepped.begin_pass(flat, shared, due, [&] { synchronise(flat, communicator); });
  }
  template <Device D, class Communicator>
  void synchronise(const nn::FlatParameters<D>& flat, Communicator& communicator) {
    if (stepped.steps > 0) stepped.average(flat, communicator, 1.0 / communicator.size());
    due = false;
  }

  /// After ranks have stepped by themselves, momenta differ and stay different.
  bool ranks_differ() const { return steps > start_local_sgd_iter; }
  /// Numbers for a checkpoint.
  static constexpr std::string_view kept_as = "post_local_sgd";
  std::array<double, 3> kept() const {
    return {static_cast<double>(steps), due ? 1.0 : 0.0, stepped.steps > 0 ? 1.0 : 0.0};
  }
  static bool can_keep(const std::array<double, 3>& kept) { return kept[0] >= 0 && kept[0] < 1e9; }
  void keep(const std::array<double, 3>& kept) {
    steps = static_cast<int>(kept[0]);
    due = kept[1] != 0;
    stepped.steps = kept[2] != 0 ? 1 : 0;  // only whether it is 0 matters
  }

  int steps = 0;
  bool due = false;  ///< an average must be taken
  detail::LocalSteps stepped = {};
};

}  // namespace chorus
