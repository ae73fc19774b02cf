/// Lab 13: a layer on several ranks. See README.md.

#include "tensor.hpp"

using namespace tensor_lab;

Matrix forward([[maybe_unused]] Ranks& ranks, [[maybe_unused]] const Layer& layer, [[maybe_unused]] const Matrix& x,
               [[maybe_unused]] Kept& kept) {
  lab::hole("forward");
}

Gradients backward([[maybe_unused]] Ranks& ranks, [[maybe_unused]] const Layer& layer,
                   [[maybe_unused]] const Kept& kept, [[maybe_unused]] const Matrix& dy) {
  lab::hole("backward");
}

Matrix forward_split([[maybe_unused]] Ranks& ranks, [[maybe_unused]] const Layer& layer,
                     [[maybe_unused]] const Matrix& x, [[maybe_unused]] Kept& kept) {
  lab::hole("forward_split");
}

Gradients backward_split([[maybe_unused]] Ranks& ranks, [[maybe_unused]] const Layer& layer,
                         [[maybe_unused]] const Kept& kept, [[maybe_unused]] const Matrix& dy) {
  lab::hole("backward_split");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, title, check, {forward, backward, forward_split, backward_split});
}
