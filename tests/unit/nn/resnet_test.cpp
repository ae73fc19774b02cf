#include <algorithm>
#include <catch.hpp>
#include <chorus/chorus.hpp>
#include <chorus/models.hpp>
#include <string>
#include <vector>

namespace resnet_test {

namespace ch = chorus;

template <class Model>
ch::Index parameters_of(Model& model) {
  ch::Index count = 0;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model)) count += named.parameter->count();
  return count;
}

// Names and shapes for comparison with torchvision, as "name [shape]".
template <class Model>
std::vector<std::string> names_of(Model& model) {
  std::vector<std::string> names;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model))
    names.push_back(ch::cat(named.name, " ", named.parameter->extents()));
  return names;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST_CASE("ResNet-18 has torchvision's parameters, in its order") {
  ch::nn::ResNet18<ch::Cpu> model;
  CHECK(parameters_of(model) == 11'689'512);
  const auto names = names_of(model);
  CHECK(names.size() == 62);
  CHECK(ch::nn::named_buffers<ch::Cpu>(model).size() == 60);
  const std::vector<std::string> first{"conv1.weight [64, 3, 7, 7]", "bn1.weight [64]", "bn1.bias [64]",
                                       "layer1.0.conv1.weight [64, 64, 3, 3]", "layer1.0.bn1.weight [64]"};
  CHECK(std::equal(first.begin(), first.end(), names.begin()));
  CHECK(contains(names, "layer2.0.conv1.weight [128, 64, 3, 3]"));
  CHECK(contains(names, "layer2.0.downsample.0.weight [128, 64, 1, 1]"));
  CHECK(contains(names, "layer2.0.downsample.1.bias [128]"));
  CHECK_FALSE(contains(names, "layer1.0.downsample.0.weight [64, 64, 1, 1]"));
  CHECK(names.back() == "fc.bias [1000]");
}

TEST_CASE("ResNet-50 has torchvision's parameters") {
  ch::nn::ResNet50<ch::Cpu> model;
  CHECK(parameters_of(model) == 25'557'032);
  const auto names = names_of(model);
  CHECK(names.size() == 161);
  CHECK(ch::nn::named_buffers<ch::Cpu>(model).size() == 159);
  CHECK(contains(names, "layer1.0.downsample.0.weight [256, 64, 1, 1]"));
  CHECK(contains(names, "layer4.2.conv3.weight [2048, 512, 1, 1]"));
  CHECK(contains(names, "fc.weight [1000, 2048]"));
}

TEST_CASE("the form for small images keeps their size up to the second stage, that for large ones takes any") {
  ch::nn::ResNet18<ch::Cpu> small({.classes = 10, .small_images = true}), large({.channels = 1, .classes = 7});
  CHECK(contains(names_of(small), "conv1.weight [64, 3, 3, 3]"));
  const ch::NoGrad no_grad;
  CHECK(small(ch::Tensor<float, 4>::ones({2, 3, 16, 16})).shape() == ch::Shape<2>{2, 10});
  CHECK(large(ch::Tensor<float, 4>::ones({2, 1, 80, 72})).shape() == ch::Shape<2>{2, 7});
}

}  // namespace resnet_test
