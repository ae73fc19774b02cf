/// Scattering, sorting, optimizer steps.
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>
#include <chorus/optim/adagrad.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/parallel/single_device.hpp>

#include "cases.hpp"
namespace {
Ten<2, L> distinct(Index rows, Index k, Index n) {  // k distinct positions in each row
  auto t = Ten<2, L>::empty({rows, k});
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < k; ++j) t.data()[i * k + j] = (j * (n / k) + (i * 7) % (n / k)) % n;
  return t;
}
struct Many : ch::nn::Module {
  using device_type = ch::Cpu;
  std::vector<ch::nn::Linear<ch::Cpu>> unused;
  std::vector<ch::Parameter<float, 1>> ps;
  explicit Many(int count, Index size) {
    for (int i = 0; i < count; ++i) ps.emplace_back(rnd<1>({size}, static_cast<std::uint32_t>(i)));
  }
  void visit(ch::nn::Visitor& v) override {
    for (std::size_t i = 0; i < ps.size(); ++i) v.parameter(std::to_string(i), ps[i]);
  }
};
template <class Opt>
Run optimizer(int count, Index size, typename Opt::options_type o, bool flat) {
  struct State {
    Many m;
    std::unique_ptr<ch::nn::FlatParameters<ch::Cpu>> flat;
    std::vector<ch::nn::NamedParameter<ch::Cpu>> params;
    std::unique_ptr<Opt> opt;
    State(int c, Index s) : m(c, s) {}
  };
  auto st = std::make_shared<State>(count, size);
  if (flat) {
    st->flat = std::make_unique<ch::nn::FlatParameters<ch::Cpu>>(st->m);
  }
  st->params = ch::nn::named_parameters<ch::Cpu>(st->m);
  for (int i = 0; i < count; ++i) {
    auto v = st->m.ps[static_cast<std::size_t>(i)].as_variable();
    (v * 1.0).backward(rnd<1>({size}, static_cast<std::uint32_t>(5000 + i)));
  }
  st->opt = std::make_unique<Opt>(st->params, o);
  Run r;
  r.step = [st] { st->opt->step(); };
  r.outputs = [st](Sums& s) {
    st->opt->step();
    st->opt->step();
    for (std::size_t i = 0; i < std::min<std::size_t>(3, st->m.ps.size()); ++i) {
      const auto v = st->m.ps[i].value();
      s.push_back(checksum(v.data(), v.numel()));
    }
  };
  return r;
}
Run clip(int count, Index size) {
  struct State {
    Many m;
    std::vector<ch::nn::NamedParameter<ch::Cpu>> params;
    State(int c, Index s) : m(c, s) {}
  };
  auto st = std::make_shared<State>(count, size);
  st->params = ch::nn::named_parameters<ch::Cpu>(st->m);
  for (int i = 0; i < count; ++i)
    (st->m.ps[static_cast<std::size_t>(i)].as_variable() * 1.0)
        .backward(rnd<1>({size}, static_cast<std::uint32_t>(5000 + i)));
  Run r;
  r.step = [st] { ch::optim::clip_grad_norm(st->params, 0.5); };
  r.outputs = [st](Sums& s) {
    const double n = ch::optim::clip_grad_norm(st->params, 0.5);
    s.push_back({n, n, n});
  };
  return r;
}
using C = ch::Cpu;
const bool registered = [] {
  Reg("scatter_add_4096x1000_k500", [] {
    const auto i = ints<2>({4096, 500}, 5, 1000);
    return op([i](const auto& x, const auto& s) { return ch::scatter_add(x, 1, i, s); }, var<2>({4096, 1000}, 1),
              var<2>({4096, 500}, 2));
  });
  Reg("scatter_4096x1000_k500", [] {
    const auto i = distinct(4096, 500, 1000);
    return op([i](const auto& x, const auto& s) { return ch::scatter(x, 1, i, s); }, var<2>({4096, 1000}, 1),
              var<2>({4096, 500}, 2));
  });
  Reg("sort_1024x1000", [] {
    return op([](const auto& x) { return ch::sort(x, 1).values; }, var<2>({1024, 1000}, 1));
  });
  Reg("sort_1M", [] { return op([](const auto& x) { return ch::sort(x, 0).values; }, var<1>({1000000}, 1)); });
  Reg("sort_axis0_1000x1024", [] {
    return op([](const auto& x) { return ch::sort(x, 0).values; }, var<2>({1000, 1024}, 1));
  });
  Reg("topk5_4096x1000", [] {
    return op([](const auto& x) { return ch::topk(x, 5, 1).values; }, var<2>({4096, 1000}, 1));
  });
  Reg("topk50_32x50257", [] {
    return op([](const auto& x) { return ch::topk(x, 50, 1).values; }, var<2>({32, 50257}, 1));
  });
  Reg("argsort_1024x1000", [] { return op([](const auto& x) { return ch::argsort(x, 1); }, rnd<2>({1024, 1000}, 1)); });
  Reg("sgd_mom_10M", [] { return optimizer<ch::optim::Sgd<C>>(1, 10000000, {.lr = 1e-4, .momentum = 0.9}, false); });
  Reg("adam_10M", [] { return optimizer<ch::optim::Adam<C>>(1, 10000000, {.lr = 1e-4}, false); });
  Reg("adamw_10M",
      [] { return optimizer<ch::optim::AdamW<C>>(1, 10000000, {.lr = 1e-4, .weight_decay = 0.01}, false); });
  Reg("rmsprop_10M", [] { return optimizer<ch::optim::RmsProp<C>>(1, 10000000, {.lr = 1e-4}, false); });
  Reg("adagrad_10M", [] { return optimizer<ch::optim::Adagrad<C>>(1, 10000000, {.lr = 1e-4}, false); });
  Reg("adam_2000x64", [] { return optimizer<ch::optim::Adam<C>>(2000, 64, {.lr = 1e-4}, false); });
  Reg("adam_2000x64_flat", [] { return optimizer<ch::optim::Adam<C>>(2000, 64, {.lr = 1e-4}, true); });
  Reg("sgd_2000x64", [] { return optimizer<ch::optim::Sgd<C>>(2000, 64, {.lr = 1e-4, .momentum = 0.9}, false); });
  Reg("clip_grad_norm_10M", [] { return clip(1, 10000000); });
  Reg("clip_grad_norm_2000x64", [] { return clip(2000, 64); });
  return true;
}();
}  // namespace
