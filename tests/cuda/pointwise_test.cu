// Element-wise functors: forward and back, dense, of any alignment and length, and broadcast.
#include <chorus/kernels/cpu/pointwise.hpp>
#include <chorus/kernels/pointwise.hpp>

#include "compare.hpp"

namespace pointwise_test {

using namespace chorus;

// What a user writes: functions without a namespace.
struct SwiGlu {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / (1 + exp(-a)) * where(b < 0, 0.5 * b, b);
  }
};

template <class T, std::size_t N>
void dense(const auto& f, Index count, Index offset, std::array<bool, N> accumulate) {
  const auto arrays = [&](std::uint64_t seed) { return numbers<T>(count + offset, seed, 0.05, 1.5); };
  const auto body = [&](auto device, T* a, T* b, T* dy, T* y, T* da, T* db) {
    std::array<const T*, N> in{a + offset};
    std::array<T*, N> dx{da + offset};
    if constexpr (N == 2) {
      in[1] = b + offset;
      dx[1] = db + offset;
    }
    kernels::pointwise_forward(device, f, count, in, y + offset);
    kernels::pointwise_backward(device, f, count, in, static_cast<const T*>(dy + offset), dx, accumulate);
  };
  CAPTURE(count, offset);
  compare(near<T>, body, arrays(1), arrays(2), arrays(3), arrays(4), arrays(5), arrays(6));
}

using Strides = std::vector<Index>;

template <class T>
void broadcast(const Shape<3>& shape, const Strides& a_strides, const Strides& b_strides, Index a_count, Index b_count,
               bool accumulate) {
  const auto body = [&](auto device, T* a, T* b, T* dy, T* y, T* da, T* db) {
    const std::array<const T*, 2> in{a, b};
    const std::array<std::span<const Index>, 2> strides{a_strides, b_strides};
    const std::span<const Index> sizes(shape);
    kernels::pointwise_forward(device, functors::Mul{}, sizes, in, strides, y);
    kernels::pointwise_backward(device, functors::Mul{}, sizes, in, strides, static_cast<const T*>(dy),
                                std::array<T*, 2>{da, db}, strides, {accumulate, accumulate});
  };
  CAPTURE(shape, accumulate);
  const Index count = numel(shape);
  compare(10 * near<T>, body, numbers<T>(a_count, 1), numbers<T>(b_count, 2), numbers<T>(count, 3),
          numbers<T>(count, 4), numbers<T>(a_count, 5), numbers<T>(b_count, 6));
}

TEST_CASE("unary functors") {
  if (!gpu_present()) return;
  using namespace functors;
  const auto all = [](auto... f) { (dense<float, 1>(f, 1000, 0, {false}), ...); };
  all(Abs{}, Sqrt{}, Rsqrt{}, Exp{}, Log1p{}, Sin{}, Tanh{}, Erf{}, Sigmoid{}, Relu{}, LeakyRelu{}, Elu{}, Gelu{},
      Mish{}, Softplus{}, Hardswish{}, Clamp{-0.5, 0.7}, PowScalar{1.7});
}

TEST_CASE("lengths, alignments and types") {
  if (!gpu_present()) return;
  for (const Index count : {0, 1, 3, 4, 255, 4099})
    for (const Index offset : {0, 1, 4}) {
      dense<float, 2>(SwiGlu{}, count, offset, {false, true});
      dense<bf16, 2>(SwiGlu{}, count, offset, {true, false});
    }
  dense<double, 2>(SwiGlu{}, 1001, 1, {true, true});
  dense<chorus::half, 1>(functors::Gelu{}, 1001, 1, {true});
}

TEST_CASE("binary functors") {
  if (!gpu_present()) return;
  using namespace functors;
  const auto all = [](auto... f) { (dense<float, 2>(f, 500, 0, {false, false}), ...); };
  all(Add{}, Div{}, Maximum{}, Pow{});
}

TEST_CASE("broadcasting, and the sums of its gradients") {
  if (!gpu_present()) return;
  for (const bool accumulate : {false, true}) {
    broadcast<float>({4, 5, 6}, {30, 6, 1}, {0, 0, 1}, 120, 6, accumulate);            // rows
    broadcast<float>({4, 5, 6}, {0, 6, 1}, {30, 6, 1}, 30, 120, accumulate);           // leading axis
    broadcast<float>({4, 5, 6}, {30, 6, 1}, {0, 1, 0}, 120, 5, accumulate);            // channels
    broadcast<float>({4, 5, 1}, {5, 1, 0}, {0, 0, 0}, 20, 1, accumulate);              // a number
    broadcast<float>({300, 7, 70}, {490, 70, 1}, {0, 0, 1}, 147'000, 70, accumulate);  // split sums
    broadcast<double>({3, 1, 5000}, {0, 0, 1}, {1, 0, 0}, 5000, 3, accumulate);        // both
    broadcast<float>({0, 5, 6}, {30, 6, 1}, {0, 0, 1}, 0, 6, accumulate);              // nothing to sum
  }
}

}  // namespace pointwise_test
