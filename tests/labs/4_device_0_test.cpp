// Lab 4: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/4_device_0/device_0.hpp"
#include "labs.hpp"

namespace labs_test::device_0 {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/4_device_0/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/4_device_0.cpp"
#undef main
}  // namespace solution

using device_0_lab::Inputs, device_0_lab::Labels, device_0_lab::Layer, device_0_lab::Loss;

/// Keeps a second copy of the logits.
Loss wasteful(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  const auto logits = fc(inputs);
  return ch::cross_entropy(logits + ch::relu(ch::tanh(logits)) * 0.0f, labels);
}
/// The given program without its hole.
Loss without_labels(const Layer& fc, const Inputs& inputs, const Labels&) { return ch::mean(fc(inputs)); }
Loss sum(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return ch::cross_entropy(fc(inputs), labels, {.mean_over = 1.0});
}
/// A mean over the samples of all devices.
Loss of_whole_batch(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return ch::cross_entropy(fc(inputs), labels, {.mean_over = 128.0});
}
/// Cross entropy takes logits, and not probabilities.
Loss of_probabilities(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return ch::cross_entropy(ch::softmax(fc(inputs), 1), labels);
}
/// A loss without a graph.
Loss without_gradient(const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return Loss(ch::cross_entropy(fc(inputs), labels).value());
}

TEST_CASE("lab 4: the solution passes, and wrong answers are told apart") {
  const auto right = solved("4_device_0");
  const auto with = [](auto* forward) { return judged(device_0_lab::check, {forward}); };
  check_empty("4_device_0", right);
  check_solution(with(solution::forward), right);
  check_guesses(with(solution::forward), right,
                {{"loss outside, device 0: activations, most", 128 * 8192 * 4},
                 {"loss inside, device 1: optimizer", 8192 * 256 * 4}});
  check_hole(with(given::forward), right, "forward");
  check_told_apart(right, {{"wasteful", with(wasteful), "at most it holds 10486592 bytes"},
                           {"without labels", with(without_labels), "That is the mean of the logits"},
                           {"sum", with(sum), "That is the sum over its samples"},
                           {"of the whole batch", with(of_whole_batch), "That divides by the batch of all devices"},
                           {"of probabilities", with(of_probabilities), "It is the mean of the cross entropy"},
                           {"without gradient", with(without_gradient), "backward"}});
}

}  // namespace labs_test::device_0
