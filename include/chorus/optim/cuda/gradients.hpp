#pragma once
/// The gradients of parameters on a GPU as few arrays: one for each dtype where they lie in one buffer.

#include <algorithm>
#include <chorus/kernels/cuda/gradients.hpp>
#include <chorus/nn/module.hpp>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace chorus::inline CHORUS_ABI::optim::detail {

class GradArrays {
 public:
  template <class T>
  using Array = kernels::cuda::Array<T>;

  /// Those that have arrived; neighbours are one array, with the zeros between them.
  explicit GradArrays(const std::vector<nn::NamedParameter<Cuda>>& parameters) {
    for (const auto& named : parameters) {
      auto& parameter = *named.parameter;
      if (!parameter.grad_arrived() || parameter.count() == 0) continue;
      device_ = parameter.where();
      if (parameter.dtype() == DType::f32)
        f32_.push_back({static_cast<float*>(parameter.grad_data()), parameter.count()});
      else
        f64_.push_back({static_cast<double*>(parameter.grad_data()), parameter.count()});
    }
    join(f32_);
    join(f64_);
  }

  bool empty() const { return f32_.empty() && f64_.empty(); }
  Cuda device() const { return *device_; }
  std::span<const Array<float>> f32() const { return f32_; }
  std::span<const Array<double>> f64() const { return f64_; }

 private:
  template <class T>
  static void join(std::vector<Array<T>>& arrays) {
    std::sort(arrays.begin(), arrays.end(), [](const auto& a, const auto& b) { return a.data < b.data; });
    std::size_t used = 0;
    for (const auto& next : arrays) {
      if (used > 0) {
        auto& last = arrays[used - 1];
        const auto occupied = static_cast<Index>(padded_count<Cuda>(static_cast<std::size_t>(last.count), sizeof(T)));
        if (last.data + occupied == next.data) {
          last.count = occupied + next.count;
          continue;
        }
      }
      arrays[used++] = next;
    }
    arrays.resize(used);
  }

  std::optional<Cuda> device_;
  std::vector<Array<float>> f32_;
  std::vector<Array<double>> f64_;
};

/// clip_grad_norm on a GPU, which works out the factor. Only the norm that is returned is waited for; in a step that is
/// captured nobody can, and it is NaN.
inline double clip_grad_norm_on_device(const std::vector<nn::NamedParameter<Cuda>>& parameters, double max_norm) {
  const GradArrays grads(parameters);
  if (grads.empty()) return 0;
  const Cuda device = grads.device();
  const kernels::cuda::Scratch<kernels::cuda::GradNorm> norm(device, 1);
  kernels::cuda::grad_norm(device, grads.f32(), grads.f64(), max_norm, norm.data());
  kernels::cuda::clip_grads(device, grads.f32(), norm.data());
  kernels::cuda::clip_grads(device, grads.f64(), norm.data());
  if (cuda::is_capturing(cuda::current_stream(device))) return std::numeric_limits<double>::quiet_NaN();
  double out = 0;
  copy_bytes(Cpu{}, &out, device, &norm.data()->norm, sizeof out);
  return out;
}

}  // namespace chorus::inline CHORUS_ABI::optim::detail
