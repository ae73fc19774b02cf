// Copies and fills, ranges of axes, picking by index, random numbers, dropout, optimizer steps.
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cpu/copy.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/indexing.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/ops/embedding.hpp>

#include "compare.hpp"

namespace arrays_test {

using namespace chorus;
using kernels::AxisShape;

TEST_CASE("fill, convert, axpy, scale") {
  if (!gpu_present()) return;
  for (const Index count : {0, 1, 5, 1027})
    for (const Index offset : {0, 1}) {
      CAPTURE(count, offset);
      const auto body = [&](auto device, auto* x, auto* y, float* z, std::int64_t* whole) {
        using T = std::remove_pointer_t<decltype(x)>;
        kernels::fill(device, count, z + offset, 2.5f);
        kernels::axpy(device, count, static_cast<T>(1.5f), static_cast<const T*>(x + offset), y + offset);
        kernels::scale(device, count, static_cast<T>(0.75f), y + offset);
        kernels::convert(device, count, static_cast<const T*>(x + offset), whole + offset);
      };
      const auto z = numbers<float>(count + offset, 3);
      const std::vector<std::int64_t> whole(z.size());
      compare(near<float>, body, numbers<float>(count + offset, 1), numbers<float>(count + offset, 2), z, whole);
      compare(near<bf16>, body, numbers<bf16>(count + offset, 1), numbers<bf16>(count + offset, 2), z, whole);
    }
}

TEST_CASE("strided copies, and back") {
  if (!gpu_present()) return;
  struct View {
    Shape<3> shape, strides;
    Index extent;
  };
  for (const auto& [shape, strides, extent] : std::vector<View>{{{4, 5, 6}, {30, 6, 1}, 120},
                                                                {{4, 5, 6}, {1, 4, 20}, 120},
                                                                {{40, 33, 17}, {17, 680, 1}, 22'440},
                                                                {{4, 5, 6}, {60, 12, 2}, 240},
                                                                {{4, 5, 6}, {0, 6, 1}, 30},
                                                                {{7, 300, 6}, {6, 0, 1}, 42},
                                                                {{1, 1, 1}, {5, 7, 9}, 1},
                                                                {{4, 0, 6}, {0, 6, 1}, 30}}) {
    CAPTURE(shape, strides);
    const Index count = numel(shape);
    const bool repeats = strides[0] == 0 || strides[1] == 0;
    const auto body = [&, shape = shape, strides = strides](auto device, float* view, float* dense, float* target,
                                                            std::int32_t* ints, std::int32_t* other) {
      kernels::copy_strided<float>(device, shape, view, strides, dense);
      kernels::scatter_strided<float>(device, shape, dense, target, strides, true);
      if (!repeats) kernels::scatter_strided<float>(device, shape, dense, view, strides, false);
      kernels::copy_strided<std::int32_t>(device, shape, ints, strides, other);
    };
    compare(1e-4, body, numbers<float>(extent, 1), numbers<float>(count, 2), numbers<float>(extent, 3),
            numbers<std::int32_t>(extent, 4, 0, 1000), numbers<std::int32_t>(count, 5, 0, 1000));
  }
}

TEST_CASE("ranges of an axis") {
  if (!gpu_present()) return;
  const AxisShape whole{3, 7, 4};
  for (const bool accumulate : {false, true})
    compare(
        0,
        [&](auto device, float* x, float* block, float* from, float* to) {
          kernels::take_block(device, whole, 2, 3, static_cast<const float*>(x), block, accumulate);
          kernels::put_block(device, whole, 1, 3, static_cast<const float*>(from), to, accumulate);
        },
        numbers<float>(84, 1), numbers<float>(36, 2), numbers<float>(36, 3), numbers<float>(84, 4));
}

TEST_CASE("picking by index, and back") {
  if (!gpu_present()) return;
  for (const auto& [whole, count] : std::vector<std::pair<AxisShape, Index>>{
           {{1, 50, 20}, 2000}, {{3, 7, 4}, 9}, {{2, 5, 1}, 700}, {{1, 3, 600}, 5}, {{2, 5, 3}, 0}, {{2, 300, 3}, 5000},
           {{2, 2, 300}, 256}, {{2, 1, 3}, 257}, {{1, 2, 260}, 449}})
    for (const bool accumulate : {false, true}) {
      CAPTURE(whole.outer, whole.axis, whole.inner, count, accumulate);
      const Index picked = whole.outer * count * whole.inner;
      auto list = numbers<std::int64_t>(count, 1, 0, static_cast<double>(whole.axis));
      auto each = numbers<std::int64_t>(picked, 2, 0, static_cast<double>(whole.axis));
      const auto body = [&, &whole = whole, &count = count](auto device, std::int64_t* at, std::int64_t* places,
                                                            float* x, float* dy, float* a, float* b, float* da,
                                                            float* db) {
        kernels::index_select(device, whole, count, at, x, a);
        kernels::index_select_backward(device, whole, count, at, dy, da, accumulate);
        kernels::gather(device, whole, count, places, x, b);
        kernels::gather_backward(device, whole, count, places, dy, db, accumulate);
        kernels::scatter(device, whole, count, places, dy, x, true);
      };
      compare(1e-4, body, list, each, numbers<float>(whole.numel(), 3), numbers<float>(picked, 4),
              numbers<float>(picked, 5), numbers<float>(picked, 6), numbers<float>(whole.numel(), 7),
              numbers<float>(whole.numel(), 8));
    }
}

template <class D>
std::vector<float> padded_embedding_gradient(D device) {
  const Variable<float, 2, D> weight(Tensor<float, 2, D>::from(numbers<float>(20, 1), {5, 4}, device), true);
  const std::int64_t entries[] = {3, 1, 0, 3, 1, 1};
  const auto index = Tensor<std::int64_t, 2, D>::from(entries, {2, 3}, device);
  const auto dy = Tensor<float, 3, D>::from(numbers<float>(24, 2), {2, 3, 4}, device);
  embedding(weight, index, 1).backward(dy);
#ifndef __NVCC__
  CHECK(emulation::counters().waiting_copies == 0);
#endif
  return weight.grad().to_vector();
}

TEST_CASE("an embedding with an entry for nothing waits for no GPU") {
  if (!gpu_present()) return;
#ifndef __NVCC__
  emulation::counters().waiting_copies = 0;
#endif
  const auto gradient = padded_embedding_gradient(Cuda{});
  CHECK(error(gradient, padded_embedding_gradient(Cpu{})) <= 1e-6);
  CHECK(gradient[4] == 0);
  CHECK(gradient[0] != 0);
}

TEST_CASE("random numbers are the CPU's, uniform floats bit by bit") {
  if (!gpu_present()) return;
  for (const Index offset : {0, 1, 5, 1'000'003}) {
    CAPTURE(offset);
    compare(
        0, [&](auto device, float* x) { kernels::fill_uniform(device, 42, 7, offset, 1001, x, -0.25f, 0.75f); },
        std::vector<float>(1001));
    compare(
        1e-12,
        [&](auto device, double* x, double* y, float* z) {
          kernels::fill_uniform(device, 42, std::uint64_t{1} << 40, offset, 501, x, -0.25, 0.75);
          kernels::fill_normal(device, 42, 7, offset, 501, y, 1.0, 2.0);
          kernels::fill_uniform(device, 42, 7, offset, 0, z, 0.0f, 1.0f);
        },
        std::vector<double>(501), std::vector<double>(501), std::vector<float>(1));
  }
}

TEST_CASE("numbers of random operations are the CPU's, uniform floats and whole numbers bit by bit") {
  if (!gpu_present()) return;
  const RandomKey key{99, 3, 1, 17};
  for (const Index inner : {1, 4, 7, 1030}) {
    CAPTURE(inner);
    const auto size = static_cast<std::size_t>(5 * inner);
    compare(
        0,
        [&](auto device, float* x, std::int64_t* i, std::uint8_t* b) {
          kernels::draw_uniform(device, 5, inner, x, 0.99f, key);
          kernels::draw_integers(device, 5, inner, i, -3, std::uint64_t{1} << 63, key);
          kernels::draw_integers(device, 5, inner, b, 7, 10, key);
        },
        std::vector<float>(size), std::vector<std::int64_t>(size), std::vector<std::uint8_t>(size));
    compare(
        1e-12,
        [&](auto device, double* x, double* y) {
          kernels::draw_uniform(device, 5, inner, x, 1.0, key);
          kernels::draw_normal(device, 5, inner, y, key);
        },
        std::vector<double>(size), std::vector<double>(size));
  }
  compare(
      0, [](auto device, float* p, float* x) { kernels::is_below(device, 4, p, x); },
      std::vector<float>{0, 0.5f, 0.5f, 1}, std::vector<float>{0, 0.25f, 0.5f, 0.999f});
}

TEST_CASE("dropout has the CPU's mask") {
  if (!gpu_present()) return;
  for (const Index inner : {1, 4, 7, 1030})
    for (const double p : {0.0, 0.3, 1.0})
      for (const bool accumulate : {false, true}) {
        CAPTURE(inner, p, accumulate);
        const RandomKey key{99, 3, 1, 17};
        compare(
            1e-6,
            [&](auto device, float* x, float* y, float* dx) {
              kernels::dropout_forward(device, 5, inner, x, y, p, key);
              kernels::dropout_backward(device, 5, inner, x, dx, p, key, accumulate);
            },
            numbers<float>(5 * inner, 1), numbers<float>(5 * inner, 2), numbers<float>(5 * inner, 3));
      }
}

template <class T>
void steps(Index count) {
  CAPTURE(count);
  const auto state = numbers<T>(count, 3, 0.1, 1);
  const auto body = [&](auto device, const T* g, T* a, T* m, T* b, T* c, T* d, T* e, T* f, T* h, T* i, T* j, T* k) {
    for (const bool first : {true, false})
      kernels::sgd_step(device, count, a, g, m,
                        kernels::SgdScalars{.lr = 0.1,
                                            .momentum = 0.9,
                                            .dampening = 0.1,
                                            .weight_decay = 0.01,
                                            .nesterov = !first,
                                            .first_step = first});
    kernels::sgd_step(device, count, a, g, static_cast<T*>(nullptr), kernels::SgdScalars{.lr = 0.1});
    for (const bool decoupled : {true, false})
      kernels::adam_step(device, count, b, g, c, d, decoupled ? e : nullptr,
                         kernels::AdamScalars{.lr = 0.01, .weight_decay = 0.1, .decoupled = decoupled, .step = 7});
    kernels::rms_prop_step(device, count, f, g, h, i, kernels::RmsPropScalars{.lr = 0.01, .momentum = 0.9});
    kernels::adagrad_step(device, count, j, g, k, kernels::AdagradScalars{.lr = 0.01, .lr_decay = 0.1, .step = 3});
  };
  compare(10 * near<T>, body, numbers<T>(count, 1), numbers<T>(count, 2), state, state, state, state, state, state,
          state, state, state, state);
  compare(
      1e-5,
      [&](auto device, T* x, double* sum) {
        const double value = kernels::square_sum(device, count, static_cast<const T*>(x));
        copy_bytes(device, sum, Cpu{}, &value, sizeof value);
      },
      numbers<T>(count, 1), std::vector<double>(1));
}

TEST_CASE("optimizer steps") {
  if (!gpu_present()) return;
  for (const Index count : {0, 1, 1023, 100'003}) steps<float>(count);
  steps<double>(501);
}

TEST_CASE("an optimizer's scalars may lie in device memory") {
  if (!gpu_present()) return;
  using Scalars = kernels::cuda::Scalars<kernels::AdamScalars>;
  const kernels::AdamScalars scalars{.lr = 0.01, .step = 5};
  const Scalars::Replayed replayed{{.lr = 0.01}, 7};
  const Storage<Cuda> memory(Cuda{}, sizeof replayed);
  copy_bytes(Cuda{}, memory.data(), Cpu{}, &replayed, sizeof replayed);
  const auto left_out = Tensor<std::int64_t, 1, Cuda>::from({2}, {1});
  const auto unwanted = Tensor<std::int32_t, 1, Cuda>::from({0, 1}, {2});
  const auto start = numbers<float>(100, 1, 0.1, 1);
  const auto run = [&](const auto& s) {
    const auto p = Tensor<float, 1, Cuda>::from(start, {100}), g = Tensor<float, 1, Cuda>::from(start, {100}),
               m = Tensor<float, 1, Cuda>::from(start, {100}), v = Tensor<float, 1, Cuda>::from(start, {100});
    kernels::adam_step(Cuda{}, 100, p.data(), static_cast<const float*>(g.data()), m.data(), v.data(),
                       static_cast<float*>(nullptr), s);
    return p.to_vector();
  };
  const auto by_value = run(scalars);
  const auto* there = static_cast<const Scalars::Replayed*>(memory.data());
  CHECK(run(Scalars{{}, there, {unwanted.data(), left_out.data()}}) == by_value);
  CHECK(run(Scalars{{}, there, {}}) != by_value);
  CHECK(by_value != start);
  CHECK(run(Scalars{{}, there, {unwanted.data() + 1, left_out.data()}}) == start);
}

}  // namespace arrays_test
