/// Lab 13: a solution, in the place of the student's file.
#include "tensor.hpp"
using namespace tensor_lab;

Matrix gathered(Ranks& ranks, const Matrix& mine) {
  Matrix all{mine.rows * static_cast<std::size_t>(ranks.size()), mine.columns};
  ranks.all_gather(mine.all(), all.all());
  return all;
}
Matrix scattered(Ranks& ranks, const Matrix& all) {
  Matrix mine{all.rows / static_cast<std::size_t>(ranks.size()), all.columns};
  ranks.reduce_scatter(all.all(), mine.all());
  return mine;
}
Matrix own_term(const Layer& layer, Kept& kept) {
  kept.hidden = plus_row(times_transposed(kept.normed, layer.up), layer.up_bias);
  return times_transposed(relu(kept.hidden), layer.down);
}
/// This rank's term of the gradient of kept.normed.
Matrix own_gradient(const Layer& layer, const Kept& kept, const Matrix& dy, Layer& gradients) {
  const auto d_hidden = relu_backward(times(dy, layer.down), kept.hidden);
  gradients.up = transposed_times(d_hidden, kept.normed);
  gradients.up_bias = sum_of_rows(d_hidden);
  gradients.down = transposed_times(dy, relu(kept.hidden));
  gradients.down_bias = sum_of_rows(dy);
  return times(d_hidden, layer.up);
}
void through_norm(const Layer& layer, const Kept& kept, const Matrix& d_normed, Gradients& gradients) {
  const auto norm = layer_norm_backward(d_normed, kept.x, layer.norm_weight);
  gradients.x = norm.x;
  gradients.layer.norm_weight = norm.weight;
  gradients.layer.norm_bias = norm.bias;
}
Matrix forward(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept) {
  kept = {x, layer_norm(x, layer.norm_weight, layer.norm_bias), {}};
  auto y = own_term(layer, kept);
  ranks.all_reduce(y.all());
  return plus_row(y, layer.down_bias);
}
Gradients backward(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy) {
  Gradients gradients;
  auto d_normed = own_gradient(layer, kept, dy, gradients.layer);
  ranks.all_reduce(d_normed.all());
  through_norm(layer, kept, d_normed, gradients);
  return gradients;
}
Matrix forward_split(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept) {
  kept = {x, gathered(ranks, layer_norm(x, layer.norm_weight, layer.norm_bias)), {}};
  return plus_row(scattered(ranks, own_term(layer, kept)), layer.down_bias);
}
Gradients backward_split(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy) {
  Gradients gradients;
  through_norm(layer, kept, scattered(ranks, own_gradient(layer, kept, gathered(ranks, dy), gradients.layer)),
               gradients);
  for (auto* gradient : {&gradients.layer.norm_weight, &gradients.layer.norm_bias}) ranks.all_reduce(gradient->all());
  return gradients;
}
int main(int argc, char** argv) {
  return lab::run(argc, argv, title, check, {forward, backward, forward_split, backward_split});
}
