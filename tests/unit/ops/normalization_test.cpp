#include <chorus/ops/normalization.hpp>

#include "check_operator.hpp"

namespace normalization_test {

TEST_CASE("gradients of layer_norm") {
  const auto f = [](const auto& x, const auto& w, const auto& b) { return ch::layer_norm(x, w, b); };
  check_operator(f, numbers<2>({3, 21}, 1), numbers<1>({21}, 2), numbers<1>({21}, 3));
  check_operator(f, numbers<3>({2, 3, 4}, 1), numbers<2>({3, 4}, 2), numbers<2>({3, 4}, 3));
  check_operator([](const auto& x) { return ch::layer_norm(x, Tensor<1>(), Tensor<1>()); }, numbers<2>({3, 5}, 4));
}

TEST_CASE("gradients of group_norm and rms_norm") {
  const auto group = [](const auto& x, const auto& w, const auto& b) { return ch::group_norm(x, 2, w, b); };
  check_operator(group, numbers<4>({2, 4, 2, 3}, 1), numbers<1>({4}, 2), numbers<1>({4}, 3));
  check_operator(group, numbers<4>({2, 4, 3, 7}, 1), numbers<1>({4}, 2), numbers<1>({4}, 3));
  check_operator(group, numbers<2>({3, 6}, 1), numbers<1>({6}, 2), numbers<1>({6}, 3));
  check_operator([](const auto& x, const auto& w) { return ch::rms_norm(x, w); }, numbers<3>({2, 3, 5}, 1),
                 numbers<1>({5}, 2));
}

TEST_CASE("a row of equal numbers becomes the bias") {
  const auto y = ch::layer_norm(Tensor<2>::full({2, 3}, 1e6), Tensor<1>::ones({3}), Tensor<1>::full({3}, 7));
  CHECK(y.to_vector() == std::vector<double>(6, 7));
}

TEST_CASE("normalisation of an empty batch") {
  const Variable<2> x(Tensor<2>::empty({0, 4}), true);
  const Variable<3> images(Tensor<3>::empty({0, 4, 20}), true);
  const Variable<1> w(Tensor<1>::ones({4}), true), b(Tensor<1>::ones({4}), true);
  for (const auto& y : {ch::layer_norm(x, w, b), ch::group_norm(x, 2, w, b), ch::rms_norm(x, w)}) {
    CHECK(y.shape() == Shape<2>{0, 4});
    y.backward(Tensor<2>::empty({0, 4}));
  }
  ch::group_norm(images, 2, w, b).backward(images.value());
  CHECK(w.grad().to_vector() == std::vector<double>(4, 0));
  CHECK(b.grad().to_vector() == std::vector<double>(4, 0));
}

TEST_CASE("group_norm and instance_norm of one number are refused") {
  const Tensor<1> none;
  const auto points = numbers<4>({4, 3, 1, 1}, 1), point = numbers<4>({1, 3, 1, 1}, 1);
  CHECK(message_of<ch::ShapeError>([&] { ch::instance_norm(points, none, none); }) ==
        "instance_norm: expected more than one value to normalise, got one for each sample and channel of an input of "
        "shape [4, 3, 1, 1]");
  CHECK_THROWS_AS(ch::instance_norm(point, none, none), ch::ShapeError);
  CHECK_THROWS_AS(ch::group_norm(point, 3, none, none), ch::ShapeError);
  CHECK_THROWS_AS(ch::group_norm(points, 3, none, none), ch::ShapeError);
  CHECK_THROWS_AS(ch::group_norm(numbers<2>({4, 3}, 1), 3, none, none), ch::ShapeError);
  CHECK(std::isfinite(ch::group_norm(points, 1, none, none)(0, 0, 0, 0)));
}

TEST_CASE("a variance that overflows makes NaN, not zeros") {
  CHECK(std::isnan(ch::layer_norm(Tensor<1>::from({1e200, -1e200}, {2}), Tensor<1>(), Tensor<1>())(0)));
}

TEST_CASE("messages of normalisation") {
  const auto x = Tensor<2>::ones({2, 6});
  const auto four = Tensor<1>::ones({4}), six = Tensor<1>::ones({6});
  CHECK(message_of<ch::ShapeError>([&] { ch::layer_norm(x, six, four); }) ==
        "layer_norm: an input of shape [2, 6] does not fit a weight of shape [6] and a bias of shape [4]");
  CHECK(message_of<ch::ShapeError>([&] { ch::group_norm(x, 4, six, six); }) ==
        "group_norm: 4 groups do not divide the channels of shape [2, 6]");
  CHECK(message_of<ch::ShapeError>([&] { ch::group_norm(x, 2, four, six); }) ==
        "group_norm: an input of shape [2, 6] does not fit a weight of 4 and a bias of 6 channels");
  const auto elsewhere = Tensor<1>::ones({6}, ch::Cpu{1});
  CHECK(message_of<ch::DeviceError>([&] {
          ch::group_norm(Tensor<3>::ones({2, 6, 20}), 2, six, elsewhere);
        }) == "group_norm: weight and bias are on cpu:0 and cpu:1, the input on cpu:0");
  CHECK(message_of<ch::ShapeError>([&] { ch::rms_norm(x, four); }) ==
        "rms_norm: an input of shape [2, 6] does not fit a weight of 4 features");
}

}  // namespace normalization_test
