// Lab 6: a solution that replaces the student's `Mine`.

struct Solution {
  static void average(ch::comm::AnyCommunicator& ranks, std::span<double> parameters) {
    ranks.all_reduce(parameters, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
  }
};
