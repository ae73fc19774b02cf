/// Inference of whole models at batch 1, as they are and with batch norms folded into convolutions: see models.cpp.

#include <chorus/nn/fold_batch_norm.hpp>

#include "../models.hpp"
#include "../operators/cases.hpp"
#include "image_models.hpp"

namespace {

using bench::D;
namespace nn = ch::nn;

template <bool folds, class Make>
Run infer(const Make& make, Index side) {
  using Net = ch::SingleDevice<decltype(make())>;
  const auto x = rnd<4>({1, 3, side, side}, 1);
  auto model = make();
  fill_parameters(model);
  model.eval();
  const auto net = std::make_shared<Net>(folds ? ch::nn::fold_batch_norm(model, x) : model);
  net->eval();
  return {[net, x] {
            const ch::NoGrad no_grad;
            (*net)(x);
          },
          [net, x](Sums& sums) {
            const ch::NoGrad no_grad;
            const auto y = (*net)(x);
            sums.push_back(checksum(y.value().data(), y.numel()));
          }};
}

template <class Make>
void add(const std::string& name, const Make& make, Index side) {
  Reg(name, [=] { return infer<false>(make, side); });
  Reg(name + "_folded", [=] { return infer<true>(make, side); });
}

const int all = [] {
  Reg("infer_toy_b1", [] { return infer<false>([] { return bench::Toy<D>{}; }, 32); });
  add(
      "infer_resnet18_b1_32", [] { return bench::ResNet18<D>{}; }, 32);
  add(
      "infer_resnet18_b1_224", [] { return nn::ResNet18<D>{}; }, 224);
  add(
      "infer_resnet50_b1_224", [] { return nn::ResNet50<D>{}; }, 224);
  add(
      "infer_mobilenetv2_b1_224", [] { return bench::MobileNetV2{}; }, 224);
  return 0;
}();

}  // namespace
