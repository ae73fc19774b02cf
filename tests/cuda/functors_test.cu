// The functors and Dual as device code: one kernel forward, one back, on plain numbers and Duals, no extended lambda.
#include <cuda_runtime.h>

#include <array>
#include <catch.hpp>
#include <chorus/kernels/cpu/pointwise.hpp>
#include <cmath>
#include <vector>

using namespace chorus;

namespace {

// What a user writes; plain numbers travel as Dual<T, 0>, so that its functions are found without a namespace.
struct SwiGlu {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / (1 + exp(-a)) * where(b < 0, 0.5 * b, b);
  }
};

template <class F, class T, class... In>
__global__ void forward(F f, Index count, T* out, const In*... in) {
  for (Index i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    out[i] = f(Dual<T, 0>(in[i])...).value;
}

template <class F, class T, class... In>
__global__ void backward(F f, Index count, const T* dy, Partials<T*, static_cast<int>(sizeof...(In))> dx,
                         const In*... in) {
  for (Index i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const auto partials = math::gradient(f, dy[i], in[i]...);
    for (int k = 0; k < static_cast<int>(sizeof...(In)); ++k) dx.d[k][i] = partials.d[k];
  }
}

template <class T>
struct DeviceArray {
  T* data = nullptr;
  std::size_t count;
  explicit DeviceArray(const std::vector<T>& host) : count(host.size()) {
    REQUIRE(cudaMalloc(&data, count * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> out(count);
    REQUIRE(cudaMemcpy(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return out;
  }
};

bool device_present() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return true;
  WARN("skipped: no CUDA device");
  return false;
}

template <class T>
void check_equal(const std::vector<T>& actual, const std::vector<T>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(actual[i] == Approx(expected[i]).epsilon(1e-5).margin(1e-6));
}

/// The device's numbers are those of the CPU kernels.
template <class T, std::size_t N, class F>
void compare(const F& f) {
  constexpr Index count = 1000;
  std::vector<T> a(count), b(count), dy(count, T(1.5));
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = static_cast<T>(0.05 + 0.003 * static_cast<double>(i));
    b[i] = static_cast<T>(1.5 - 0.0029 * static_cast<double>(i));
  }
  std::vector<T> y(count), da(count), db(count);
  const DeviceArray<T> d_a(a), d_b(b), d_dy(dy), d_y(y), d_da(da), d_db(db);
  if constexpr (N == 1) {
    kernels::pointwise_forward(Cpu{}, f, count, std::array<const T*, 1>{a.data()}, y.data());
    kernels::pointwise_backward(Cpu{}, f, count, std::array<const T*, 1>{a.data()}, static_cast<const T*>(dy.data()),
                                std::array<T*, 1>{da.data()}, {false});
    forward<<<4, 64>>>(f, count, d_y.data, static_cast<const T*>(d_a.data));
    backward<<<4, 64>>>(f, count, static_cast<const T*>(d_dy.data), Partials<T*, 1>{{d_da.data}},
                        static_cast<const T*>(d_a.data));
  } else {
    kernels::pointwise_forward(Cpu{}, f, count, std::array<const T*, 2>{a.data(), b.data()}, y.data());
    kernels::pointwise_backward(Cpu{}, f, count, std::array<const T*, 2>{a.data(), b.data()},
                                static_cast<const T*>(dy.data()), std::array<T*, 2>{da.data(), db.data()},
                                {false, false});
    forward<<<4, 64>>>(f, count, d_y.data, static_cast<const T*>(d_a.data), static_cast<const T*>(d_b.data));
    backward<<<4, 64>>>(f, count, static_cast<const T*>(d_dy.data), Partials<T*, 2>{{d_da.data, d_db.data}},
                        static_cast<const T*>(d_a.data), static_cast<const T*>(d_b.data));
  }
  REQUIRE(cudaGetLastError() == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  check_equal(d_y.host(), y);
  check_equal(d_da.host(), da);
  if (N == 2) check_equal(d_db.host(), db);
}

}  // namespace

TEST_CASE("unary functors run in a kernel, forward and back") {
  if (!device_present()) return;
  using namespace functors;
  const auto all = [](auto... f) { (compare<float, 1>(f), ...); };
  all(Neg{}, Abs{}, Square{}, Sqrt{}, Rsqrt{}, Reciprocal{}, Exp{}, Log{}, Log1p{}, Sin{}, Cos{}, Tanh{}, Erf{},
      Sigmoid{});
  all(Relu{}, Relu6{}, LeakyRelu{}, Elu{}, Silu{}, Gelu{}, GeluTanh{}, Mish{}, Softplus{}, LogSigmoid{}, Hardtanh{});
  all(Hardsigmoid{}, Hardswish{}, Clamp{-0.5, 0.7}, PowScalar{3}, PowScalar{1.7}, AddScalar{2}, MulScalar{3});
  compare<double, 1>(Gelu{});
}

TEST_CASE("binary functors run in a kernel, forward and back") {
  if (!device_present()) return;
  using namespace functors;
  const auto all = [](auto... f) { (compare<float, 2>(f), ...); };
  all(Add{}, Sub{}, Mul{}, Div{}, Maximum{}, Minimum{}, Pow{}, SwiGlu{});
  compare<double, 2>(SwiGlu{});
}
