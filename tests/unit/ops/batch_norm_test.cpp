#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/batch_norm.hpp>

#include "check_operator.hpp"

namespace batch_norm_test {

TEST_CASE("gradients of batch_norm in training") {
  const auto f = [](const auto& x, const auto& w, const auto& b) {
    return ch::batch_norm(x, w, b, Tensor<1>::zeros({3}), Tensor<1>::ones({3}), true);
  };
  const auto weight = numbers<1>({3}, 2), bias = numbers<1>({3}, 3);
  check_operator(f, numbers<2>({6, 3}, 1), weight, bias);
  check_operator(f, numbers<4>({2, 3, 2, 3}, 1), weight, bias);
}

TEST_CASE("gradients of batch_norm in evaluation") {
  const auto mean = numbers<1>({3}, 4), var = numbers<1>({3}, 5, 0.5, 2);
  check_operator([&](const auto& x, const auto& w, const auto& b) { return ch::batch_norm(x, w, b, mean, var, false); },
                 numbers<3>({4, 3, 5}, 1), numbers<1>({3}, 2), numbers<1>({3}, 3));
}

TEST_CASE("gradients of batch_norm_relu and batch_norm_add_relu") {
  const auto weight = numbers<1>({3}, 2), bias = numbers<1>({3}, 3);
  const auto mean = numbers<1>({3}, 4), var = numbers<1>({3}, 5, 0.5, 2);
  for (const bool training : {true, false}) {
    const auto f = [&](const auto& x, const auto& w, const auto& b) {
      return ch::batch_norm_relu(x, w, b, mean, var, training);
    };
    const auto g = [&](const auto& x, const auto& r, const auto& w, const auto& b) {
      return ch::batch_norm_add_relu(x, r, w, b, mean, var, training);
    };
    check_operator(f, numbers<2>({6, 3}, 1), weight, bias);
    check_operator(f, numbers<4>({2, 3, 2, 3}, 1), weight, bias);
    check_operator(g, numbers<2>({6, 3}, 1), numbers<2>({6, 3}, 7), weight, bias);
    check_operator(g, numbers<4>({2, 3, 3, 7}, 1), numbers<4>({2, 3, 3, 7}, 7), weight, bias);
  }
}

TEST_CASE("batch_norm_relu and batch_norm_add_relu are what they are made of") {
  for (const bool training : {true, false})
    for (const Shape<3>& shape : {Shape<3>{5, 4, 1}, {3, 2, 37}, {40, 3, 9}}) {
      const Index channels = shape[1];
      const auto run = [&](const auto& f) {
        const Variable<3> x(numbers(shape, 1), true), r(numbers(shape, 2), true);
        const Variable<1> w(numbers<1>({channels}, 3), true), b(numbers<1>({channels}, 4), true);
        const auto mean = Tensor<1>::zeros({channels}), var = Tensor<1>::ones({channels});
        const auto y = f(x * 1, r * 1, w, b, mean, var);  // gradients that are added to, and new ones
        (y + r).backward(numbers(shape, 5));
        return std::vector{values(y.value()), values(x.grad()), values(r.grad()), values(w.grad()),
                           values(b.grad()),  values(mean),     values(var)};
      };
      const auto close = [](const auto& a, const auto& b) {
        for (std::size_t i = 0; i < a.size(); ++i) CHECK(distance(a[i], b[i]) < 1e-14);
      };
      close(run([&](const auto& x, const auto&, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::batch_norm_relu(x, w, b, m, v, training);
            }),
            run([&](const auto& x, const auto&, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::relu(ch::batch_norm(x, w, b, m, v, training));
            }));
      close(run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::batch_norm_add_relu(x, r, w, b, m, v, training);
            }),
            run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::relu(ch::batch_norm(x, w, b, m, v, training) + r);
            }));
      close(run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::batch_norm_add_relu(x, r.value(), w, b, m, v, training);
            }),
            run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::relu(ch::batch_norm(x, w, b, m, v, training) + r.value());
            }));
      // The same value as input and residual; and only the residual needs a gradient.
      close(run([&](const auto& x, const auto&, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::batch_norm_add_relu(x, x, w, b, m, v, training);
            }),
            run([&](const auto& x, const auto&, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::relu(ch::batch_norm(x, w, b, m, v, training) + x);
            }));
      close(run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::batch_norm_add_relu(x.value(), r, w.value(), b.value(), m, v, training);
            }),
            run([&](const auto& x, const auto& r, const auto& w, const auto& b, const auto& m, const auto& v) {
              return ch::relu(ch::batch_norm(x.value(), w.value(), b.value(), m, v, training) + r);
            }));
    }
}

TEST_CASE("a gradient that others hold is not changed in its place") {
  const auto three = Tensor<1>::ones({3});
  for (const bool relu : {false, true}) {
    const Variable<2> x(numbers<2>({6, 3}, 1), true);
    const auto zeros = Tensor<1>::zeros({3});
    const auto y = relu ? ch::batch_norm_relu(x, three, zeros, three, three, true)
                        : ch::batch_norm(x, three, zeros, three, three, true);
    const auto seed = Tensor<2>::ones({6, 3});
    Tensor<2> seen;
    y.register_hook([&](const Tensor<2>& gradient) { seen = gradient; });
    y.backward(seed);
    CHECK(seed.to_vector() == std::vector<double>(18, 1.0));
    CHECK(seen.to_vector() == std::vector<double>(18, 1.0));
  }
}

TEST_CASE("a gradient that nobody else holds becomes that by batch_norm's input where it lies") {
  const auto three = Tensor<1>::ones({3});
  for (const bool relu : {false, true}) {
    const Variable<2> x(numbers<2>({6, 3}, 1), true);
    const auto zeros = Tensor<1>::zeros({3});
    const auto input = x * 2, y = relu ? ch::batch_norm_relu(input, three, zeros, three, three, true)
                                       : ch::batch_norm(input, three, zeros, three, three, true);
    const double *before = nullptr, *after = nullptr;
    input.register_hook([&](const Tensor<2>& gradient) { after = gradient.data(); });
    y.register_hook([&](const Tensor<2>& gradient) { before = gradient.data(); });
    (y * numbers<2>({6, 3}, 2)).backward(Tensor<2>::ones({6, 3}));
    CHECK(before != nullptr);
    CHECK(after == before);
  }
}

TEST_CASE("running statistics move towards the batch's") {
  const auto x = Tensor<2>::from({1, 3}, {2, 1});
  const auto mean = Tensor<1>::zeros({1}), var = Tensor<1>::ones({1});
  const Tensor<1> none;
  const auto y = ch::batch_norm(x, none, none, mean, var, true, {.eps = 0, .momentum = 0.25});
  CHECK(y.to_vector() == std::vector<double>{-1, 1});
  CHECK(mean.item() == 0.5);
  CHECK(var.item() == 0.75 + 0.25 * 2);
  ch::batch_norm(x, none, none, mean, var, false);
  CHECK(mean.item() == 0.5);
}

TEST_CASE("an empty batch leaves the statistics alone") {
  const Variable<2> x(Tensor<2>::empty({0, 2}), true);
  const Variable<1> w(Tensor<1>::ones({2}), true), b(Tensor<1>::ones({2}), true);
  const auto mean = Tensor<1>::full({2}, 3), var = Tensor<1>::full({2}, 4);
  const auto y = ch::batch_norm(x, w, b, mean, var, true);
  y.backward(Tensor<2>::empty({0, 2}));
  CHECK(mean.to_vector() == std::vector<double>{3, 3});
  CHECK(var.to_vector() == std::vector<double>{4, 4});
  CHECK(w.grad().to_vector() == std::vector<double>{0, 0});
  CHECK(b.grad().to_vector() == std::vector<double>{0, 0});
}

TEST_CASE("messages of batch_norm_add_relu") {
  const auto three = Tensor<1>::ones({3});
  CHECK(message_of<ch::ShapeError>([&] {
          ch::batch_norm_add_relu(Tensor<2>::ones({4, 3}), Tensor<2>::ones({4, 1}), three, three, three, three, true);
        }) == "batch_norm_add_relu: the residual has shape [4, 1], the input [4, 3]");
}

TEST_CASE("messages of batch_norm") {
  const auto x = Tensor<2>::ones({4, 3});
  const auto three = Tensor<1>::ones({3}), two = Tensor<1>::ones({2});
  const Tensor<1> none;
  const std::string expected = "batch_norm: an input of shape [4, 3] does not fit 2 channels";
  CHECK(message_of<ch::ShapeError>([&] { ch::batch_norm(x, two, three, three, three, true); }) == expected);
  CHECK(message_of<ch::ShapeError>([&] { ch::batch_norm(x, three, two, three, three, true); }) == expected);
  CHECK(message_of<ch::ShapeError>([&] { ch::batch_norm(x, three, three, two, three, true); }) == expected);
  CHECK(message_of<ch::ShapeError>([&] { ch::batch_norm(x, three, three, three, two, true); }) == expected);
  CHECK(message_of<ch::ShapeError>([&] {
          ch::batch_norm(Tensor<2>::ones({1, 3}), three, three, three, three, true);
        }) == "batch_norm: expected several values per channel, got [batch 1, channels 3, inner 1]");
  CHECK(message_of<ch::UsageError>([&] { ch::batch_norm(x, three, three, none, none, false); }) ==
        "batch_norm: evaluation needs running statistics, and they are undefined");
}

}  // namespace batch_norm_test
