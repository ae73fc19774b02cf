// What a program has of a model before a policy takes it goes on to stand for the same numbers.
#include "policies.hpp"

namespace cases {
namespace {

// allennlp#205, mt-dnn#40: an optimizer is made before the wrapper.
const Add optimizer_first("optimizer_first", R"(
single: moved by 0.150, a handle sees it: yes, the model too: yes
dp:     moved by 0.150, a handle sees it: yes, the model too: yes
ddp:    moved by 0.150, a handle sees it: yes, the model too: yes
)",
                          [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    auto model = filled<Line<ch::Cpu>>();
    const auto weight = model.fc.weight;
    const auto numbers = weight.value();
    const double before = numbers(0, 0);
    ch::optim::Adam optimizer{ch::nn::named_parameters<ch::Cpu>(model), {.lr = 0.05}};
    const auto net = make(model);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ch::mean(ch::square((*net)(share.rows(6)) - 5)).backward();
      optimizer.step();
    }
    const double after = net->module().fc.weight.value()(0, 0);
    return "moved by " + rounded(std::abs(after - before)) +
           ", a handle sees it: " + (numbers(0, 0) == after && weight.value()(0, 0) == after ? "yes" : "no") +
           ", the model too: " + (model.fc.weight.value()(0, 0) == after ? "yes" : "no");
  });
});

// A handle that was kept freezes its parameter under every policy.
const Add frozen_by_a_handle("frozen_by_a_handle", R"(
single: weight moved: no, bias: yes
dp:     weight moved: no, bias: yes
ddp:    weight moved: no, bias: yes
)",
                             [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    auto model = filled<Line<ch::Cpu>>();
    const auto weight = model.fc.weight;
    const auto net = make(std::move(model));
    weight.set_requires_grad(false);
    const double w = weight.value()(0, 0), b = net->module().fc.bias.value()(0);
    ch::optim::Sgd optimizer{net->parameters(), {.lr = 0.1}};
    ch::mean(ch::square((*net)(share.rows(6)) - 5)).backward();
    optimizer.step();
    return std::string("weight moved: ") + (weight.value()(0, 0) == w ? "no" : "yes") +
           ", bias: " + (net->module().fc.bias.value()(0) == b ? "no" : "yes");
  });
});

// pytorch#43282, gradient surgery, SAM: a gradient that is kept stays what it was.
const Add held_gradient("held_gradient", R"(
single: kept 1.000, new -3.000
dp:     kept 1.000, new -3.000
ddp:    kept 2.000, new -6.000
)",
                        [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share&) {
    const auto net = make(filled<Line<ch::Cpu>>());
    ch::optim::Sgd optimizer{net->parameters()};
    const auto x = ch::Tensor<double, 2>::full({2, 3}, 0.5);
    ch::sum((*net)(x)).backward();
    const auto kept = net->module().fc.weight.grad();
    optimizer.zero_grad();
    (ch::sum((*net)(x)) * -3).backward();
    return "kept " + rounded(kept(0, 0)) + ", new " + rounded(net->module().fc.weight.grad()(0, 0));
  });
});

// npfl122#81, moco#141: a target network's numbers are written through pointers.
const Add written_through_pointers("written_through_pointers", R"(
single: 3.000 6.000 6.000
dp:     3.000 6.000 6.000
ddp:    3.000 6.000 6.000
)",
                                   [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share&) {
    const auto net = make(filled<Line<ch::Cpu>>());
    const auto fill = [&](double value) {
      for (const auto& named : net->parameters())
        for (ch::Index i = 0; i < named.parameter->count(); ++i)
          static_cast<double*>(named.parameter->value_data())[i] = named.name == "fc.bias" ? 0 : value;
    };
    const ch::NoGrad no_grad;
    const auto last = [&] { return ch::value_of((*net)(ch::Tensor<double, 2>::ones({4, 3})))(3, 1); };
    fill(1);
    std::string text = rounded(last());
    double* const pointer = net->module().fc.weight.value().data();
    for (int i = 0; i < 6; ++i) pointer[i] *= 2;
    text += " " + rounded(last());
    return text + " " + rounded(last());
  });
});

}  // namespace
}  // namespace cases
