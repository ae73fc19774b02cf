#pragma once
/// Option `static_graph`: all passes use the same parameters, equally often.

#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/parameter_memory.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::ddp {

/// The first pass sends at its end, after ranks have exchanged which parameters they used, and how often. From then on
/// unused parameters are not sent, and a gradient is complete with the last of its parts.
template <Device D, class Communicator>
class StaticGraph final : public Extension<D> {
 public:
  explicit StaticGraph(Core<D, Communicator>& core) : core_(core) {}

  void choose(std::span<char> sends) override {
    for (std::size_t i = 0; i < sends.size() && known(); ++i)
      if (!uses(i).anywhere) sends[i] = false;
  }
  void buckets_changed() override {
    for (std::size_t i = 0; i < core_.entries(); ++i) core_.buckets.expect(i, known() ? uses(i).here : Buckets::any);
    core_.buckets.begin_pass();
  }

  void backward_begins() override {
    if (!known()) {
      arrivals_.assign(core_.entries(), 0);
      core_.buckets.hold();
    }
    for (std::size_t i = 0; i < core_.entries() && known(); ++i)
      if (core_.buckets.sends(i) && uses(i).here == 0) core_.fill(i);  // used by other ranks only
  }
  void gradient_arrived(std::size_t i) override {
    if (!core_.sync) return;
    if (!known())
      ++arrivals_[core_.number_of(i)];
    else
      check<UsageError>(uses(i).here > 0 || core_.options.ignores(core_.name(i)), core_.where(), core_.name(i),
                        " received a gradient, but not in the first backward pass: with static_graph all passes must "
                        "use the same parameters");
  }
  void backward_ended() override {
    if (!known()) return learn();
    const auto missing = core_.fill_missing();
    check<UsageError>(missing.empty(), core_.where(), "no gradient, or only a part, arrived for ", missing,
                      ", unlike in the first backward pass: with static_graph all passes must use the same parameters");
  }

 private:
  struct Uses {
    int here = 0;           // how often the gradient arrives on this rank
    bool anywhere = false;  // whether it arrives on any rank
  };
  bool known() const { return !uses_.empty(); }
  const Uses& uses(std::size_t i) const { return uses_[core_.number_of(i)]; }

  [[gnu::cold]] void learn() {
    std::vector<std::int32_t> anywhere;
    for (std::size_t i = 0; i < core_.entries(); ++i) anywhere.push_back(arrivals_[core_.number_of(i)]);
    core_.ranks.all_reduce(std::span(anywhere).first(core_.common_entries()), comm::ReduceOp::max, {});
    std::vector<Uses> uses(core_.entries());
    const bool uses_nothing = core_.contribution != Contribution::samples;  // it will, with samples
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      const auto number = core_.number_of(i);
      uses[number] = {uses_nothing ? anywhere[i] : arrivals_[number], !core_.buckets.sends(i) || anywhere[i] != 0};
      if (core_.buckets.sends(i)) core_.fill(i);
    }
    uses_ = std::move(uses);
    core_.cut_buckets();
    auto* const memory = core_.template find<ParameterMemory<D>>();
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      if (this->uses(i).anywhere) continue;
      if (memory != nullptr) memory->forget(core_.name(i));
      // Its zeros were for the other ranks.
      if (core_.contribution == Contribution::zeros) core_.parameter(i).set_grad_arrived(false);
    }
    core_.buckets.complete();
  }

  Core<D, Communicator>& core_;
  std::vector<int> arrivals_;  // in the first pass, by number
  std::vector<Uses> uses_;     // by number; empty: not known yet
};

}  // namespace chorus::ddp
