/// Lesson 16: placement types. Lesson 10 wrote tensor parallelism by hand: each rank has rows of fc2, columns of fc3.
/// Nothing kept it from forgetting a sum, or from taking it twice: the program runs, the loss falls, and the
/// gradient is wrong. Here a value's type says what ranks hold of it, and the compiler knows the rules:
///
///   a plain value             the same on all ranks, and its gradient, too
///   Copied<Axis>              the same on all ranks; its gradient is a term of a sum
///   Split<Axis, dim>          a part of axis `dim`
///   Partial<Axis>             a term of a sum that has not been taken
///
/// `copy` makes a Copied of a plain value; its backward is the sum of gradients. A product of Split columns by Split
/// rows is Partial, and `all_reduce` makes it plain. None of these compiles, and the error names the missing call:
///
///   linear(x, fc2.weight)                       copy<Axis>(x) is missing: x gets one rank's gradient
///   linear(columns, fc3.weight) + bias          all_reduce<Axis>(x) is missing: each rank would add the bias
///   relu(linear(columns, fc3.weight))           the same: relu of a term is no term of relu
///   all_reduce<Axis>(fc3(columns))              the sum was taken already
///   cross_entropy(linear(columns, ...), labels) the same: a loss wants the whole value

#include <chorus/nn/parallel_linear.hpp>
#include <chorus/nn/placed_parameters.hpp>
#include <chorus/parallel/tensor_parallel.hpp>

#include "toy.hpp"

using Axis = ch::axis::Tensor;
using ch::nn::SplitParameter;

/// Each rank has some of the rows of the weight, so some columns of the output.
struct ColumnLayer : ch::nn::Module {
  SplitParameter<Axis, 0, float, 2> weight;
  SplitParameter<Axis, 0, float, 1> bias;
  CHORUS_MODULE(ColumnLayer, weight, bias)

  explicit ColumnLayer(const ch::nn::Linear<ch::Cpu>& whole)
      : weight(value_of(whole.weight) * 1.0F), bias(value_of(whole.bias) * 1.0F) {}
  auto forward(const auto& x) const { return ch::linear(ch::copy<Axis>(x), weight, bias); }  // Split<Axis, -1>
};

/// Each rank has some of the columns of the weight: its product is Partial.
struct RowLayer : ch::nn::Module {
  SplitParameter<Axis, 1, float, 2> weight;
  ch::Parameter<float, 1> bias;  // whole, so it is added after the sum
  CHORUS_MODULE(RowLayer, weight, bias)

  explicit RowLayer(const ch::nn::Linear<ch::Cpu>& whole)
      : weight(value_of(whole.weight) * 1.0F), bias(value_of(whole.bias) * 1.0F) {}
  auto forward(const auto& columns) const { return ch::all_reduce<Axis>(ch::linear(columns, weight)) + bias; }
};

struct OwnMlp : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1;
  ColumnLayer fc2;
  RowLayer fc3;
  CHORUS_MODULE(OwnMlp, fc1, fc2, fc3)

  explicit OwnMlp(const Model& whole) : fc1(ch::nn::copy_of(whole).fc1), fc2(whole.fc2), fc3(whole.fc3) {}
  auto forward(const auto& images) const { return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(images)))))); }
};

struct LibrarysMlp : ch::nn::Module {  // for the comparison
  ch::nn::Linear<ch::Cpu> fc1;
  ch::nn::ColumnParallelLinear<ch::Cpu> fc2{64, 32};
  ch::nn::RowParallelLinear<ch::Cpu> fc3{32, 10};
  CHORUS_MODULE(LibrarysMlp, fc1, fc2, fc3)

  explicit LibrarysMlp(const Model& whole) : fc1(ch::nn::copy_of(whole).fc1) {
    const Model copy = ch::nn::copy_of(whole);
    fc2.weight = copy.fc2.weight, fc2.bias = copy.fc2.bias, fc3.weight = copy.fc3.weight, fc3.bias = copy.fc3.bias;
  }
  auto forward(const auto& images) const { return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(images)))))); }
};
using Policy = ch::TensorParallel<LibrarysMlp>;

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    Data data{run.seed()};  // every rank loads whole batches
    const Model whole;
    ch::TensorParallel<OwnMlp> own{OwnMlp{whole}, run, {.check_every = 0}};  // cuts the SplitParameters
    Policy net{LibrarysMlp{whole}, run};

    ch::optim::Sgd optimizer{own.parameters(), sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(own(images), labels);
        loss.backward();
        optimizer.step();
        mean.add(double{loss.item()}, static_cast<double>(labels.numel()));
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) print_sent("rank", 0, data);
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    train(data, net, policy_optimizer);
    return compare_parameters(run, Policy::name, ch::nn::named_parameters<ch::Cpu>(own.module()),
                              ch::nn::named_parameters<ch::Cpu>(net.module()), run.world_size() == 2 ? 0 : 1e-5);
  });
}
