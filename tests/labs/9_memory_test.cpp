// Lab 9: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/9_memory/memory.hpp"
#include "labs.hpp"

namespace labs_test::memory {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/9_memory/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/9_memory.cpp"
#undef main
}  // namespace solution

using memory_lab::Layers, memory_lab::Value;

/// The inputs of all layers.
std::vector<Value> forward(Layers& layers, const Value& input) {
  std::vector<Value> inputs{input};
  for (int i = 0; i < layers.count(); ++i) inputs.push_back(layers.forward(i, inputs.back()));
  return inputs;
}
void keeps_all(Layers& layers, const Value& input, int) {
  auto inputs = forward(layers, input);
  Value dy = layers.loss(inputs.back());
  for (int i = layers.count(); i-- > 0;) dy = layers.backward(i, inputs[static_cast<std::size_t>(i)], dy);
}
/// The inputs of segments, and the gradient by the last output.
std::pair<std::vector<Value>, Value> of_segments(Layers& layers, const Value& input, int segment) {
  std::vector<Value> kept;
  Value x = input;
  for (int i = 0; i < layers.count(); ++i) {
    if (i % segment == 0) kept.push_back(x);
    x = layers.forward(i, x);
  }
  return {kept, layers.loss(x)};
}
/// Begins with the segment's input for each of its layers.
void again_and_again(Layers& layers, const Value& input, int segment) {
  auto [kept, dy] = of_segments(layers, input, segment);
  for (int i = layers.count(); i-- > 0;) {
    Value x = kept[static_cast<std::size_t>(i / segment)];
    for (int j = i / segment * segment; j < i; ++j) x = layers.forward(j, x);
    dy = layers.backward(i, x, dy);
    if (i % segment == 0) kept.pop_back();
  }
}
/// What it computes again stays to the end.
void lets_nothing_go(Layers& layers, const Value& input, int segment) {
  auto [kept, dy] = of_segments(layers, input, segment);
  std::vector<Value> all(static_cast<std::size_t>(layers.count()));
  for (int i = layers.count(); i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    if (!all[at]) {
      const int begin = i / segment * segment;
      all[static_cast<std::size_t>(begin)] = kept[static_cast<std::size_t>(i / segment)];
      for (int j = begin; j < i; ++j)
        all[static_cast<std::size_t>(j) + 1] = layers.forward(j, all[static_cast<std::size_t>(j)]);
    }
    dy = layers.backward(i, all[at], dy);
  }
}
/// Cuts the layers into whole segments only.
void whole_segments(Layers& layers, const Value& input, int segment) {
  auto [kept, dy] = of_segments(layers, input, segment);
  kept.resize(static_cast<std::size_t>(layers.count() / segment));
  for (int s = layers.count() / segment; s-- > 0; kept.pop_back()) {
    std::vector<Value> inputs{kept.back()};
    for (int i = 0; i + 1 < segment; ++i) inputs.push_back(layers.forward(s * segment + i, inputs.back()));
    for (int i = segment; i-- > 0; inputs.pop_back()) {
      // The last layers were left out: this is not the gradient that comes from them.
      dy = layers.backward(s * segment + i, inputs.back(), dy);
    }
  }
}
/// Gives a layer's output, not its input.
void by_output(Layers& layers, const Value& input, int) {
  const auto inputs = forward(layers, input);
  layers.backward(layers.count() - 1, inputs.back(), layers.loss(inputs.back()));
}
/// Each layer gets the gradient of the loss.
void same_gradient(Layers& layers, const Value& input, int) {
  const auto inputs = forward(layers, input);
  const Value dy = layers.loss(inputs.back());
  for (int i = layers.count(); i-- > 0;) layers.backward(i, inputs[static_cast<std::size_t>(i)], dy);
}
/// Stops at the first segment, whose input is at hand.
void not_the_first(Layers& layers, const Value& input, int segment) {
  auto [kept, dy] = of_segments(layers, input, segment);
  for (int end = layers.count(); kept.size() > 1; kept.pop_back()) {
    const int begin = (static_cast<int>(kept.size()) - 1) * segment;
    std::vector<Value> inputs{kept.back()};
    for (int i = begin; i + 1 < end; ++i) inputs.push_back(layers.forward(i, inputs.back()));
    for (int i = end; i-- > begin; inputs.pop_back()) dy = layers.backward(i, inputs.back(), dy);
    end = begin;
  }
}

TEST_CASE("lab 9: the solution passes, and wrong answers are told apart") {
  const auto right = solved("9_memory");
  const auto with = [](auto* step) { return judged(memory_lab::check, {step}); };
  check_empty("9_memory", right);
  check_solution(with(solution::step), right);
  check_guesses(with(solution::step), right,
                {{"optimizer", 1048576}, {"activations at most, checkpoints of 16 layers", 2 * 262144}});
  check_hole(with(given::step), right, "step");
  check_told_apart(
      right, {{"keeps all", with(keeps_all), "no layer is computed again"},
              {"again and again", with(again_and_again), "is computed 4 times"},
              {"lets nothing go", with(lets_nothing_go), "Which segments are they from?"},
              {"whole segments", with(whole_segments), "backward of layer 11: dy is not its gradient by its output"},
              {"by output", with(by_output), "backward of layer 15: x is not its input: it is that of layer 16"},
              {"the same gradient", with(same_gradient), "backward of layer 14: dy is not its gradient by its outp"},
              {"not the first segment", with(not_the_first), "layer 3 gets no gradient"}});
}

}  // namespace labs_test::memory
