/// Measurements of lab 9: memory by kind in a step of training, with and without checkpoints. SPOILERS: read this when
/// your lab is right.

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/chorus.hpp>

#include "memory.hpp"

namespace memory_lab {
namespace {

using ch::trace::Memory;

constexpr int layers = 16;
constexpr ch::Index width = 128, batch = 512;

/// 16 equal layers; each `segment` of them in a checkpoint, if it is not 0.
template <class D>
struct Net : ch::nn::Module {
  ch::nn::ModuleList<ch::nn::Linear<D>> fc;
  int segment, *computed;
  Net(int layers_of_checkpoint, int* layers_computed) : segment(layers_of_checkpoint), computed(layers_computed) {
    for (int i = 0; i < layers; ++i) fc.push_back(ch::nn::Linear<D>(width, width, {.bias = false}));
  }
  CHORUS_MODULE(Net, fc)

  ch::Variable<float, 2> layer(int i, const ch::Variable<float, 2>& x) const {
    ++*computed;
    return fc[static_cast<std::size_t>(i)](x);
  }
  ch::Variable<float, 2> forward(ch::Variable<float, 2> x) const {
    if (segment == 0)
      for (int i = 0; i < layers; ++i) x = layer(i, x);
    else
      for (int begin = 0; begin < layers; begin += segment)
        x = ch::checkpoint(
            [this, begin](const auto& in) {
              auto out = layer(begin, in);
              for (int i = begin + 1; i < begin + segment; ++i) out = layer(i, out);
              return out;
            },
            x);
    return x;
  }
};

/// Bytes on the device in a step, and the layers computed.
struct Holding {
  double parameters, gradients, optimizer, activations;
  int computed;
};
Holding train(int segment) {
  int computed = 0;
  ch::SingleDevice<Net<ch::Cpu>> net{Net<ch::Cpu>(segment, &computed)};
  ch::optim::Adam<ch::Cpu> optimizer{net.parameters(), {.lr = 0.01}};
  const auto held = [](Memory kind) { return static_cast<double>(ch::trace::memory(0, kind)); };
  double activations = 0;
  for (int step = 0; step < 2; ++step) {  // the first one makes gradients and state
    optimizer.zero_grad();
    auto& peaks = lab::Peaks::begin();
    computed = 0;
    {
      const auto inputs = ch::Tensor<float, 2>::zeros({batch, width});
      const auto loss = ch::sum(net(ch::Variable<float, 2>(inputs, true)));
      loss.backward();
    }
    activations = peaks.most(0, Memory::activations);
    lab::Peaks::end();
    optimizer.step();
  }
  return {held(Memory::parameters), held(Memory::gradients), held(Memory::optimizer), activations, computed};
}

/// The student's layers: y = x / 2 + layer + 1 for each number.
class Judged final : public Layers {
 public:
  static constexpr int device = 7;  // nothing else is counted there
  static constexpr std::size_t size = 64;
  const int n;
  std::vector<int> computed, passed;  // calls of forward and backward
  double values_at_end = 0;           // when backward reaches layer 0

  explicit Judged(int layers_in_a_row) : n(layers_in_a_row), computed(at(n)), passed(at(n)) {
    xs_.assign(1, std::vector<float>(size, 1));
    dys_.assign(at(n) + 1, std::vector<float>(size, 1));
    for (int i = 0; i < n; ++i) {
      xs_.push_back(xs_.back());
      for (auto& x : xs_.back()) x = x / 2 + static_cast<float>(i + 1);
    }
    for (std::size_t i = at(n); i-- > 0;)
      for (auto& dy : dys_[i]) dy = dys_[i + 1][0] / 2;
  }
  Value input() const { return made(xs_[0]); }

  int count() const override { return n; }
  Value forward(int layer, const Value& x) override {
    check_value("forward", "x", layer, x, xs_, layer, "input");
    ++computed[at(layer)];
    return made(xs_[at(layer) + 1]);
  }
  Value loss(const Value& y) override {
    check_value("loss", "y", n - 1, y, xs_, n, "output");
    return made(dys_[at(n)]);
  }
  Value backward(int layer, const Value& x, const Value& dy) override {
    check_value("backward", "x", layer, x, xs_, layer, "input");
    check_value("backward", "dy", layer, dy, dys_, layer + 1, "gradient by its output");
    ++passed[at(layer)];
    if (layer == 0) values_at_end = in_values(static_cast<double>(ch::trace::memory(device, Memory::activations)));
    return made(dys_[at(layer)]);
  }
  static double in_values(double bytes) { return bytes / (sizeof(float) * size); }

 private:
  using Rows = std::vector<std::vector<float>>;
  static std::size_t at(int layer) { return static_cast<std::size_t>(layer); }
  static Value made(const std::vector<float>& numbers) {
    Value value(device, Memory::activations, size);
    std::copy(numbers.begin(), numbers.end(), value.numbers().begin());
    return value;
  }
  void check_value(const char* call, const char* name, int layer, const Value& value, const Rows& rows, int right,
                   const char* what) const {
    ch::check<ch::UsageError>(layer >= 0 && layer < n, call, ": expected a layer in [0, ", n, "), got ", layer);
    ch::check<ch::UsageError>(bool(value), call, " of layer ", layer, ": ", name, " is null");
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& r) {
      return std::equal(r.begin(), r.end(), value.numbers().begin(), value.numbers().end());
    });
    if (row - rows.begin() == right) return;
    const bool inputs = &rows == &xs_;
    ch::fail<ch::UsageError>(
        call, " of layer ", layer, ": ", name, " is not its ", what,
        row == rows.end() ? std::string() : ch::cat(": it is that of layer ", row - rows.begin() - !inputs));
  }
  Rows xs_, dys_;  // the input of each layer and the last output; the gradients by them
};

/// Returns whether the code ended.
bool judge(lab::Lab& lab, const Code& code, int n, int segment) {
  const auto name = [&](const char* what) { return ch::cat(n, " layers, segments of ", segment, ": ", what); };
  Judged judged(n);
  auto& peaks = lab::Peaks::begin();
  const bool ran = lab.run(name("step"), [&] { code.step(judged, judged.input(), segment); });
  const double most = Judged::in_values(peaks.most(Judged::device, Memory::activations)),
               left = Judged::in_values(peaks.held(Judged::device, Memory::activations));
  lab::Peaks::end();
  if (!ran) return false;
  std::string why;
  for (int i = n; i-- > 0 && why.empty();)
    if (const int times = judged.passed[static_cast<std::size_t>(i)]; times != 1)
      why = times == 0 ? ch::cat("layer ", i, " gets no gradient")
                       : ch::cat("layer ", i, " adds to its gradient ", times, " times");
  lab.require(name("each layer gets its gradient once"), why.empty(), why);
  const auto [few, many] = std::minmax_element(judged.computed.begin(), judged.computed.end());
  lab.require(name("no layer is computed more than twice"), *many <= 2 && *few >= 1,
              ch::cat("layer ", (*few < 1 ? few : many) - judged.computed.begin(), " is computed ",
                      *few < 1 ? *few : *many, " times"));
  // The inputs of segments, those of one segment, its output, and the gradients on both sides of a layer.
  const int allowed = (n + segment - 1) / segment + segment + 2;
  why.clear();
  const bool too_late = judged.values_at_end > segment + 2;
  if (too_late && segment == 1)
    why = ch::cat("when backward reaches layer 0, ", judged.values_at_end, " values are in memory. Who reads them?");
  else if (too_late && *many == 1)
    why = ch::cat("no layer is computed again: ", most, " values are in memory at once, as without checkpoints");
  else if (too_late)
    why = ch::cat("when backward reaches layer 0, ", judged.values_at_end,
                  " values are in memory. Which segments are they from?");
  else if (most > allowed)
    why = ch::cat(most, " values are in memory at once. Which of them does anybody need?");
  else if (left > 0)
    why = ch::cat(left, " values are in memory after the step");
  lab.require(name("memory"), why.empty(), why);
  return true;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  for (const auto& [n, segment] : {std::pair(16, 4), std::pair(16, 1), std::pair(16, 16), std::pair(14, 4)})
    if (!judge(lab, code, n, segment)) break;

  const auto plain = train(0);
  const double value = 4.0 * batch * width;
  lab.compare("parameters", plain.parameters, 0, "How many numbers has a layer?");
  lab.compare("gradients", plain.gradients, 0, "Which numbers get one?");
  lab.compare("optimizer", plain.optimizer, 0.01 * plain.optimizer, "What does Adam keep of each number?");
  lab.compare("activations at most, no checkpoints", plain.activations, value,
              "What does the gradient of a layer's weight need? Which gradients are in memory at the same time?");
  int best = 0;
  double least = plain.activations;
  for (const int segment : {1, 2, 4, 8, 16}) {
    const auto holding = train(segment);
    if (holding.activations < least) least = holding.activations, best = segment;
    if (segment == 2 || segment == 8) continue;
    lab.compare(ch::cat("activations at most, checkpoints of ", segment, segment == 1 ? " layer" : " layers"),
                holding.activations, value, "Count the inputs of checkpoints, and what is computed again at one time.");
    if (segment == 4)
      lab.compare("layers computed in a step, checkpoints of 4 layers", holding.computed, 0,
                  "How often is each layer computed, and when?");
  }
  lab.compare("layers in a checkpoint that need the least memory", best, 0,
              "Compare the two counts, of checkpoints and of layers in one.");
}

}  // namespace memory_lab
