// Random numbers of forward passes: other ones in each pass and for each sample, the same under every policy.
#include "policies.hpp"

#include <set>

namespace cases {
namespace {

template <class D>
struct Dropped : ch::nn::Module {
  ch::nn::Linear<D, double> a{3, 16}, b{16, 2};
  ch::nn::Dropout drop{0.5};
  CHORUS_MODULE(Dropped, a, drop, b)
  auto forward(const auto& x) const { return b(drop(ch::tanh(a(x)))); }
};

// pycox#155, mmsegmentation#2441, Monte Carlo dropout: the model evaluates, its dropout layers alone train.
const Add monte_carlo_dropout("monte_carlo_dropout", R"(
single: 20 of 20 different, the first one 0.252
dp:     20 of 20 different, the first one 0.252
ddp:    20 of 20 different, the first one 0.252
)",
                              [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto net = make(filled<Dropped<ch::Cpu>>());
    net->eval();
    net->module().drop.train();
    const ch::NoGrad no_grad;
    std::set<double> different;
    double first = 0;
    for (int pass = 0; pass < 20; ++pass) {
      const double y = ch::value_of((*net)(share.rows(6)))(0, 0);
      if (pass == 0) first = y;
      different.insert(y);
    }
    return std::to_string(different.size()) + " of 20 different, the first one " + rounded(first);
  });
});

template <class D>
struct Noisy : ch::nn::Module {
  ch::nn::Linear<D, double> fc{3, 1};
  bool by_initialiser = false;
  CHORUS_MODULE(Noisy, fc)
  auto forward(const auto& x) const {
    const auto y = fc(x) * 0;
    if (by_initialiser) return y + ch::nn::init::normal<double, D, 2>(ch::value_of(y).shape(), 0, 1);
    return y + ch::randn_like(y);
  }
};

// lingbot-vla-v2#41: noise that a model draws was the same on all ranks.
const Add noise("noise_in_forward", R"(
single: batch of 4 sums to -0.899, different 4; by an initialiser: refused
dp:     batch of 4 sums to -0.899, different 4; by an initialiser: refused
ddp:    batch of 4 sums to -0.899, different 4; by an initialiser: refused
)",
                [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    auto model = filled<Noisy<ch::Cpu>>();
    const auto net = make(std::move(model));
    double sums[5] = {};
    const auto y = ch::value_of((*net)(share.rows(4))).to_vector();
    for (std::size_t i = 0; i < y.size(); ++i) {
      sums[static_cast<std::size_t>(share.begin(4)) + i] = y[i];
      sums[4] += y[i];
    }
    net->sum(sums);
    net->module().by_initialiser = true;
    const bool refused = refusal([&] { (*net)(share.rows(4)); }).find("randn") != std::string::npos;
    return "batch of 4 sums to " + rounded(sums[4]) + ", different " +
           std::to_string(std::set<double>(sums, sums + 4).size()) + "; by an initialiser: " +
           (refused ? "refused" : "not refused");
  });
});

}  // namespace
}  // namespace cases
