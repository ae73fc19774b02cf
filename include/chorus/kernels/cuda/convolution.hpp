#pragma once
/// Two-dimensional convolution on GPUs: cuDNN, or a direct kernel if cuDNN is missing or has no engine.

#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/cuda/copy.hpp>
#include <chorus/kernels/cuda/direct_convolution.hpp>
#include <chorus/kernels/cuda/plan_log.hpp>
#include <chorus/kernels/cuda/precision.hpp>
#include <chorus/tensor/memory.hpp>
#include <optional>
#if CHORUS_USE_CUDNN
#include <chorus/kernels/cuda/cudnn.hpp>
#endif

namespace chorus::kernels {

namespace cuda {

#if CHORUS_USE_CUDNN

/// An operand at an address that cuDNN accepts; a copy if its place in a flat buffer is not aligned.
template <class T>
class AlignedOperand {
 public:
  AlignedOperand(Cuda device, const T* data, Index count) : data_(data) {
    if (aligned(data)) return;
    copy_.emplace(device, count);
    copy_bytes(device, copy_->data(), device, data, static_cast<std::size_t>(count) * sizeof(T));
    data_ = copy_->data();
  }
  const T* data() const { return data_; }

 private:
  std::optional<Scratch<T>> copy_;
  const T* data_;
};

/// Runs a pass with aligned operands; overwrites the result. Returns false if cuDNN has no engine.
template <class T, class Weight>
bool cudnn_run(Cuda device, ConvolutionPass pass, const Conv2dShape& s, const T* x, const Weight* weight, const T* y) {
  const DeviceGuard guard(device);
  auto& context = CudnnContext::of(device);
  const std::lock_guard lock(context.mutex);
  const ConvolutionPlan& plan = context.plan(device, {pass, dtype<T>, tf32_allowed(), s, dtype<Weight>});
  if (!plan.usable()) return false;
  CHORUS_CUDNN_CHECK(cudnnSetStream(context.handle, chorus::cuda::current_stream(device)));
  const Scratch<std::byte> workspace(device, plan.workspace_bytes());
  plan.run(context.handle, x, weight, y, workspace.data());
  return true;
}

/// Calls `run(target)` with an aligned buffer of `count` numbers, and copies or adds them to `out` if it succeeds.
template <class T, class Run>
bool into(Cuda device, T* out, Index count, bool accumulate, const Run& run) {
  if (!accumulate && aligned(out)) return run(out);
  const Scratch<T> result(device, count);
  if (!run(result.data())) return false;
  if (accumulate)
    kernels::axpy(device, count, static_cast<T>(1.0f), static_cast<const T*>(result.data()), out);
  else
    copy_bytes(device, out, device, result.data(), static_cast<std::size_t>(count) * sizeof(T));
  return true;
}

template <class From, class To>
struct PutConverted {
  const From* from;
  To* to;
  bool accumulate;
  __device__ void operator()(Index i) const { put(to, i, static_cast<compute_type<To>>(get(from, i)), accumulate); }
};

#endif

inline bool any_empty(const Conv2dShape& s) { return s.x_count() == 0 || s.weight_count() == 0 || s.y_count() == 0; }

template <class T>
void log_direct(Cuda device, ConvolutionPass pass, const Conv2dShape& s) {
  if (!any_empty(s)) log_direct(device, {pass, dtype<T>, tf32_allowed(), s});
}

}  // namespace cuda

template <Real T>
void conv2d_forward(Cuda device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  bool done = false;
#if CHORUS_USE_CUDNN
  if (!cuda::any_empty(s)) {
    const cuda::AlignedOperand<T> from(device, x, s.x_count()), taps(device, weight, s.weight_count());
    done = cuda::into(device, y, s.y_count(), false, [&](T* target) {
      return cuda::cudnn_run<T, T>(device, cuda::ConvolutionPass::forward, s, from.data(), taps.data(), target);
    });
  }
#endif
  if (!done) {
    cuda::log_direct<T>(device, cuda::ConvolutionPass::forward, s);
    cuda::for_each(device, "conv2d", s.y_count(), cuda::DirectForward<T>{cuda::ConvolutionSizes::of(s), x, weight, y});
  }
  if (bias != nullptr)
    cuda::for_each(device, "bias of conv2d", s.y_count(),
                   cuda::AddChannelBias<T>{s.out_channels, s.out_height() * s.out_width(), bias, y});
}

template <Real T, SumOf<T> Out>
void conv2d_backward_weight(Cuda device, const Conv2dShape& s, const T* x, const T* dy, Out* dweight, bool accumulate) {
#if CHORUS_USE_CUDNN
  if (!cuda::any_empty(s)) {
    const cuda::AlignedOperand<T> from(device, x, s.x_count()), gradient(device, dy, s.y_count());
    const auto run = [&](auto* target) {
      return cuda::cudnn_run(device, cuda::ConvolutionPass::backward_weight, s, from.data(), target, gradient.data());
    };
    if (cuda::into(device, dweight, s.weight_count(), accumulate, run)) return;
    if constexpr (!std::is_same_v<T, Out>) {  // more engines round to T than return float
      const cuda::Scratch<T> rounded(device, s.weight_count());
      if (run(rounded.data())) {
        cuda::for_each(device, "gradient in float", s.weight_count(),
                       cuda::PutConverted<T, Out>{rounded.data(), dweight, accumulate});
        return;
      }
    }
  }
#endif
  cuda::log_direct<T>(device, cuda::ConvolutionPass::backward_weight, s);
  cuda::reduce<double>(device, "conv2d gradient by the weight", s.weight_count(),
                       s.batch * s.out_height() * s.out_width(), false,
                       cuda::DirectBackwardWeight<T, Out>{cuda::ConvolutionSizes::of(s), x, dy, dweight, accumulate});
}

template <Real T>
void conv2d_backward_input(Cuda device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
#if CHORUS_USE_CUDNN
  if (!cuda::any_empty(s)) {
    const cuda::AlignedOperand<T> taps(device, weight, s.weight_count()), gradient(device, dy, s.y_count());
    const bool done = cuda::into(device, dx, s.x_count(), accumulate, [&](T* target) {
      return cuda::cudnn_run<T, T>(device, cuda::ConvolutionPass::backward_input, s, target, taps.data(),
                                   gradient.data());
    });
    if (done) return;
  }
#endif
  cuda::log_direct<T>(device, cuda::ConvolutionPass::backward_input, s);
  cuda::for_each(device, "conv2d gradient by the input", s.x_count(),
                 cuda::DirectBackwardInput<T>{cuda::ConvolutionSizes::of(s), weight, dy, dx, accumulate});
}

template <Real T, SumOf<T> Out>
void conv2d_backward_bias(Cuda device, const Conv2dShape& s, const T* dy, Out* dbias, bool accumulate) {
  const Index pixels = s.out_height() * s.out_width();
  cuda::reduce<double>(device, "conv2d gradient by the bias", s.out_channels, s.batch * pixels, pixels == 1,
                       cuda::ChannelBiasGradient<T, Out>{s.out_channels, pixels, dy, dbias, accumulate});
}

}  // namespace chorus::kernels
