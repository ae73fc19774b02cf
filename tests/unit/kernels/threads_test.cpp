// The same bits on any number of threads.
#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/group_norm.hpp>
#include <chorus/kernels/indexing.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <chorus/kernels/lstm.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/kernels/resample.hpp>
#include <chorus/kernels/softmax.hpp>

#include "reference.hpp"

namespace threads_test {

using namespace chorus;
using kernels::Trans;
using Floats = std::vector<float>;

Floats zeros(Index count) { return Floats(static_cast<std::size_t>(count)); }

/// Runs `f` on one, two and three threads and compares what it returns.
template <class F>
void check_same(const F& f) {
  const Floats alone = f();
  for (const int threads : {2, 3}) {
    set_num_threads(threads);
    const Floats shared = f();
    set_num_threads(1);
    CHECK(shared == alone);
  }
}

TEST_CASE("matrix products give the same bits on any number of threads") {
  for (const Trans ta : {Trans::no, Trans::yes})
    for (const Trans tb : {Trans::no, Trans::yes})
      for (const auto& [m, n, k] : {std::array<Index, 3>{301, 130, 300}, {70, 517, 203}, {1000, 40, 90}}) {
        const auto a = numbers<float>(m * k, 1), b = numbers<float>(k * n, 2), bias = numbers<float>(n, 3);
        check_same([&, m = m, n = n, k = k] {
          auto c = numbers<float>(m * n, 4);
          kernels::gemm(Cpu{}, ta, tb, m, n, k, a.data(), ta == Trans::no ? k : m, b.data(), tb == Trans::no ? n : k,
                        c.data(), n, true, bias.data());
          return c;
        });
      }
}

TEST_CASE("stacks of products and LSTMs give the same bits on any number of threads") {
  const auto a = numbers<float>(300 * 16 * 20, 1), b = numbers<float>(300 * 20 * 17, 2);
  for (const Index count : {2, 300})
    check_same([&] {
      auto c = zeros(300 * 16 * 17);
      kernels::gemm_stack(Cpu{}, {count, 16 * 20, 20 * 17, 16 * 17}, Trans::no, Trans::no, 16, 17, 20, a.data(), 20,
                          b.data(), 17, c.data(), 17, false);
      return c;
    });
  const Index rows = 40 * 128;
  const kernels::LstmSteps steps{3, 40, 128};
  const auto weight = numbers<float>(4 * 128 * 128, 3, -0.1, 0.1), input = numbers<float>(3 * 4 * rows, 4);
  const auto gradients = numbers<float>(4 * rows, 5);
  check_same([&] {
    auto gates = input, states = zeros(4 * rows), cells = zeros(4 * rows);
    kernels::lstm_forward(Cpu{}, steps, weight.data(), gates.data(), states.data(), cells.data(), true);
    auto dgates = zeros(3 * 4 * rows), dh = zeros(rows), dc = zeros(rows), dweight = zeros(4 * 128 * 128);
    kernels::lstm_backward(Cpu{}, steps, weight.data(), gates.data(), states.data(), cells.data(), gradients.data(),
                           dh.data(), dc.data(), dgates.data(), dweight.data(), false);
    for (const auto* more : {&gates, &cells, &dgates, &dh, &dc, &dweight})
      states.insert(states.end(), more->begin(), more->end());
    return states;
  });
}

TEST_CASE("normalisation and pooling give the same bits on any number of threads") {
  const kernels::ChannelShape shape{7, 49, 300};
  const Index count = 7 * 49 * 300;
  const auto x = numbers<float>(count, 5), dy = numbers<float>(count, 6);
  check_same([&] {
    auto y = zeros(count), mean = zeros(49), invstd = zeros(49), dx = zeros(count), dw = zeros(49), db = zeros(49);
    auto masked = zeros(count);
    kernels::batch_norm_forward_train<float>(Cpu{}, shape, x.data(), nullptr, nullptr, nullptr, nullptr, 0.1, 1e-5,
                                             y.data(), mean.data(), invstd.data(), dy.data(), true);
    kernels::batch_norm_backward_train<float>(Cpu{}, shape, x.data(), dy.data(), nullptr, nullptr, mean.data(),
                                              invstd.data(), dx.data(), dw.data(), db.data(), {}, y.data(),
                                              masked.data());
    for (const auto* part : {&mean, &invstd, &dx, &dw, &db, &masked}) y.insert(y.end(), part->begin(), part->end());
    return y;
  });
  check_same([&] {
    auto y = zeros(count), mean = zeros(49), invstd = zeros(49), dx = zeros(count), dw = zeros(49), db = zeros(49);
    kernels::batch_norm_forward_train<float>(Cpu{}, shape, x.data(), nullptr, nullptr, nullptr, nullptr, 0.1, 1e-5,
                                             y.data(), mean.data(), invstd.data());
    kernels::batch_norm_backward_train<float>(Cpu{}, shape, x.data(), dy.data(), nullptr, nullptr, mean.data(),
                                              invstd.data(), dx.data(), dw.data(), db.data(), {});
    for (const auto* part : {&mean, &invstd, &dx, &dw, &db}) y.insert(y.end(), part->begin(), part->end());
    return y;
  });
  check_same([&] {
    auto y = zeros(count), statistics = zeros(2 * 343), dx = zeros(count), dw = zeros(300), db = zeros(300);
    kernels::layer_norm_forward<float>(Cpu{}, 343, 300, x.data(), nullptr, nullptr, 1e-5, y.data(), statistics.data());
    kernels::layer_norm_backward<float>(Cpu{}, 343, 300, x.data(), nullptr, dy.data(), statistics.data(), dx.data(),
                                        dw.data(), db.data(), {});
    for (const auto* part : {&dx, &dw, &db}) y.insert(y.end(), part->begin(), part->end());
    return y;
  });
  check_same([&] {
    const kernels::GroupShape groups{.batch = 7, .groups = 7, .channels = 7, .inner = 300};
    auto y = zeros(count), statistics = zeros(2 * 49), dx = zeros(count), dw = zeros(49), db = zeros(49);
    kernels::group_norm_forward<float>(Cpu{}, groups, x.data(), x.data(), dy.data(), 1e-5, y.data(), statistics.data());
    kernels::group_norm_backward<float>(Cpu{}, groups, x.data(), x.data(), dy.data(), statistics.data(), dx.data(),
                                        dw.data(), db.data(), {false, false, false});
    for (const auto* part : {&dx, &dw, &db}) y.insert(y.end(), part->begin(), part->end());
    return y;
  });
  for (const Index window : {2, 3}) {
    kernels::Pool2dShape pool{343, 15, 20, window, window, 2, 2};
    pool.padding_h = pool.padding_w = window - 2;
    check_same([&] {
      auto y = zeros(pool.y_count()), dx = zeros(count);
      std::vector<std::int32_t> argmax(y.size());
      kernels::max_pool2d_forward(Cpu{}, pool, x.data(), y.data(), argmax.data());
      kernels::max_pool2d_backward(Cpu{}, pool, dy.data(), argmax.data(), dx.data(), false);
      y.insert(y.end(), dx.begin(), dx.end());
      return y;
    });
  }
}

TEST_CASE("an element-wise function that broadcasts gives the same bits on any number of threads") {
  const Index rows = 331, columns = 333;
  const auto x = numbers<float>(rows * columns, 11), row = numbers<float>(columns, 12);
  const std::array<Index, 2> shape{rows, columns}, dense{columns, 1}, repeated{0, 1};
  check_same([&] {
    auto y = zeros(rows * columns);
    kernels::pointwise_forward(Cpu{}, functors::Mul{}, std::span<const Index>(shape),
                               std::array<const float*, 2>{x.data(), row.data()},
                               std::array<std::span<const Index>, 2>{dense, repeated}, y.data());
    Floats expected = y;
    for (std::size_t i = 0; i < y.size(); ++i) expected[i] = x[i] * row[i % 333];
    CHECK(y == expected);
    return y;
  });
}

TEST_CASE("gradients of what was broadcast have the same bits on any number of threads, and are right") {
  using Sizes = std::array<Index, 3>;
  // Strides of what is summed: along axes outside of, inside of and around those that threads share.
  const Sizes shape{40, 30, 300};
  const Index count = 40 * 30 * 300;
  const auto x = numbers<float>(count, 11), dy = numbers<float>(count, 12);
  for (const Sizes strides : {Sizes{0, 300, 1}, Sizes{0, 1, 0}, Sizes{1, 0, 0}, Sizes{0, 0, 1}, Sizes{0, 0, 0},
                              Sizes{300, 0, 1}, Sizes{30, 1, 0}}) {
    const Index own = (strides[0] > 0 ? 40 : 1) * (strides[1] > 0 ? 30 : 1) * (strides[2] > 0 ? 300 : 1);
    const auto other = numbers<float>(own, 13);
    CAPTURE(strides[0], strides[1], strides[2]);
    check_same([&] {
      auto dx = zeros(count), d_other = zeros(own);
      const Sizes dense{9000, 300, 1};
      const std::array<std::span<const Index>, 2> both{dense, strides};
      kernels::pointwise_backward(Cpu{}, functors::Mul{}, std::span<const Index>(shape),
                                  std::array<const float*, 2>{x.data(), other.data()}, both, dy.data(),
                                  std::array<float*, 2>{dx.data(), d_other.data()}, both, {false, false});
      std::vector<double> expected(d_other.size());
      bool right = true;
      for (Index i = 0; i < count; ++i) {
        const auto from =
            static_cast<std::size_t>(i / 9000 * strides[0] + i / 300 % 30 * strides[1] + i % 300 * strides[2]);
        const auto at = static_cast<std::size_t>(i);
        right = right && dx[at] == dy[at] * other[from];
        expected[from] += static_cast<double>(dy[at]) * static_cast<double>(x[at]);
      }
      for (std::size_t i = 0; i < expected.size(); ++i)
        right = right && std::abs(expected[i] - static_cast<double>(d_other[i])) < 0.02;
      CHECK(right);
      dx.insert(dx.end(), d_other.begin(), d_other.end());
      return dx;
    });
  }
}

TEST_CASE("narrow numbers, resampling and some convolutions give the same bits on any number of threads") {
  const Index count = 300'000;
  const auto x = numbers<float>(count, 14);
  check_same([&] {
    std::vector<bf16> narrow(x.size()), sums(x.size()), gradients(x.size());
    kernels::convert(Cpu{}, count, x.data(), narrow.data());
    kernels::pointwise_forward(Cpu{}, functors::Mul{}, count, std::array<const bf16*, 2>{narrow.data(), narrow.data()},
                               sums.data());
    kernels::pointwise_backward(Cpu{}, functors::Square{}, count, std::array<const bf16*, 1>{narrow.data()},
                                sums.data(), std::array<bf16*, 1>{gradients.data()}, {false});
    auto y = zeros(count), dx = zeros(count);
    kernels::convert(Cpu{}, count, sums.data(), y.data());
    kernels::convert(Cpu{}, count, gradients.data(), dx.data());
    y.insert(y.end(), dx.begin(), dx.end());
    return y;
  });
  const std::vector<std::int32_t> begin{0, 2, 3, 6}, index{0, 1, 4, 2, 5, 9};
  const Floats weights{0.5f, 0.25f, 1, 2, -1, 0.125f};
  const kernels::AxisTaps<float> taps{10, 3, begin.data(), index.data(), weights.data()};
  check_same([&] {
    auto y = zeros(3000 * 9);
    kernels::resample(Cpu{}, 3000, taps, taps, x.data(), y.data(), false);
    return y;
  });
  const auto depthwise = [](Index stride) {
    return kernels::Conv2dShape{.batch = 3,
                                .in_channels = 20,
                                .height = 50,
                                .width = 60,
                                .out_channels = 20,
                                .kernel_h = 3,
                                .kernel_w = 3,
                                .stride_h = stride,
                                .stride_w = stride,
                                .padding_h = 1,
                                .padding_w = 1,
                                .groups = 20};
  };
  const kernels::Conv2dShape dilated{.batch = 2,
                                     .in_channels = 32,
                                     .height = 41,
                                     .width = 42,
                                     .out_channels = 32,
                                     .kernel_h = 3,
                                     .kernel_w = 3,
                                     .padding_h = 2,
                                     .padding_w = 2,
                                     .dilation_h = 2,
                                     .dilation_w = 2};
  for (const auto& s : {depthwise(1), depthwise(2), dilated}) {
    const auto weight = numbers<float>(s.weight_count(), 15), dy = numbers<float>(s.y_count(), 16);
    check_same([&] {
      auto y = zeros(s.y_count()), dx = zeros(s.x_count()), dw = zeros(s.weight_count());
      kernels::conv2d_forward<float>(Cpu{}, s, x.data(), weight.data(), nullptr, y.data());
      kernels::conv2d_backward_input(Cpu{}, s, weight.data(), dy.data(), dx.data(), false);
      kernels::conv2d_backward_weight(Cpu{}, s, x.data(), dy.data(), dw.data(), false);
      for (const auto* part : {&dx, &dw}) y.insert(y.end(), part->begin(), part->end());
      return y;
    });
  }
}

TEST_CASE("sums over rows, running sums, places, scaling and padding give the same bits on any number of threads") {
  for (const auto shape :
       {kernels::AxisShape{3, 131, 1500}, kernels::AxisShape{2000, 130, 1}, kernels::AxisShape{20000, 10, 1}}) {
    const Index count = shape.numel();
    const auto x = numbers<float>(count, 7), dy = numbers<float>(count, 8);
    check_same([&] {
      auto scaled = x;
      kernels::scale(Cpu{}, count, 0.3f, scaled.data());
      std::vector<Index> places(static_cast<std::size_t>(shape.reduced()));
      kernels::argmax(Cpu{}, shape, x.data(), places.data());
      auto y = zeros(shape.reduced()), dx = zeros(count), sums = zeros(count), products = zeros(count);
      auto d_products = zeros(count), padded = zeros(2 * count);
      kernels::mean(Cpu{}, shape, x.data(), y.data());
      kernels::mean_backward(Cpu{}, shape, dy.data(), dx.data(), false);
      kernels::cumsum(Cpu{}, shape, x.data(), sums.data());
      kernels::cumprod(Cpu{}, shape, x.data(), products.data());
      kernels::cumprod_backward(Cpu{}, shape, x.data(), dy.data(), d_products.data(), false);
      kernels::pad_block(Cpu{}, {shape.outer, 2 * shape.axis, shape.inner}, 5, shape.axis, x.data(), padded.data());
      for (const auto* part : {&dx, &sums, &products, &d_products, &padded, &scaled})
        y.insert(y.end(), part->begin(), part->end());
      for (const Index place : places) y.push_back(static_cast<float>(place));
      return y;
    });
  }
}

TEST_CASE("sums of one long row have the same bits on any number of threads") {
  const Index count = 1'000'003;
  const auto x = numbers<float>(count, 17);
  check_same([&] {
    auto y = zeros(3);
    kernels::sum(Cpu{}, {1, count, 1}, x.data(), y.data(), false);
    kernels::logsumexp_forward(Cpu{}, {1, count, 1}, x.data(), y.data() + 1);
    y[2] = static_cast<float>(kernels::square_sum(Cpu{}, count, x.data()));
    return y;
  });
}

TEST_CASE("parts of an axis are put together and taken apart the same way on any number of threads") {
  for (const auto whole :
       {kernels::AxisShape{1, 700, 300}, kernels::AxisShape{3, 50, 2000}, kernels::AxisShape{9000, 20, 1},
        kernels::AxisShape{9000, 10, 1}}) {
    const Index start = whole.axis / 5, part = whole.axis - start, count = whole.outer * part * whole.inner;
    const auto x = numbers<float>(count, 7), before = numbers<float>(count, 8);
    check_same([&] {
      auto y = zeros(whole.numel()), back = before;
      kernels::put_block(Cpu{}, whole, start, part, x.data(), y.data(), false);
      kernels::take_block(Cpu{}, whole, start, part, y.data(), back.data(), true);
      bool same = true;
      for (std::size_t i = 0; i < back.size(); ++i) same = same && back[i] == x[i] + before[i];
      CHECK(same);
      y.insert(y.end(), back.begin(), back.end());
      return y;
    });
  }
}

TEST_CASE("dropout, picking and cross entropy's gradients give the same bits on any number of threads") {
  const Index rows = 301, columns = 333, count = rows * columns;
  const auto x = numbers<float>(count, 9);
  for (const Index samples : {Index{1}, rows})
    check_same([&] {
      auto y = zeros(count);
      kernels::dropout_forward(Cpu{}, samples, count / samples, x.data(), y.data(), 0.3, {});
      return y;
    });
  std::vector<std::int64_t> index(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < index.size(); ++i) index[i] = static_cast<std::int64_t>(i * i % 301);
  check_same([&] {
    auto y = zeros(count), dx = zeros(count);
    kernels::gather(Cpu{}, {301, 333, 1}, 333, index.data(), x.data(), y.data());
    kernels::gather_backward(Cpu{}, {301, 333, 1}, 333, index.data(), x.data(), dx.data(), false);
    y.insert(y.end(), dx.begin(), dx.end());
    return y;
  });
  std::vector<std::int64_t> places(index.size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(i % 333 * 2 % 333);
  check_same([&] {
    auto y = zeros(count), sums = x;
    kernels::scatter(Cpu{}, {301, 333, 1}, 333, places.data(), x.data(), y.data(), false);
    kernels::scatter(Cpu{}, {301, 333, 1}, 333, index.data(), x.data(), sums.data(), true);
    y.insert(y.end(), sums.begin(), sums.end());
    return y;
  });
  for (const Index inner : {1, 9})
    check_same([&] {
      const kernels::AxisShape whole{301, 37, inner};
      auto y = zeros(301 * 300 * inner), dx = zeros(whole.numel());
      const auto dy = numbers<float>(301 * 300 * inner, 10);
      std::vector<std::int64_t> chosen(300);
      for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i] = static_cast<std::int64_t>(i % 37);
      kernels::index_select(Cpu{}, whole, 300, chosen.data(), x.data(), y.data());
      kernels::index_select_backward(Cpu{}, whole, 300, chosen.data(), dy.data(), dx.data(), false);
      y.insert(y.end(), dx.begin(), dx.end());
      return y;
    });
  check_same([&] {
    auto loss = zeros(1), log_sums = zeros(2 * rows), dx = zeros(count);
    const float one = 1;
    kernels::cross_entropy_forward<float>(Cpu{}, rows, columns, x.data(), index.data(), {}, loss.data(),
                                          log_sums.data());
    kernels::cross_entropy_backward<float>(Cpu{}, rows, columns, x.data(), index.data(), {}, log_sums.data(), &one,
                                           dx.data(), false);
    dx.push_back(loss[0]);
    return dx;
  });
  check_same([&] {
    const kernels::AxisShape images{7, 43, 333};
    auto loss = zeros(1), log_sums = zeros(images.reduced()), dx = zeros(count), y = zeros(count);
    std::vector<std::int64_t> classes(index);
    for (auto& label : classes) label %= 43;
    const float one = 1;
    kernels::image_cross_entropy_forward<float>(Cpu{}, images, x.data(), classes.data(), {}, loss.data(),
                                                log_sums.data());
    kernels::image_cross_entropy_backward<float>(Cpu{}, images, x.data(), classes.data(), {}, log_sums.data(), &one,
                                                 dx.data(), false);
    kernels::softmax_forward(Cpu{}, images, x.data(), y.data(), false);
    kernels::amax(Cpu{}, images, x.data(), log_sums.data());
    for (const auto* part : {&dx, &y, &log_sums}) loss.insert(loss.end(), part->begin(), part->end());
    return loss;
  });
}

}  // namespace threads_test
