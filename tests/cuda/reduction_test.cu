// Reductions, softmax, losses over classes, normalisation and running sums.
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/kernels/softmax.hpp>
#include <chorus/kernels/sort.hpp>

#include "../unit/message_of.hpp"
#include "compare.hpp"

namespace reduction_test {

using namespace chorus;
using kernels::AxisShape;

const std::vector<AxisShape> shapes = {{3, 5, 1},  {4, 300, 1},  {1, 20'000, 1}, {300, 2, 1},  {3, 7, 2},
                                       {2, 5, 16}, {1, 900, 37}, {5, 2, 300},    {1, 5000, 3}, {2, 1, 5},
                                       {0, 5, 1},  {3, 5, 0},    {3, 0, 2}};

template <class T>
void reductions(const AxisShape& s, bool accumulate) {
  CAPTURE(s.outer, s.axis, s.inner, accumulate);
  const auto whole = numbers<T>(s.numel(), 1), results = numbers<T>(s.reduced(), 2);
  const auto forward = [&](auto device, T* x, T* a, T* b, T* c, T* d, T* e, Index* place) {
    kernels::sum(device, s, x, a, accumulate);
    if (s.axis == 0) return;
    kernels::mean(device, s, x, b, accumulate);
    kernels::amax(device, s, x, c);
    kernels::amin(device, s, x, d);
    kernels::var(device, s, x, e, 0);
    kernels::argmax(device, s, x, place);
  };
  compare(10 * near<T>, forward, whole, results, results, results, results, results,
          std::vector<Index>(results.size()));
  const auto backward = [&](auto device, T* x, T* y, T* dy, T* a, T* b, T* c, T* d) {
    kernels::sum_backward(device, s, static_cast<const T*>(dy), a, accumulate);
    if (s.axis == 0) return;
    kernels::mean_backward(device, s, static_cast<const T*>(dy), b, accumulate);
    kernels::amax(device, s, x, y);
    kernels::amax_backward(device, s, x, y, dy, c, accumulate);
    kernels::var_backward(device, s, x, dy, d, 0, accumulate);
  };
  auto ties = whole;
  for (std::size_t i = 0; i < ties.size(); i += 3) ties[i] = static_cast<T>(2);
  compare(10 * near<T>, backward, ties, results, results, whole, whole, whole, whole);
}

template <class T>
void softmaxes(const AxisShape& s, bool accumulate) {
  if (s.axis == 0) return;
  CAPTURE(s.outer, s.axis, s.inner, accumulate);
  auto x = numbers<T>(s.numel(), 1, -8, 8);
  if (x.size() > 2) x[1] = static_cast<T>(-std::numeric_limits<float>::infinity());
  const auto results = numbers<T>(s.reduced(), 2);
  const auto body = [&](auto device, T* in, T* dy, T* dr, T* a, T* b, T* c, T* da, T* db, T* dc) {
    kernels::softmax_forward(device, s, in, a);
    kernels::log_softmax_forward(device, s, in, b);
    kernels::logsumexp_forward(device, s, in, c);
    kernels::softmax_backward(device, s, a, dy, da, accumulate);
    kernels::log_softmax_backward(device, s, b, dy, db, accumulate);
    kernels::logsumexp_backward(device, s, in, c, dr, dc, accumulate);
  };
  compare(10 * near<T>, body, x, numbers<T>(s.numel(), 3), results, x, x, results, numbers<T>(s.numel(), 4),
          numbers<T>(s.numel(), 5), numbers<T>(s.numel(), 6));
}

template <class T>
void losses(Index batch, Index classes, Reduction reduction, double smoothing, bool accumulate) {
  CAPTURE(batch, classes, static_cast<int>(reduction), smoothing, accumulate);
  std::vector<std::int64_t> labels;
  for (Index i = 0; i < batch; ++i) labels.push_back(i % 5 == 3 ? -100 : (i * 7) % classes);
  const CrossEntropyOptions options{.label_smoothing = smoothing, .reduction = reduction};
  const NllLossOptions plain{.reduction = reduction};
  const Index count = reduction == Reduction::none ? batch : 1;
  const auto body = [&](auto device, T* x, std::int64_t* target, T* dloss, T* loss, T* lse, T* nll, T* dx, T* dn) {
    kernels::cross_entropy_forward(device, batch, classes, x, target, options, loss, lse);
    kernels::cross_entropy_backward(device, batch, classes, x, target, options, lse, dloss, dx, accumulate);
    kernels::nll_loss_forward(device, batch, classes, x, target, plain, nll);
    kernels::nll_loss_backward(device, batch, classes, target, plain, dloss, dn, accumulate);
  };
  compare(10 * near<T>, body, numbers<T>(batch * classes, 1), labels, numbers<T>(count, 2), numbers<T>(count, 3),
          numbers<T>(2 * batch, 4), numbers<T>(count, 5), numbers<T>(batch * classes, 6), numbers<T>(batch * classes, 7));
}

template <class T>
void batch_norms(const kernels::ChannelShape& s, bool affine, bool accumulate) {
  CAPTURE(s.batch, s.channels, s.inner, affine, accumulate);
  const auto x = numbers<T>(s.numel(), 1, 3, 5), per_channel = numbers<T>(s.channels, 2, 0.5, 1.5);
  const auto body = [&](auto device, T* in, T* dy, T* w, T* b, T* mean, T* var, T* y, T* saved, T* dx, T* dw, T* db,
                        T* eval, T* de) {
    if (!affine) w = b = nullptr;
    T *saved_mean = saved, *saved_invstd = saved + s.channels;
    kernels::batch_norm_forward_train(device, s, in, w, b, mean, var, 0.1, 1e-5, y, saved_mean, saved_invstd);
    kernels::batch_norm_backward_train(device, s, in, dy, w, b, saved_mean, saved_invstd, dx, dw, db,
                                       {accumulate, accumulate, accumulate});
    kernels::batch_norm_forward_eval(device, s, in, w, b, mean, var, 1e-5, eval);
    kernels::batch_norm_backward_eval(device, s, in, dy, w, mean, var, 1e-5, de, dw, static_cast<T*>(nullptr),
                                      {accumulate, accumulate, accumulate});
  };
  compare(1e-4, body, x, numbers<T>(s.numel(), 3), per_channel, per_channel, per_channel, per_channel, x,
          numbers<T>(2 * s.channels, 4), x, per_channel, per_channel, x, x);
}

template <class T>
void layer_norms(Index rows, Index columns, bool affine, bool accumulate) {
  CAPTURE(rows, columns, affine, accumulate);
  const Index count = rows * columns;
  const auto body = [&](auto device, T* x, T* dy, T* w, T* b, T* y, T* statistics, T* dx, T* dw, T* db) {
    if (!affine) w = b = nullptr;
    kernels::layer_norm_forward(device, rows, columns, x, w, b, 1e-5, y, statistics);
    kernels::layer_norm_backward(device, rows, columns, x, w, dy, statistics, dx, dw, db,
                                 {accumulate, accumulate, !accumulate});
  };
  compare(1e-4, body, numbers<T>(count, 1), numbers<T>(count, 2), numbers<T>(columns, 3), numbers<T>(columns, 4),
          numbers<T>(count, 5), numbers<T>(2 * rows, 6), numbers<T>(count, 7), numbers<T>(columns, 8),
          numbers<T>(columns, 9));
}

TEST_CASE("reductions and their gradients") {
  if (!gpu_present()) return;
  for (const auto& s : shapes)
    for (const bool accumulate : {false, true}) reductions<float>(s, accumulate);
  reductions<double>({2, 5, 16}, true);
  reductions<double>({4, 300, 1}, false);
}

TEST_CASE("a NaN is the extremum") {
  if (!gpu_present()) return;
  auto x = numbers<float>(600, 1);
  x[411] = x[77] = NAN;
  compare(
      0,
      [](auto device, float* in, float* high, float* low, Index* place) {
        kernels::amax(device, {2, 300, 1}, in, high);
        kernels::amin(device, {2, 300, 1}, in, low);
        kernels::argmax(device, {2, 300, 1}, in, place);
      },
      x, std::vector<float>(2), std::vector<float>(2), std::vector<Index>(2));
}

TEST_CASE("softmax, its logarithm, logsumexp") {
  if (!gpu_present()) return;
  for (const auto& s : shapes)
    for (const bool accumulate : {false, true}) softmaxes<float>(s, accumulate);
  softmaxes<double>({3, 7, 2}, false);
}

TEST_CASE("losses over classes") {
  if (!gpu_present()) return;
  for (const auto reduction : {Reduction::none, Reduction::mean, Reduction::sum})
    for (const double smoothing : {0.0, 0.3})
      for (const bool accumulate : {false, true}) {
        losses<float>(67, 10, reduction, smoothing, accumulate);
        losses<double>(3, 1000, reduction, smoothing, accumulate);
        losses<float>(0, 10, reduction, smoothing, accumulate);
      }
}

TEST_CASE("a bad label is an error at the next wait") {
  if (!gpu_present()) return;
  const auto x = Tensor<float, 1, Cuda>::ones({6}), loss = Tensor<float, 1, Cuda>::ones({1}),
             lse = Tensor<float, 1, Cuda>::ones({4});
  const auto labels = Tensor<std::int64_t, 1, Cuda>::from({0, 3}, {2});
  kernels::cross_entropy_forward(Cuda{}, 2, 3, x.data(), labels.data(), {}, loss.data(), lse.data());
  CHECK(message_of<UsageError>([&] { loss.item(); }) == "cross_entropy: label 3 at position 1 is not in [0, 3)");
}

TEST_CASE("batch norm") {
  if (!gpu_present()) return;
  for (const bool affine : {false, true})
    for (const bool accumulate : {false, true}) {
      batch_norms<float>({4, 3, 5}, affine, accumulate);
      batch_norms<float>({3, 6, 64}, affine, accumulate);
      batch_norms<float>({200, 70, 1}, affine, accumulate);
      batch_norms<double>({2, 2, 5000}, affine, accumulate);
    }
  const kernels::ChannelShape one{1, 3, 1};
  CHECK_THROWS_AS(batch_norms<float>(one, true, false), ShapeError);
}

TEST_CASE("batch norm with a residual through a ReLU") {
  if (!gpu_present()) return;
  for (const kernels::ChannelShape& s : {kernels::ChannelShape{4, 3, 5}, {3, 6, 64}, {200, 70, 1}}) {
    const auto x = numbers<float>(s.numel(), 1, 3, 5), residual = numbers<float>(s.numel(), 2, -1, 1);
    const auto per_channel = numbers<float>(s.channels, 3, 0.5, 1.5);
    for (const bool add : {false, true})
      compare(
          1e-4,
          [&](auto device, float* in, float* r, float* dy, float* w, float* mean, float* var, float* y, float* saved,
              float* masked, float* dx, float* dw, float* eval) {
            if (!add) r = nullptr;
            kernels::batch_norm_forward_train(device, s, in, w, w, mean, var, 0.1, 1e-5, y, saved, saved + s.channels,
                                              r, true);
            float* none = nullptr;
            kernels::batch_norm_backward_train(device, s, in, dy, w, w, saved, saved + s.channels, dx, dw, none, {}, y,
                                               masked);
            if (!add)
              kernels::batch_norm_backward_train(device, s, in, dy, w, w, saved, saved + s.channels, dx, dw, none,
                                                 {true, true, true}, y, none);
            kernels::batch_norm_backward_train(device, s, in, dy, w, w, saved, saved + s.channels, dx, dw, none,
                                               {true, true, true}, y, dy);
            kernels::batch_norm_forward_eval(device, s, in, w, w, mean, var, 1e-5, eval, r, true);
          },
          x, residual, numbers<float>(s.numel(), 4), per_channel, per_channel, per_channel, x,
          numbers<float>(2 * s.channels, 5), x, x, per_channel, x);
  }
}

TEST_CASE("layer norm") {
  if (!gpu_present()) return;
  for (const bool affine : {false, true})
    for (const bool accumulate : {false, true}) {
      layer_norms<float>(5, 7, affine, accumulate);
      layer_norms<float>(3, 1000, affine, accumulate);
      layer_norms<float>(3000, 20, affine, accumulate);
      layer_norms<double>(2, 33, affine, accumulate);
    }
}

TEST_CASE("running products, some through zero") {
  if (!gpu_present()) return;
  for (const AxisShape& s : {AxisShape{3, 5, 1}, AxisShape{2, 9, 4}, AxisShape{1, 1, 3}, AxisShape{2, 0, 3}})
    for (const bool accumulate : {false, true}) {
      auto x = numbers<float>(s.numel(), 1);
      for (std::size_t i = 0; i < x.size(); i += 7) x[i] = 0;
      const auto body = [&](auto device, float* in, float* dy, float* y, float* dx) {
        kernels::cumprod(device, s, in, y);
        kernels::cumprod_backward(device, s, in, dy, dx, accumulate);
      };
      compare(1e-5, body, x, numbers<float>(s.numel(), 2), numbers<float>(s.numel(), 3), numbers<float>(s.numel(), 4));
    }
}

TEST_CASE("order along an axis: ties keep theirs, NaN is largest") {
  if (!gpu_present()) return;
  for (const AxisShape& s : {AxisShape{3, 50, 1}, AxisShape{2, 9, 4}, AxisShape{0, 5, 1}})
    for (const bool descending : {false, true})
      for (const Index count : {Index{1}, Index{4}, s.axis}) {
        auto x = numbers<float>(s.numel(), 1);
        for (std::size_t i = 0; i < x.size(); i += 5) x[i] = i % 2 == 0 ? 1.0f : NAN;
        const auto body = [&](auto device, float* in, std::int64_t* index) {
          kernels::argsort(device, s, count, descending, static_cast<const float*>(in), index);
        };
        compare(0, body, x, std::vector<std::int64_t>(static_cast<std::size_t>(s.outer * count * s.inner), -1));
      }
}

TEST_CASE("running sums") {
  if (!gpu_present()) return;
  for (const auto& s : shapes)
    for (const bool reverse : {false, true})
      for (const bool accumulate : {false, true}) {
        CAPTURE(s.outer, s.axis, s.inner, reverse, accumulate);
        const auto body = [&](auto device, float* x, float* y) {
          kernels::cumsum(device, s, x, y, reverse, accumulate);
        };
        compare(1e-5, body, numbers<float>(s.numel(), 1), numbers<float>(s.numel(), 2));
      }
}

}  // namespace reduction_test
