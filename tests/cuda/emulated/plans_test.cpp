// Errors of cuBLASLt's calls, which are not the next kernel's, and what is said of the ways that libraries choose.
#include <unistd.h>

#include <catch.hpp>
#include <chorus/kernels/attention.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdio>
#include <string>

#include "../../unit/message_of.hpp"

namespace plans_test {

using namespace chorus;
using kernels::Trans;

/// What `body` writes to stderr.
template <class Body>
std::string said(const Body& body) {
  std::FILE* const file = std::tmpfile();
  const int before = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  body();
  dup2(before, STDERR_FILENO);
  close(before);
  std::rewind(file);
  std::string text(10'000, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

// A stack of 2 products [m, 2] by [2, 2]; another m is another plan.
template <class T>
void product(Index m) {
  const Cuda device{1};
  const auto a = Tensor<T, 3, Cuda>::zeros({2, m, 2}, device), b = Tensor<T, 3, Cuda>::zeros({2, 2, 2}, device);
  const auto c = Tensor<T, 3, Cuda>::zeros({2, m, 2}, device);
  const T *left = a.data(), *right = b.data();
  kernels::gemm_stack(device, {2, m * 2, 4, m * 2}, Trans::no, Trans::yes, m, 2, 2, left, 2, right, 2, c.data(), 2, false);
}

TEST_CASE("cuda: a product that fails is named, and no kernel is blamed for it") {
  emulation::counters().failing_products = 1;
  CHECK(message_of<DeviceError>([] { product<float>(4); })
            .starts_with("cuBLASLt: cublasLtMatmul(handle, operation_, &alpha, b, a_, a, b_, &beta, c, c_, c, c_, "
                         "&choice_.algo, workspace, choice_.workspaceSize, stream) failed: the function failed to "
                         "launch on the GPU, at chorus/kernels/cuda/cublas.hpp:"));
  CHECK(cudaGetLastError() == cudaSuccess);
  emulation::counters().products_that_leave_an_error = 1;
  product<float>(4);  // the error of a probe is cleared
  CHECK(cudaGetLastError() == cudaSuccess);
  emulation::counters().products_that_leave_an_error = 1;
  emulation::counters().errors_persist = true;
  CHECK(message_of<DeviceError>([] { product<float>(4); }).starts_with("CUDA: cublasLtMatmul(handle"));
  emulation::counters().errors_persist = false;
  CHECK(cudaGetLastError() != cudaSuccess);
  product<float>(4);
}

TEST_CASE("cuda: what was chosen is said once for each shape, where that is wanted") {
  CHECK(said([] { product<float>(5); }).empty());
  setenv("CHORUS_CUDA_PLANS", "1", 1);
  CHECK(
      said([] {
        product<float>(6);
        product<float>(6);
        product<bf16>(6);
      }) ==
      "chorus: cuda:1: matrix product F32 [6, 2] by [2, 2], the second transposed, a stack of 2: cuBLASLt's algorithm "
      "20, tile 21, stages 26, split k 22, workspace 1024 bytes\n"
      "chorus: cuda:1: matrix product BF16 [6, 2] by [2, 2], the second transposed, a stack of 2: cuBLASLt has no "
      "algorithm for it; a plain kernel\n");
  setenv("CHORUS_CUDA_PLANS", "yes", 1);
  CHECK(message_of<UsageError>([] { product<float>(7); }) ==
        "environment variable CHORUS_CUDA_PLANS must be 0 or 1, got 'yes'");
  unsetenv("CHORUS_CUDA_PLANS");
}

TEST_CASE("cuda: a product that gives sums, too, is said, and what is done where there is none") {
  const auto given = []<class T>(T) {
    const Cuda device{1};
    const auto a = Tensor<T, 2, Cuda>::ones({4, 4}, device), c = Tensor<T, 2, Cuda>::zeros({4, 4}, device);
    const auto sums = Tensor<T, 1, Cuda>::zeros({4}, device);
    const T* const in = a.data();
    return kernels::gemm_with_sums(device, Trans::yes, Trans::no, 4, 4, 4, in, 4, in, 4, c.data(), 4, false,
                                   sums.data(), false);
  };
  setenv("CHORUS_CUDA_PLANS", "1", 1);
  CHECK(said([&] {
          CHECK(given(0.0f));
          for (int i = 0; i < 2; ++i) CHECK_FALSE(given(bf16{}));
        }) ==
        "chorus: cuda:1: matrix product F32 [4, 4] by [4, 4], the first transposed, with the sums of the first's rows: "
        "cuBLASLt's algorithm 20, tile 21, stages 26, split k 22, workspace 1024 bytes\nchorus: cuda:1: matrix product "
        "BF16 [4, 4] by [4, 4], the first transposed, with the sums of the first's rows: cuBLASLt has no algorithm for "
        "it; a separate kernel computes the sums\n");
  unsetenv("CHORUS_CUDA_PLANS");
}

TEST_CASE("cuda: whether attention goes by blocks is said once for each shape, where that is wanted") {
  const kernels::AttentionShape shape{
      .samples = 1, .heads = 1, .queries = 2, .keys = 3, .features = 4, .values = 5, .scale = 1, .causal = true};
  const auto numbers = Tensor<float, 1, Cuda>::zeros({64});
  const float *in = numbers.data(), *none = nullptr;
  const auto forward = [&] {
    kernels::attention_forward(Cuda{}, shape, in, in, in, none, numbers.data() + 20, numbers.data() + 32);
  };
  CHECK(said(forward).empty());
  setenv("CHORUS_CUDA_PLANS", "1", 1);
  const auto limit = kernels::attention_scores_limit().exchange(0);
  CHECK(said([&] { forward(), forward(); }) ==
        "chorus: cuda:0: attention F32 [1, 1, 2, 4] to 3 keys, 5 values each, causal: by blocks, without its scores in "
        "memory\n");
  kernels::attention_scores_limit() = limit;
  const auto products = said([&] { forward(), forward(); });
  CHECK(products.starts_with("chorus: cuda:0: attention F32 [1, 1, 2, 4] to 3 keys, 5 values each, causal: by products, "
                             "with the scores of 1 head in memory\n"));
  CHECK(products.find("attention", products.find('\n')) == std::string::npos);
  unsetenv("CHORUS_CUDA_PLANS");
}

TEST_CASE("cuda: that convolutions are computed by direct kernels is said, once") {
  const kernels::Conv2dShape shape{2, 3, 4, 5, 6, 3, 3};
  const auto x = Tensor<float, 1, Cuda>::zeros({shape.x_count()}),
             w = Tensor<float, 1, Cuda>::zeros({shape.weight_count()}),
             y = Tensor<float, 1, Cuda>::zeros({shape.y_count()});
  const float *in = x.data(), *weight = w.data(), *none = nullptr;
  kernels::cuda::detail::direct_convolution_logged() = false;
  CHECK(said([&] {
          kernels::conv2d_forward(Cuda{}, shape, in, weight, none, y.data());
          kernels::conv2d_backward_input(Cuda{}, shape, weight, static_cast<const float*>(y.data()), x.data(), false);
        }) ==
        "chorus: cuda:0: convolution F32 [2, 3, 4, 5] by [6, 3, 3, 3], stride 1 x 1, padding 0 x 0, dilation 1 x 1, "
        "groups 1: this program was compiled without cuDNN; a direct kernel computes it, many times slower (this "
        "warning appears once)\n");
}

TEST_CASE("cuda: a product's bias may have another type than its result") {
  const auto numbers = Tensor<bf16, 1, Cuda>::from({bf16(1), bf16(2), bf16(3), bf16(4), bf16(5), bf16(-3)}, {6});
  const auto c = Tensor<float, 2, Cuda>::zeros({2, 2});
  const bf16 *const in = numbers.data(), *const bias = in + 4;
  kernels::gemm(Cuda{}, Trans::no, Trans::no, 2, 2, 2, in, 2, in, 2, c.data(), 2, false, bias);
  CHECK(c.to_vector() == std::vector<float>{12, 7, 20, 19});
}

TEST_CASE("cuda: products whose operands lie elsewhere have the same plan") {
  const auto numbers = Tensor<float, 1, Cuda>::zeros({256});
  const auto& plans = kernels::cuda::CublasContext::of(Cuda{}).plans;
  const auto at = [&](Index place) {
    const float* in = numbers.data();
    kernels::gemm(Cuda{}, Trans::no, Trans::no, 3, 3, 3, in, 3, in + place, 3, numbers.data() + 128, 3, false);
    return plans.size();
  };
  const auto before = plans.size();
  for (const Index place : {0, 64, 32, 16, 8, 4}) CHECK(at(place) == before + 1);
  CHECK(at(2) == before + 2);  // no access of 16 bytes
}

struct Doubled : nn::Module {
  Parameter<float, 2, Cuda> weight{Tensor<float, 2, Cuda>::ones({2, 2})};
  CHORUS_MODULE(Doubled, weight)
  auto forward(const auto& x) const { return matmul(x, weight); }
};

TEST_CASE("cuda: a captured step makes no plan, and says that more warming up does") {
  SingleDevice<Doubled> net{Doubled{}};
  const auto some = Tensor<float, 2, Cuda>::ones({17, 2});
  int calls = 0;
  const auto one = [&](const auto& x) { return calls++ == 2 ? sum(net(some)) : sum(net(x)); };
  Graphed step(net, one, {.warm_up = 2});
  const auto x = Tensor<float, 2, Cuda>::ones({18, 2});
  step(x), step(x);
  CHECK(message_of<UsageError>([&] { step(x); }) ==
        "Graphed: while the step was captured: captured graph: expected only plans that eager steps have made, got a "
        "new one on cuda:0 for matrix product F32 [17, 2] by [2, 2]; warm up more: run the step eagerly until it has "
        "met this shape and alignment (Graphed: GraphedOptions::warm_up)");
  net(some);  // the plan's shape, eagerly
  calls = 2;
  step(x);
  CHECK(step.losses() == std::vector<double>{72, 72, 68});
}

}  // namespace plans_test
