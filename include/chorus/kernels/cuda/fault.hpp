#pragma once
/// How kernels report bad input: the first fault is kept for the next call that synchronises with the device.

#include <chorus/core/cuda/fault.hpp>
#include <cstdint>

namespace chorus::kernels::cuda {

using chorus::cuda::Fault;

/// `operation` and `noun` are host addresses, which the device never dereferences.
struct FaultNote {
  Fault* fault;
  const char *operation, *noun;

  __device__ void operator()(Index place, std::int64_t value, std::int64_t limit) const {
    if (atomicCAS(&fault->set, Fault::none, Fault::claimed) != Fault::none) return;
    fault->operation = operation;
    fault->noun = noun;
    fault->place = place;
    fault->value = value;
    fault->limit = limit;
    __threadfence_system();  // the host may read it while the kernel runs
    *static_cast<volatile unsigned*>(&fault->set) = Fault::written;
  }
};

inline FaultNote fault_note(Cuda device, const char* operation, const char* noun) {
  return {chorus::cuda::fault_of(device), operation, noun};
}

}  // namespace chorus::kernels::cuda
