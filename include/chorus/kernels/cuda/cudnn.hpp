#pragma once
/// cuDNN's graph interface for convolutions: RAII descriptors, and plans.

#include <cudnn.h>

#include <array>
#include <chorus/core/cuda/stream.hpp>
#include <chorus/kernels/cuda/plan_log.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::kernels::cuda {

/// Throws DeviceError with the call, its error and the source location.
inline void check_cudnn(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status != CUDNN_STATUS_SUCCESS) [[unlikely]] {
    chorus::cuda::forget_error();
    fail<DeviceError>("cuDNN: ", call, " failed: ", cudnnGetErrorString(status), ", at ",
                      chorus::cuda::detail::short_path(file), ":", line);
  }
  chorus::cuda::check_left_over(call, file, line);
}
#define CHORUS_CUDNN_CHECK(...) ::chorus::kernels::cuda::check_cudnn(__VA_ARGS__, #__VA_ARGS__, __FILE__, __LINE__)

/// A backend descriptor.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type) {
    CHORUS_CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &descriptor_));
  }
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~CudnnDescriptor() {
    if (descriptor_ != nullptr) cudnnBackendDestroyDescriptor(descriptor_);
  }
  cudnnBackendDescriptor_t get() const { return descriptor_; }

  template <class Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value* values, std::size_t count) {
    CHORUS_CUDNN_CHECK(cudnnBackendSetAttribute(descriptor_, name, type, static_cast<std::int64_t>(count), values));
  }
  template <class Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    set(name, type, &value, 1);
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.descriptor_);
  }
  template <std::size_t N>
  void set(cudnnBackendAttributeName_t name, const std::array<std::int64_t, N>& values) {
    set(name, CUDNN_TYPE_INT64, values.data(), N);
  }
  void finalize() { CHORUS_CUDNN_CHECK(cudnnBackendFinalize(descriptor_)); }
  /// False if cuDNN does not support the descriptor.
  bool try_finalize() {
    if (cudnnBackendFinalize(descriptor_) == CUDNN_STATUS_SUCCESS) return true;
    chorus::cuda::forget_error();
    return false;
  }

  /// Reads up to `most` values; returns their number.
  template <class Value>
  std::size_t read(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, Value* values,
                   std::size_t most) const {
    std::int64_t count = 0;
    CHORUS_CUDNN_CHECK(
        cudnnBackendGetAttribute(descriptor_, name, type, static_cast<std::int64_t>(most), &count, values));
    return std::min(most, static_cast<std::size_t>(std::max(std::int64_t{0}, count)));
  }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

/// Unique ids of a convolution's tensors in descriptors.
enum class ConvolutionTensor : std::int64_t { x = 1, weight = 2, y = 3 };

namespace detail {

inline cudnnDataType_t cudnn_type(DType type) {
  switch (type) {
    case DType::f64:
      return CUDNN_DATA_DOUBLE;
    case DType::f16:
      return CUDNN_DATA_HALF;
    case DType::bfloat16:
      return CUDNN_DATA_BFLOAT16;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

inline CudnnDescriptor cudnn_tensor(ConvolutionTensor which, DType type, const std::array<std::int64_t, 4>& sizes) {
  CudnnDescriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const std::array<std::int64_t, 4> strides{sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, cudnn_type(type));
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes);
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, static_cast<std::int64_t>(which));
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::int64_t{16});
  tensor.finalize();
  return tensor;
}

/// The attribute names of an operation in each pass.
struct PassNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t alpha, beta, convolution, weight, x, y;
};
inline PassNames pass_names(ConvolutionPass pass) {
  switch (pass) {
    case ConvolutionPass::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
    case ConvolutionPass::backward_input:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY};
    default:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
  }
}

}  // namespace detail

/// The operation of a pass, which overwrites its result. Needs no GPU.
inline CudnnDescriptor cudnn_operation(const ConvolutionProblem& problem) {
  const Conv2dShape& s = problem.shape;
  const auto x = detail::cudnn_tensor(ConvolutionTensor::x, problem.dtype, {s.batch, s.in_channels, s.height, s.width});
  const auto weight = detail::cudnn_tensor(ConvolutionTensor::weight, problem.weight,
                                           {s.out_channels, s.in_channels / s.groups, s.kernel_h, s.kernel_w});
  const auto y = detail::cudnn_tensor(ConvolutionTensor::y, problem.dtype,
                                      {s.batch, s.out_channels, s.out_height(), s.out_width()});
  CudnnDescriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const bool doubles = problem.dtype == DType::f64;
  const std::array<std::int64_t, 2> padding{s.padding_h, s.padding_w};
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE,
                  doubles ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, std::int64_t{2});
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, std::array<std::int64_t, 2>{s.dilation_h, s.dilation_w});
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, std::array<std::int64_t, 2>{s.stride_h, s.stride_w});
  convolution.finalize();

  const auto names = detail::pass_names(problem.pass);
  CudnnDescriptor operation(names.operation);
  operation.set(names.convolution, convolution);
  operation.set(names.x, x);
  operation.set(names.weight, weight);
  operation.set(names.y, y);
  if (doubles) {
    operation.set(names.alpha, CUDNN_TYPE_DOUBLE, 1.0);
    operation.set(names.beta, CUDNN_TYPE_DOUBLE, 0.0);
  } else {
    operation.set(names.alpha, CUDNN_TYPE_FLOAT, 1.0f);
    operation.set(names.beta, CUDNN_TYPE_FLOAT, 0.0f);
  }
  operation.finalize();
  return operation;
}

/// The engine of one convolution.
class ConvolutionPlan {
 public:
  /// Takes the first of cuDNN's proposals that is deterministic and does not round inputs without permission.
  ConvolutionPlan(cudnnHandle_t handle, const ConvolutionProblem& problem) {
    const auto operation = cudnn_operation(problem);
    CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
    graph.finalize();
    for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
      for (const CudnnDescriptor& proposal : proposals(graph, mode)) {
        if (!acceptable(proposal, problem)) continue;
        CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, proposal);
        if (!plan.try_finalize()) continue;
        plan.read(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &workspace_bytes_, 1);
        if (workspace_bytes_ > largest_workspace) continue;
        plan_.emplace(std::move(plan));
        engine_ = number_of(engine_of(proposal));
        return;
      }
    }
  }

  /// False if cuDNN has no acceptable engine.
  bool usable() const { return plan_.has_value(); }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  /// The name of the engine.
  std::string text() const {
    if (!usable()) return "cuDNN has no engine; a direct kernel";
    return cat("cuDNN's engine ", engine_, ", workspace ", workspace_bytes_, " bytes");
  }

  /// All tensors are aligned to 16 bytes. The pass determines which one is written.
  void run(cudnnHandle_t handle, const void* x, const void* weight, const void* y, void* workspace) const {
    const std::array<std::int64_t, 3> ids{static_cast<std::int64_t>(ConvolutionTensor::x),
                                          static_cast<std::int64_t>(ConvolutionTensor::weight),
                                          static_cast<std::int64_t>(ConvolutionTensor::y)};
    const void* pointers[] = {x, weight, y};
    CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids);
    pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, 3);
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
    pack.finalize();
    CHORUS_CUDNN_CHECK(cudnnBackendExecute(handle, plan_->get(), pack.get()));
  }

 private:
  static constexpr std::int64_t largest_workspace = std::int64_t{2} << 30;
  static constexpr std::size_t most_proposals = 32;

  static std::vector<CudnnDescriptor> proposals(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode) {
    std::vector<CudnnDescriptor> out;
    CudnnDescriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
    if (!heuristics.try_finalize()) return out;
    std::array<cudnnBackendDescriptor_t, most_proposals> raw{};
    for (auto& descriptor : raw) {
      out.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
      descriptor = out.back().get();
    }
    const auto count =
        heuristics.read(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), raw.size());
    while (out.size() > count) out.pop_back();
    return out;
  }

  static CudnnDescriptor engine_of(const CudnnDescriptor& proposal) {
    CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendDescriptor_t raw = engine.get();
    proposal.read(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw, 1);
    return engine;
  }
  static std::int64_t number_of(const CudnnDescriptor& engine) {
    std::int64_t number = -1;
    engine.read(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, &number, 1);
    return number;
  }

  static bool acceptable(const CudnnDescriptor& proposal, const ConvolutionProblem& problem) {
    const CudnnDescriptor engine = engine_of(proposal);
    std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
    const auto count =
        engine.read(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, notes.data(), notes.size());
    const bool exact = problem.dtype == DType::f32 && !problem.tf32;
    const bool narrow = problem.dtype == DType::f16 || problem.dtype == DType::bfloat16;
    for (std::size_t i = 0; i < count; ++i) {
      if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
      if (exact && notes[i] == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) return false;
      if (exact && notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE) return false;
      if (narrow && notes[i] == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) return false;
    }
    return true;
  }

  std::optional<CudnnDescriptor> plan_;
  std::int64_t workspace_bytes_ = 0, engine_ = -1;
};

/// A device's handle and plans. Never destroyed, since the driver may be unloaded first.
struct CudnnContext {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<PlanKey, std::unique_ptr<ConvolutionPlan>> plans;

  static CudnnContext& of(Cuda device) {
    chorus::cuda::require(device);
    static auto& all = *new std::array<CudnnContext, Cuda::max_devices>;
    return all[static_cast<std::size_t>(device.index)];
  }
  /// The caller holds `mutex`, and the device is current. Throws as `require_eager`.
  ConvolutionPlan& plan(Cuda device, const ConvolutionProblem& problem) {
    if (handle == nullptr) CHORUS_CUDNN_CHECK(cudnnCreate(&handle));
    auto& plan = plans[problem.key()];
    if (plan) return *plan;
    require_eager(device, problem);
    plan = std::make_unique<ConvolutionPlan>(handle, problem);
    log_plan(device, problem, [&] { return plan->text(); });
    return *plan;
  }
};

}  // namespace chorus::kernels::cuda
