#pragma once
/// The gradients of parameters on a GPU as few arrays: one per dtype if they are in one buffer.

#include <algorithm>
#include <chorus/kernels/cuda/gradients.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/averaged_gradients.hpp>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus::optim::detail {

class GradArrays {
 public:
  template <class T>
  using Array = kernels::cuda::Array<T>;

  /// The gradients that have arrived. Adjacent ones in one buffer form one array, including the zeros between them.
  explicit GradArrays(const std::vector<nn::NamedParameter<Cuda>>& parameters) {
    std::vector<Part<float>> f32;
    std::vector<Part<double>> f64;
    for (const auto& named : parameters) {
      auto& parameter = *named.parameter;
      parameter.check_grad_whole();
      if (!parameter.grad_arrived() || parameter.count() == 0) continue;
      check_averaged(named);
      device_ = parameter.where();
      if (parameter.dtype() == DType::f32)
        f32.push_back({{static_cast<float*>(parameter.grad_data()), parameter.count()}, parameter.grad_block()});
      else
        f64.push_back({{static_cast<double*>(parameter.grad_data()), parameter.count()}, parameter.grad_block()});
    }
    f32_ = joined(std::move(f32));
    f64_ = joined(std::move(f64));
  }

  bool empty() const { return f32_.empty() && f64_.empty(); }
  Cuda device() const { return *device_; }
  std::span<const Array<float>> f32() const { return f32_; }
  std::span<const Array<double>> f64() const { return f64_; }

 private:
  template <class T>
  struct Part {
    Array<T> array;
    const void* block;
  };

  // Arrays are not joined across memory blocks, since the gap between them is not initialised.
  template <class T>
  static std::vector<Array<T>> joined(std::vector<Part<T>> parts) {
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.array.data < b.array.data; });
    std::vector<Array<T>> arrays;
    const void* block = nullptr;
    for (const auto& [next, its_block] : parts) {
      const bool same_block = std::exchange(block, its_block) == its_block && its_block != nullptr;
      if (!arrays.empty()) {
        auto& last = arrays.back();
        const auto count = static_cast<std::size_t>(last.count);
        const auto occupied = static_cast<Index>(same_block ? padded_count<Cuda>(count, sizeof(T)) : count);
        if (last.data + occupied == next.data) {
          last.count = occupied + next.count;
          continue;
        }
      }
      arrays.push_back(next);
    }
    return arrays;
  }

  std::optional<Cuda> device_;
  std::vector<Array<float>> f32_;
  std::vector<Array<double>> f64_;
};

/// clip_grad_norm on a GPU, which computes the factor. The host waits only for the returned norm; in a captured step it
/// cannot wait, and the norm is NaN. `check_norm`, if given, gets the norm before any gradient is changed.
inline double clip_grad_norm_on_device(const std::vector<nn::NamedParameter<Cuda>>& parameters, double max_norm,
                                       const std::function<void(double)>& check_norm = {}) {
  const GradArrays grads(parameters);
  if (grads.empty()) return 0;
  const Cuda device = grads.device();
  const bool captured = cuda::is_capturing(cuda::current_stream(device));
  check<UsageError>(
      !captured || !check_norm,
      "clip_grad_norm: error_if_nonfinite is not supported in a captured step, where only the device knows the norm");
  const kernels::cuda::Scratch<kernels::cuda::GradNorm> norm(device, 1);
  kernels::cuda::grad_norm(device, grads.f32(), grads.f64(), max_norm, norm.data());
  const auto read = [&] {
    double out = 0;
    copy_bytes(Cpu{}, &out, device, &norm.data()->norm, sizeof out);
    return out;
  };
  if (check_norm) check_norm(read());
  kernels::cuda::clip_grads(device, grads.f32(), norm.data());
  kernels::cuda::clip_grads(device, grads.f64(), norm.data());
  return captured ? std::numeric_limits<double>::quiet_NaN() : read();
}

}  // namespace chorus::optim::detail
