#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace tensor_test {

namespace ch = chorus;
using ch::Index;
using ch::Shape;
using Matrix = ch::Tensor<float, 2>;

/// 0, 1, 2, ...
template <std::size_t N>
ch::Tensor<float, static_cast<int>(N)> counting(const std::array<Index, N>& shape) {
  auto out = ch::Tensor<float, static_cast<int>(N)>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = static_cast<float>(i);
  return out;
}
std::vector<float> numbers(const auto& x) { return ch::contiguous(x).to_vector(); }

TEST_CASE("tensors are made dense, with what they are asked for") {
  CHECK(Matrix::zeros({2, 2}).to_vector() == std::vector<float>{0, 0, 0, 0});
  CHECK(Matrix::ones({1, 2}).to_vector() == std::vector<float>{1, 1});
  CHECK(Matrix::full({2, 1}, 7).to_vector() == std::vector<float>{7, 7});
  const auto x = Matrix::from({1, 2, 3, 4, 5, 6}, {2, 3});
  CHECK(x.strides() == Shape<2>{3, 1});
  CHECK(x(1, 2) == 6);
  CHECK(x.size(-1) == 3);
  CHECK(x.bytes() == 24);
  CHECK(Matrix().defined() == false);
  CHECK(ch::Tensor<bool, 1>::full({2}, true)(1));
  CHECK(Matrix::empty({3, 0}).to_vector().empty());
}

TEST_CASE("what is assigned to a part goes into the tensor's memory") {
  auto x = counting<2>({3, 3});
  const auto other = x;
  x[0] = ch::Tensor<float, 1>::from({10, 11, 12}, {3});
  x.slice(0, 1, 3).slice(1, 2, 3) = Matrix::full({2, 1}, 7);
  CHECK(other.to_vector() == std::vector<float>{10, 11, 12, 3, 4, 7, 6, 7, 7});
  x.transpose(0, 1)[0] = ch::Tensor<float, 1>::from({-1, -2, -3}, {3});
  CHECK(other.to_vector() == std::vector<float>{-1, 11, 12, -2, 4, 7, -3, 7, 7});
  x.select(1, 1) = 5;
  x.view(Shape<1>{9}).slice(0, 7, 9) = 0.5;
  x.permute({1, 0})[2] = ch::Tensor<float, 0>::full({}, 1);
  CHECK(other.to_vector() == std::vector<float>{-1, 5, 1, -2, 5, 1, -3, 0.5, 1});
  const auto& constant = x;
  constant[1] = constant[0];
  CHECK(numbers(x[1]) == std::vector<float>{-1, 5, 1});

  // Broadcasting, other types, chained assignments.
  x.slice(0, 0, 2) = ch::Tensor<float, 1>::from({1, 2, 3}, {3});
  CHECK(other.to_vector() == std::vector<float>{1, 2, 3, 1, 2, 3, -3, 0.5, 1});
  x[0] = x[1] = x[2];
  CHECK(numbers(x[0]) == std::vector<float>{-3, 0.5, 1});
  auto truth = ch::Tensor<bool, 2>::full({2, 2}, false);
  truth[1] = true;
  CHECK((!truth(0, 1) && truth(1, 0) && truth(1, 1)));
  auto words = ch::Tensor<std::int64_t, 2>::zeros({2, 2}, ch::Cpu{1});
  words.select(1, 0) = ch::Tensor<std::int64_t, 1>::from({3, 4}, {2});  // from another device
  CHECK(words.to_vector() == std::vector<std::int64_t>{3, 0, 4, 0});
  x.slice(0, 1, 1) = Matrix::zeros({0, 3});
}

TEST_CASE("a part that overlaps with what is assigned to it gets the numbers from before") {
  auto x = counting<1>({6});
  x.slice(0, 1, 6) = x.slice(0, 0, 5);
  CHECK(x.to_vector() == std::vector<float>{0, 0, 1, 2, 3, 4});
  x.slice(0, 0, 5) = x.slice(0, 1, 6);
  CHECK(x.to_vector() == std::vector<float>{0, 1, 2, 3, 4, 4});
  auto square = counting<2>({3, 3});
  square.slice(0, 0, 3) = square.transpose(0, 1);
  CHECK(square.to_vector() == std::vector<float>{0, 3, 6, 1, 4, 7, 2, 5, 8});
  square.slice(0, 0, 3) = square[0];
  CHECK(square.to_vector() == std::vector<float>{0, 3, 6, 0, 3, 6, 0, 3, 6});
  square[0] = square[0];
  CHECK(numbers(square[0]) == std::vector<float>{0, 3, 6});
}

TEST_CASE("a name stands for another tensor after an assignment, whose memory stays as it is") {
  auto x = counting<2>({2, 2});
  auto row = x[0];
  row = x[1];
  CHECK(x.to_vector() == std::vector<float>{0, 1, 2, 3});
  CHECK(row.data() == x[1].data());
  std::vector<Matrix> list(2, x);
  list[0] = Matrix::zeros({1, 1});
  std::swap(list[0], list[1]);
  CHECK(x.to_vector() == std::vector<float>{0, 1, 2, 3});
  CHECK(list[0].data() == x.data());
}

TEST_CASE("messages of assignments to parts") {
  auto x = counting<2>({2, 3});
  const auto said = [](const auto& f) { return message_of<ch::Error>(f); };
  CHECK(said([&] { x[0] = ch::Tensor<float, 1>::zeros({4}); }) ==
        "x[i] = y: expected y to broadcast to shape [3], got shape [4]");
  CHECK(said([&] { x[0] = ch::Tensor<float, 1>(); }) == "x[i] = y: operand 1 is undefined");
  CHECK(said([&] { Matrix() = x; }) == "x[i] = y: operand 0 is undefined");
  CHECK(said([&] {
          x[0].expand(Shape<2>{4, 3}) = x[0];
        }) == "x[i] = y: expected memory for each element, got an expanded tensor of shape [4, 3]");
  CHECK(said([&] { ch::clone(x) = x; }) ==
        "x[i] = y: the left side is a temporary of shape [2, 3]: expected a view of a named tensor, as x[i] or "
        "x.slice(...)");
  CHECK(said([&] { x[2] = x[0]; }) == "select: index 2 is not inside axis 0 of shape [2, 3]");
  CHECK(x.to_vector() == std::vector<float>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("a copy shares memory") {
  const auto x = Matrix::zeros({2, 2});
  const auto copy = x;
  copy(0, 1) = 5;
  CHECK(x(0, 1) == 5);
  CHECK(x.storage().owners() == 2);
}

TEST_CASE("slices, selections and permutations are views") {
  const auto x = counting<3>({2, 3, 4});
  CHECK(numbers(x.slice(1, 1, 3).slice(2, 0, 1)) == std::vector<float>{4, 8, 16, 20});
  CHECK(numbers(x.slice(-1, 2, 2)).empty());
  CHECK(numbers(x.select(1, 2)) == std::vector<float>{8, 9, 10, 11, 20, 21, 22, 23});
  CHECK(numbers(x[1][2]) == std::vector<float>{20, 21, 22, 23});
  CHECK(x.permute({2, 0, 1})(3, 1, 2) == x(1, 2, 3));
  CHECK(x.transpose(0, -1)(3, 2, 1) == x(1, 2, 3));
  x.transpose(0, 2)(1, 1, 1) = -1;
  CHECK(x(1, 1, 1) == -1);
}

TEST_CASE("dense memory can be seen in another shape") {
  const auto x = counting<2>({2, 6});
  CHECK(x.view(Shape<3>{2, -1, 3}).shape() == Shape<3>{2, 2, 3});
  CHECK(x.view(Shape<1>{-1}).data() == x.data());
  CHECK(x.slice(0, 1, 2).view(Shape<1>{6})(0) == 6);
  CHECK(counting<2>({1, 1}).view(Shape<0>{}).item() == 0);
  CHECK(Matrix::empty({0, 3}).view(Shape<2>{3, 0}).numel() == 0);
}

TEST_CASE("expanded axes repeat without memory") {
  const auto x = Matrix::from({1, 2}, {2, 1}).expand(Shape<3>{2, 2, 3});
  CHECK(x.strides() == Shape<3>{0, 1, 0});
  CHECK(numbers(x) == std::vector<float>{1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2});
}

TEST_CASE("contiguous copies only what is not dense") {
  const auto x = counting<2>({3, 4});
  CHECK(ch::contiguous(x).data() == x.data());
  CHECK(ch::contiguous(x.slice(0, 1, 2)).data() == x.data() + 4);
  CHECK(x.slice(1, 0, 1).slice(0, 0, 1).is_contiguous());
  CHECK_FALSE(x.transpose(0, 1).is_contiguous());
  CHECK(Matrix::empty({0, 4}).transpose(0, 1).is_contiguous());
  CHECK(ch::contiguous(x.transpose(0, 1)).to_vector() == std::vector<float>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11});
}

TEST_CASE("messages of tensors") {
  const auto x = counting<2>({2, 3});
  const auto shape_error = [](const auto& call) { return message_of<ch::ShapeError>(call); };
  CHECK(shape_error([] { Matrix::empty({2, -1}); }) == "Tensor: shape [2, -1] has a negative size");
  CHECK(shape_error([] {
          Matrix::from({1, 2, 3}, {2, 2});
        }) == "Tensor::from: expected 4 numbers for shape [2, 2], got 3");
  CHECK(shape_error([&] { x(2, 0); }) == "Tensor: index [2, 0] is outside of shape [2, 3]");
  CHECK(shape_error([&] { x(0, -1); }) == "Tensor: index [0, -1] is outside of shape [2, 3]");
  CHECK(shape_error([&] { x.item(); }) == "item: expected a tensor of one element, got shape [2, 3]");
  CHECK(message_of<ch::UsageError>([] { Matrix().item(); }) == "item: the tensor is undefined");
  const ch::Tensor<float, 0> none;
  CHECK(message_of<ch::UsageError>([&] { none.item(); }) == "item: the tensor is undefined");
  CHECK(message_of<ch::UsageError>([&] { none(); }) == "Tensor: an undefined tensor has no elements");
  CHECK(message_of<ch::UsageError>([&] { none.to_vector(); }) == "to_vector: the tensor is undefined");
  CHECK(shape_error([&] { x.size(2); }) == "size: axis 2 does not exist in a tensor of rank 2");
  CHECK(shape_error([&] { x.slice(1, 2, 1); }) == "slice: range [2, 1) is not inside axis 1 of shape [2, 3]");
  CHECK(shape_error([&] { x.slice(0, -1, 1); }) == "slice: range [-1, 1) is not inside axis 0 of shape [2, 3]");
  CHECK(shape_error([&] { x.select(0, 2); }) == "select: index 2 is not inside axis 0 of shape [2, 3]");
  CHECK(shape_error([&] { x.permute({1, 1}); }) == "permute: axes [1, 1] name an axis twice");
  CHECK(shape_error([&] { x.transpose(0, 1).view(Shape<1>{6}); }) ==
        "view: a tensor of shape [3, 2] and strides [1, 3] is not contiguous");
  CHECK(shape_error([&] { x.view(Shape<2>{-1, -1}); }) == "reshape: shape [2, 3] does not fit [-1, -1]");
  CHECK(shape_error([&] { x.view(Shape<2>{0, -1}); }) == "reshape: shape [2, 3] does not fit [0, -1]");
  CHECK(shape_error([&] { x.expand(Shape<2>{4, 3}); }) == "expand: shape [2, 3] does not expand to [4, 3]");
  CHECK(shape_error([&] { x.transpose(0, 1).to_vector(); }) ==
        "to_vector: a tensor of shape [3, 2] and strides [1, 3] is not contiguous");
  CHECK(shape_error([] {
          ch::broadcast_shapes("add", Shape<2>{2, 3}, Shape<1>{2});
        }) == "add: shapes [2, 3] and [2] do not broadcast");
}

}  // namespace tensor_test
