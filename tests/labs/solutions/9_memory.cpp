/// Lab 9: a solution, in the place of the student's file.

#include "memory.hpp"

using namespace memory_lab;

void step(Layers& layers, const Value& input, int segment) {
  std::vector<Value> kept;  // the input of each segment
  Value x = input;
  for (int i = 0; i < layers.count(); ++i) {
    if (i % segment == 0) kept.push_back(x);
    x = layers.forward(i, x);
  }
  Value dy = layers.loss(x);
  x = {};
  for (int end = layers.count(); !kept.empty(); kept.pop_back()) {
    const int begin = (static_cast<int>(kept.size()) - 1) * segment;
    std::vector<Value> inputs{kept.back()};
    for (int i = begin; i + 1 < end; ++i) inputs.push_back(layers.forward(i, inputs.back()));
    for (int i = end; i-- > begin; inputs.pop_back()) dy = layers.backward(i, inputs.back(), dy);
    end = begin;
  }
}

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {.step = step}); }
