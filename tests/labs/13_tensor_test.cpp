// Lab 13: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/13_tensor/tensor.hpp"
#include "labs.hpp"

namespace labs_test::tensor {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/13_tensor/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/13_tensor.cpp"
#undef main
}  // namespace solution

using namespace tensor_lab;
using solution::backward, solution::backward_split, solution::forward, solution::forward_split;
using solution::gathered, solution::own_gradient, solution::scattered, solution::through_norm;

/// y without a sum over ranks, and without down_bias.
Matrix term_of(const Layer& layer, const Matrix& x, Kept& kept) {
  kept = {x, layer_norm(x, layer.norm_weight, layer.norm_bias), {}};
  return solution::own_term(layer, kept);
}
Matrix forgets_forward(Ranks&, const Layer& layer, const Matrix& x, Kept& kept) {
  return plus_row(term_of(layer, x, kept), layer.down_bias);
}
Matrix sums_twice(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept) {
  auto y = term_of(layer, x, kept);
  ranks.all_reduce(y.all());
  ranks.all_reduce(y.all());
  return plus_row(y, layer.down_bias);
}
Matrix bias_on_every_rank(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept) {
  auto y = plus_row(term_of(layer, x, kept), layer.down_bias);
  ranks.all_reduce(y.all());
  return y;
}
/// All ranks send their whole terms to all others.
Matrix gathers_terms(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept) {
  const auto mine = term_of(layer, x, kept);
  const auto terms = gathered(ranks, mine);
  auto y = plus_row(Matrix{mine.rows, mine.columns}, layer.down_bias);
  for (std::size_t i = 0; i < terms.numbers.size(); ++i) y.numbers[i % y.numbers.size()] += terms.numbers[i];
  return y;
}
Gradients forgets_backward(Ranks&, const Layer& layer, const Kept& kept, const Matrix& dy) {
  Gradients gradients;
  through_norm(layer, kept, own_gradient(layer, kept, dy, gradients.layer), gradients);
  return gradients;
}
Gradients norm_not_summed(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy) {
  Gradients gradients;
  const auto all = gathered(ranks, dy);
  through_norm(layer, kept, scattered(ranks, own_gradient(layer, kept, all, gradients.layer)), gradients);
  return gradients;
}
/// As if the rows were not split: sums what is whole.
Gradients norm_summed(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy) {
  auto gradients = backward(ranks, layer, kept, dy);
  ranks.all_reduce(gradients.layer.norm_weight.all());
  return gradients;
}
Gradients bias_of_own_rows(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy) {
  auto gradients = backward_split(ranks, layer, kept, dy);
  gradients.layer.down_bias = sum_of_rows(dy);
  return gradients;
}

TEST_CASE("lab 13: the solution passes, and wrong answers are told apart") {
  const auto right = solved("13_tensor");
  const auto with = [](const Code& code) { return judged(tensor_lab::check, code); };
  const auto forwards = [&](auto* changed) { return with({changed, backward, forward_split, backward_split}); };
  const auto backwards = [&](auto* changed) { return with({forward, changed, forward_split, backward_split}); };
  const auto splits = [&](auto* changed) { return with({forward, backward, forward_split, changed}); };
  check_empty("13_tensor", right);
  check_solution(backwards(backward), right);
  check_guesses(backwards(backward), right,
                {{"forward, bytes that a rank sends", 12288},
                 {"forward, hidden numbers doubled, bytes that a rank sends", 49152}});
  check_hole(with({given::forward, given::backward, given::forward_split, given::backward_split}), right, "forward");
  check_hole(with({forward, backward, forward_split, given::backward_split}), right, "backward_split");
  check_told_apart(
      right,
      {{"no sum forward", forwards(forgets_forward), "forward: rank 0: it is this rank's term alone"},
       {"summed twice", forwards(sums_twice), "forward: rank 0: each term counts as often as there are ranks"},
       {"a bias a rank", forwards(bias_on_every_rank), "down_bias counts as often as there are ranks"},
       {"all terms to all", forwards(gathers_terms), "rank 0 sends 49152 bytes forward and 24576 backward"},
       {"no sum backward", backwards(forgets_backward), "the gradient of x: it comes from this rank's term alone"},
       {"norm summed", backwards(norm_summed), "the gradient of norm_weight: each term counts as often as there are"},
       {"norm not summed", splits(norm_not_summed), "the gradient of norm_weight: it covers the rows of this rank"},
       {"bias of own rows", splits(bias_of_own_rows), "the gradient of down_bias: it covers the rows of this rank"}});
}

}  // namespace labs_test::tensor
