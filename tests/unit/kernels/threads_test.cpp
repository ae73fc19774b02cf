// The same bits on any number of threads.
#include <catch.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/group_norm.hpp>
#include <chorus/kernels/indexing.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/kernels/reduction.hpp>
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

TEST_CASE("sums over rows, running sums and padding give the same bits on any number of threads") {
  for (const auto shape : {kernels::AxisShape{3, 131, 1500}, kernels::AxisShape{2000, 130, 1}}) {
    const Index count = shape.numel();
    const auto x = numbers<float>(count, 7), dy = numbers<float>(count, 8);
    check_same([&] {
      auto y = zeros(shape.reduced()), dx = zeros(count), sums = zeros(count), products = zeros(count);
      auto d_products = zeros(count), padded = zeros(2 * count);
      kernels::mean(Cpu{}, shape, x.data(), y.data());
      kernels::mean_backward(Cpu{}, shape, dy.data(), dx.data(), false);
      kernels::cumsum(Cpu{}, shape, x.data(), sums.data());
      kernels::cumprod(Cpu{}, shape, x.data(), products.data());
      kernels::cumprod_backward(Cpu{}, shape, x.data(), dy.data(), d_products.data(), false);
      kernels::pad_block(Cpu{}, {shape.outer, 2 * shape.axis, shape.inner}, 5, shape.axis, x.data(), padded.data());
      for (const auto* part : {&dx, &sums, &products, &d_products, &padded})
        y.insert(y.end(), part->begin(), part->end());
      return y;
    });
  }
}

TEST_CASE("parts of an axis are put together and taken apart the same way on any number of threads") {
  for (const auto whole : {kernels::AxisShape{1, 700, 300}, kernels::AxisShape{3, 50, 2000},
                           kernels::AxisShape{9000, 20, 1}}) {
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
