// Lab 11: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/11_zero/zero.hpp"
#include "labs.hpp"

namespace labs_test::zero {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/11_zero/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/11_zero.cpp"
#undef main
}  // namespace solution

using namespace zero_lab;
using Row = std::vector<float>;
using Floats = std::span<const float>;

/// The remainder of the division has no owner.
Part rounded_down(std::size_t count, int ranks, int rank) {
  const auto each = count / static_cast<std::size_t>(ranks), r = static_cast<std::size_t>(rank);
  return {r * each, (r + 1) * each};
}
Part all_of_it(std::size_t count, int, int) { return {0, count}; }

/// A step with another way to this rank's averages, each as long as a padded part.
void with(Ranks& ranks, std::span<float> parameters, Adam& adam, const std::function<void(Row&)>& average,
          bool gather = true) {
  const auto n = static_cast<std::size_t>(ranks.size()), each = (parameters.size() + n - 1) / n;
  const auto [begin, end] = solution::part(parameters.size(), ranks.size(), ranks.rank());
  Row mine(each), all(n * each);
  average(mine);
  const auto own = parameters.subspan(begin, end - begin);
  adam.step(own, std::span(mine).first(own.size()));
  if (!gather) return;
  std::copy(own.begin(), own.end(), mine.begin());
  ranks.all_gather(mine, std::span(all), {.traffic = Traffic::parameters});
  std::copy_n(all.begin(), parameters.size(), parameters.begin());
}
void scatter(Ranks& ranks, Floats gradients, Row& mine, double scale) {
  Row all(gradients.begin(), gradients.end());
  all.resize(mine.size() * static_cast<std::size_t>(ranks.size()));
  ranks.reduce_scatter(all, std::span(mine), ch::comm::ReduceOp::sum, {.scale = scale, .traffic = Traffic::gradients});
}
/// This rank's numbers of a whole row.
void cut(const Ranks& ranks, const Row& all, Row& mine) {
  const auto [begin, end] = solution::part(all.size(), ranks.size(), ranks.rank());
  std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(begin), end - begin, mine.begin());
}
void no_gather(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  with(
      ranks, parameters, adam, [&](Row& mine) { scatter(ranks, gradients, mine, 1); }, false);
}
void mean(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  with(ranks, parameters, adam, [&](Row& mine) { scatter(ranks, gradients, mine, 1.0 / ranks.size()); });
}
void own(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  with(ranks, parameters, adam, [&](Row& mine) { cut(ranks, Row(gradients.begin(), gradients.end()), mine); });
}
void all_reduces(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  with(ranks, parameters, adam, [&](Row& mine) {
    // As many bytes as padded rows have.
    Row all(gradients.begin(), gradients.end());
    all.resize(mine.size() * static_cast<std::size_t>(ranks.size()));
    ranks.all_reduce(std::span(all), ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
    all.resize(gradients.size());
    cut(ranks, all, mine);
  });
}
/// DDP: the whole optimizer on each rank.
void steps_all(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  Row all(gradients.begin(), gradients.end());
  ranks.all_reduce(std::span(all), ch::comm::ReduceOp::sum, {.traffic = Traffic::gradients});
  adam.step(parameters, all);
}
/// Steps the padding, too.
void steps_padding(Ranks& ranks, std::span<float> parameters, Floats gradients, Adam& adam) {
  const auto n = static_cast<std::size_t>(ranks.size()), each = (parameters.size() + n - 1) / n;
  Row all(parameters.begin(), parameters.end()), mine(each);
  all.resize(n * each);
  scatter(ranks, gradients, mine, 1);
  const auto part = std::span(all).subspan(each * static_cast<std::size_t>(ranks.rank()), each);
  adam.step(part, mine);
  std::copy(part.begin(), part.end(), mine.begin());
  ranks.all_gather(mine, std::span(all), {.traffic = Traffic::parameters});
  std::copy_n(all.begin(), parameters.size(), parameters.begin());
}

TEST_CASE("lab 11: the solution passes, and wrong answers are told apart") {
  const auto right = solved("11_zero");
  const auto code = [](auto* part, auto* step) { return judged(zero_lab::check, {part, step}); };
  const auto step = [&](auto* function) { return code(solution::part, function); };
  check_empty("11_zero", right);
  check_solution(step(solution::step), right);
  check_guesses(
      step(solution::step), right,
      {{"ddp: a rank's optimizer state", 2097152}, {"sharded state, all-reduce of gradients: a rank sends", 3145728}});
  check_hole(code(given::part, solution::step), right, "part");
  check_hole(step(given::step), right, "step");
  check_told_apart(right, {{"rounded down", code(rounded_down, solution::step), "is owned by no rank"},
                           {"all of it", code(all_of_it, solution::step), "too large a part"},
                           {"no gather", step(no_gather), "is what it was before the first step"},
                           {"the mean", step(mean), "is the ranks' mean"},
                           {"its own gradients", step(own), "is the rank's own gradient"},
                           {"all-reduces", step(all_reduces), "gradients sent: twice the needed bytes were sent"},
                           {"steps all", step(steps_all), "owns 500 numbers, and its Adam keeps "},
                           {"steps the padding", step(steps_padding), "rank 2 owns 332 numbers, and its Adam keeps "}});
}

}  // namespace labs_test::zero
