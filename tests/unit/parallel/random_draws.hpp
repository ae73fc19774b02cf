#pragma once
/// Shared by random tests of policies: the model, its random structure, and tolerances.

#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <map>
#include <optional>

#include "../random_draw.hpp"
#include "policies.hpp"

namespace test::random {

using namespace test::names;

using Draw = DrawFrom<7>;
using test::for_seeds, test::show_features;

/// The difference from `expected`, or "". Wide layers add up more numbers, so the tolerance grows with `width`. Some
/// programs amplify rounding errors: `nudged(way)` is the result of a run whose initial parameters differ in the last
/// digit, in a direction that depends on `way`.
template <class Nudged>
std::string difference(const std::vector<double>& got, const std::vector<double>& expected, Index width,
                       const Nudged& nudged) {
  const double off = distance(got, expected), limit = rounding * static_cast<double>(1 + width / 10);
  if (off < limit) return "";
  for (int way = 1; way <= 4 && off < 1e-5; ++way)
    if (off < 10 * distance(nudged(way), expected)) return "";
  if (got.size() != expected.size()) return cat(got.size(), " numbers, expected ", expected.size());
  std::size_t first = 0;
  while (std::abs(got[first] - expected[first]) < off / 2) ++first;
  return cat("off by ", off, ", at first in number ", first, ": ", got[first], ", expected ", expected[first]);
}
/// Changes the last digit of a net's parameters, unless `way` is 0.
template <class Net>
void nudge(Net& net, int way) {
  if (way == 0) return;
  for (const auto& named : net.parameters())
    for (Index i = 0; i < named.parameter->count(); ++i) {
      const auto digits = static_cast<double>((i * way + i / 3) % 3 - 1);
      static_cast<double*>(named.parameter->value_data())[i] *= 1 + 3e-16 * digits;
    }
}

inline const optim::SgdOptions sgd{.lr = 0.2, .momentum = 0.9, .weight_decay = 0.01};
inline const optim::AdamOptions adam{.lr = 0.05, .eps = 0.1, .amsgrad = true};  // eps keeps rounding errors small

/// Small, so that the scale changes often; powers of two, so that scaling is exact.
inline const optim::GradScalerOptions scaling{.init_scale = 16, .growth_interval = 2};

inline constexpr unsigned all_blocks = 0xff, backwards = 0x100;

/// A pass uses the blocks whose bits are set in `uses`, in ascending or descending order; and there is a second head.
template <class D>
struct Drawn : ch::nn::Module {
  std::optional<ch::nn::Conv2d<D, double>> conv;
  ch::nn::Linear<D, double> in, out, side{16, 2};
  ch::nn::ModuleList<ch::nn::Linear<D, double>> blocks;
  std::optional<ch::nn::SyncBatchNorm<D, double>> norm;
  ch::nn::Dropout drop;
  CHORUS_MODULE(Drawn, conv, in, blocks, out, side, norm, drop)

  Drawn(Index width, bool convolves, double dropped) : in{convolves ? 8 : 16, width}, out{width, 3}, drop{dropped} {
    if (convolves) conv.emplace(1, 2, ch::nn::Conv2dOptions{.kernel = 3});
  }
  auto forward(const auto& x, unsigned uses) const {
    const auto images = [&] { return ch::reshape(x, std::array<Index, 4>{x.size(0), 1, 4, 4}); };
    auto h = ch::tanh(conv ? in(ch::flatten(ch::tanh((*conv)(images())))) : in(x));
    if (norm) h = ch::flatten((*norm)(ch::reshape(h, std::array<Index, 3>{h.size(0), h.size(1), 1})));
    h = drop(h);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::size_t k = uses & backwards ? blocks.size() - 1 - i : i;
      if (uses >> k & 1) h = ch::tanh(blocks[k](h)) + h * 0.5;
    }
    return std::pair(out(h), side(x));
  }
};

/// Its structure: layers of `width` numbers; block i is the same as block blocks[i] <= i.
struct Structure {
  Index width = 1;
  std::vector<std::size_t> blocks;
  bool conv = false, norm = false;
  double dropped = 0;
  std::map<std::string, int> features;

  /// Counts a feature if it is `there`; returns `there`.
  bool feature(const std::string& name, bool there) {
    if (there) ++features[name];
    return there;
  }
  /// Up to five blocks; `shared` percent of them repeat an earlier one.
  void draw_blocks(Draw& d, std::uint32_t shared) {
    const auto count = d.below(6);
    for (std::uint32_t i = 0; i < count; ++i)
      blocks.push_back(feature("shared", i > 0 && d.chance(shared)) ? blocks[d.below(i)] : i);
  }
  Drawn<ch::Cpu> model(std::uint32_t key = 1) const {
    Drawn<ch::Cpu> model(width, conv, dropped);
    if (norm) model.norm.emplace(width);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      model.blocks.push_back(blocks[i] == i ? ch::nn::Linear<ch::Cpu, double>(width, width) : model.blocks[blocks[i]]);
    for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
      const auto values = numbers(1, named.parameter->count(), key++ * 100);
      for (Index i = 0; i < values.numel(); ++i)
        static_cast<double*>(named.parameter->value_data())[i] = 0.7 * values.data()[i];
    }
    return model;
  }
  std::string text() const {
    std::string out = ch::cat("width ", width, conv ? ", conv" : "", norm ? ", norm" : "", ", dropped ", dropped);
    out += ", blocks";
    for (const auto block : blocks) out += ch::cat(" ", block);
    return out;
  }
};

/// Freezes the parameters whose bits are set, except for the heads.
inline void freeze(ch::nn::Module& model, std::uint64_t frozen) {
  std::size_t i = 0;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) {
    const bool head = named.name.find("out.") != named.name.npos || named.name.find("side.") != named.name.npos;
    named.parameter->set_wants_grad(!(frozen >> i++ & 1) || head);
  }
}

}  // namespace test::random
