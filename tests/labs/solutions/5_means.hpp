// Lab 5: a solution that replaces the student's `Mine`.

struct Solution {
  static void average(ch::comm::AnyCommunicator& ranks, std::span<double> gradient, ch::Index samples) {
    double all[] = {static_cast<double>(samples)};
    ranks.all_reduce(std::span(all));
    ranks.all_reduce(gradient, ch::comm::ReduceOp::sum, {.scale = static_cast<double>(samples) / all[0]});
  }
};
