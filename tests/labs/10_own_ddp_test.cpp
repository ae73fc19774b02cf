// Lab 10: its solution passes; each wrong DDP fails the case that is about its fault, and no other.
#include "../../examples/lessons/labs/10_own_ddp/own_ddp.hpp"

#include "labs.hpp"

namespace labs_test::own_ddp {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/10_own_ddp/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/10_own_ddp.cpp"
#undef main
}  // namespace solution

enum class Fault {
  none,
  equal_weights,
  own_state,
  stale,
  all_step,
  twice,
  own_buffers,
  always_meets,
  no_no_sync,
  late,
  own_order
};

/// The solution's steps with one fault.
template <class Model>
class Wrong : public ch::OwnPolicy<Model> {
  using Base = ch::OwnPolicy<Model>;

 public:
  Wrong(Model model, ch::comm::AnyCommunicator& ranks, std::uint64_t seed, Fault fault)
      : Base("Wrong", std::move(model), ranks, seed), fault_(fault) {
    if (fault_ != Fault::own_state) this->take_state(0);
    while (count_ < this->parameter_count() && this->parameter(count_).wants_grad()) ++count_;
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    if (fault_ == Fault::always_meets) this->communicator().barrier();
    return Base::operator()(inputs...);
  }
  ch::NoSync no_sync() { return fault_ == Fault::no_no_sync ? ch::NoSync() : Base::no_sync(); }

 private:
  void synchronize() override {
    if (fault_ != Fault::own_buffers) Base::synchronize();
  }
  void backward_begins() override {
    arrived_.assign(this->parameter_count(), 0);
    next_ = 0;
  }
  void gradient_is_final(std::size_t i) override {
    arrived_[i] = 1;
    while (fault_ != Fault::late && next_ < count_ && arrived_[next_] != 0) send(next_++);
  }
  void backward_ended() override {
    for (std::size_t i = 0; i < count_; ++i)
      if (arrived_[i] == 0 && !this->parameter(i).grad_arrived() && fault_ != Fault::stale) this->clear_gradient(i);
    while (next_ < count_) send(next_++);
    this->communicator().all_reduce(std::span(arrived_), ch::comm::ReduceOp::max);
    for (std::size_t i = 0; i < count_; ++i)
      if (arrived_[i] != 0 || fault_ == Fault::all_step) this->parameter(i).set_grad_arrived(true);
  }
  void send(std::size_t i) {
    this->with_gradients(i, i + 1, [&](auto gradients) {
      auto& ranks = this->communicator();
      const auto sum = ch::comm::ReduceOp::sum;
      const auto traffic = ch::trace::Traffic::gradients;
      const double weight = fault_ == Fault::equal_weights ? 1.0 / ranks.size() : this->weight();
      if (fault_ == Fault::own_order) {
        const auto n = static_cast<std::size_t>(ranks.size()), count = gradients.size();
        for (auto& number : gradients) number *= static_cast<std::remove_reference_t<decltype(number)>>(weight);
        std::vector<std::remove_reference_t<decltype(gradients[0])>> all(n * count);
        ranks.all_gather(gradients, std::span(all), {.traffic = traffic});
        for (std::size_t k = 1; k < n; ++k)
          for (std::size_t at = 0; at < count; ++at)
            gradients[at] += all[(static_cast<std::size_t>(ranks.rank()) + k) % n * count + at];
        return;
      }
      ranks.all_reduce(gradients, sum, {.scale = weight, .traffic = traffic});
      if (fault_ == Fault::twice) ranks.all_reduce(gradients, sum, {.scale = 1.0 / ranks.size(), .traffic = traffic});
    });
  }

  Fault fault_;
  std::vector<std::uint8_t> arrived_;
  std::size_t count_ = 0, next_ = 0;
};

Run wrong(Fault fault) {
  return judged(own_ddp_lab::check, {[fault](auto model, auto& ranks, auto seed) {
                  using Net = ch::testing::PolicyNetOf<Wrong<ch::testing::PolicyModel>>;
                  return std::make_unique<Net>(std::move(model), ranks, seed, fault);
                }});
}

TEST_CASE("lab 10: the solution passes; a wrong DDP fails the case that is about its fault, and no other") {
  const auto right = solved("10_own_ddp");
  const auto of_solution = judged(own_ddp_lab::check, own_ddp_lab::code<solution::MyDdp>());
  check_empty("10_own_ddp", right);
  check_solution(of_solution, right);
  check_guesses(of_solution, right,
                {{"bytes of gradients that a rank of two sends in a step", 1952},
                 {"weight decay changes a parameter that no sample used", true}});
  check_hole(judged(own_ddp_lab::check, own_ddp_lab::code<given::MyDdp>()), right, "the constructor");
  check_solution(wrong(Fault::none), right);
  const std::pair<Fault, std::vector<std::string>> faults[] = {
      {Fault::equal_weights, {"uneven and empty shares: ", "tokens that count: "}},
      {Fault::own_state, {"a seed for each rank: "}},
      {Fault::stale, {"a parameter that one rank uses: "}},
      {Fault::all_step, {"a parameter that no rank uses: "}},
      {Fault::twice, {"bytes: rank 0 has sent "}},
      {Fault::own_buffers, {"buffers: after eval() "}},
      {Fault::always_meets, {"one rank evaluates: "}},
      {Fault::no_no_sync, {"no_sync: rank 0 has sent "}},
      {Fault::late, {"overlap: rank 0 has sent no gradients "}},
      {Fault::own_order, {"the same bits on all ranks: "}},
  };
  for (const auto& [fault, rows] : faults) {
    const auto text = run(wrong(fault), right);
    INFO(static_cast<int>(fault) << ":\n" << text);
    const auto found = wrong_code(text);
    REQUIRE(found.size() == rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(found[i].starts_with(rows[i]));
  }
}

}  // namespace labs_test::own_ddp
