// What needs no GPU: messages, and those parts of cuDNN's interface that cuDNN checks by itself.
#include <chorus/core/cuda/stream.hpp>
#if CHORUS_USE_CUDNN
#include <chorus/kernels/cuda/cudnn.hpp>
#endif

#include "../unit/message_of.hpp"
#include "compare.hpp"

namespace no_device_test {

using namespace chorus;
using Memory = Storage<Cuda>;

TEST_CASE("a machine without the device says so") {
  const int beyond = cuda::device_count();
  const auto message = message_of<DeviceError>([&] { Memory(Cuda{beyond}, 64); });
  CAPTURE(message);
  CHECK(message.starts_with(cat("device cuda:", beyond, " does not exist: this machine has ")));
  if (beyond == 0) CHECK(message.find("no CUDA device (") != std::string::npos);
  CHECK(message_of<DeviceError>([] { Memory(Cuda{-1}, 64); }).starts_with("device cuda:-1 does not exist"));
  CHECK(message_of<DeviceError>([&] { cuda::current_stream(Cuda{beyond}); }) == message);
  CHECK(message_of<DeviceError>([&] {
          float x;
          zero_bytes(Cuda{beyond}, &x, sizeof x);
        }) == message);
}

TEST_CASE("a CUDA error names the call, its text and its place") {
  const auto message = message_of<DeviceError>([] { CHORUS_CUDA_CHECK(cudaErrorInvalidValue); });
  CHECK(message.starts_with("CUDA: cudaErrorInvalidValue failed: invalid argument (cudaErrorInvalidValue), at "));
  CHECK(message.find("no_device_test.cu:") != std::string::npos);
}

#if CHORUS_USE_CUDNN
using kernels::Conv2dShape;
using kernels::cuda::ConvolutionPass;
using kernels::cuda::ConvolutionProblem;

TEST_CASE("cuDNN takes the operations of all passes and types") {
  for (const auto pass : {ConvolutionPass::forward, ConvolutionPass::backward_input, ConvolutionPass::backward_weight})
    for (const DType type : {DType::f32, DType::f64, DType::f16, DType::bfloat16})
      for (const Conv2dShape& shape :
           {Conv2dShape{2, 3, 32, 32, 6, 5, 5}, Conv2dShape{2, 4, 9, 8, 6, 3, 2, 1, 2, 0, 1, 2, 1, 2}}) {
        CAPTURE(static_cast<int>(pass), static_cast<int>(type), shape.groups);
        CHECK(kernels::cuda::cudnn_operation(ConvolutionProblem{pass, type, false, shape}).get() != nullptr);
      }
}

TEST_CASE("cuDNN takes gradients by the weight in float, of images of 2 bytes") {
  for (const DType type : {DType::f16, DType::bfloat16}) {
    const ConvolutionProblem problem{
        ConvolutionPass::backward_weight, type, false, {2, 3, 32, 32, 6, 5, 5}, DType::f32};
    CHECK(kernels::cuda::cudnn_operation(problem).get() != nullptr);
  }
}

TEST_CASE("an error of cuDNN names the call and its place") {
  const ConvolutionProblem wrong{ConvolutionPass::forward, DType::f32, false, {2, 3, 2, 2, 6, 5, 5}};
  const auto message = message_of<DeviceError>([&] { kernels::cuda::cudnn_operation(wrong); });
  CAPTURE(message);
  CHECK(message.starts_with("cuDNN: cudnnBackend"));
  CHECK(message.find("kernels/cuda/cudnn.hpp:") != std::string::npos);
}
#endif

}  // namespace no_device_test
