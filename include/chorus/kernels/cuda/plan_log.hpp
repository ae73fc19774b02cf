#pragma once
/// Plans in words. Logs library choices: with CHORUS_CUDA_PLANS=1 in the environment, a line on stderr for each new
/// shape of a matrix product or convolution. Always warns if a convolution uses a direct kernel. Refuses new plans in a
/// capture.

#include <atomic>
#include <chorus/core/cuda/stream.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/kernels/cuda/plan_key.hpp>
#include <string>
#include <string_view>

namespace chorus::kernels::cuda {

inline std::string text_of(const GemmProblem& p) {
  return cat("matrix product ", p.dtype, " [", p.m, ", ", p.k, "] by [", p.k, ", ", p.n, "]",
             p.ta == Trans::yes ? ", the first transposed" : "", p.tb == Trans::yes ? ", the second transposed" : "",
             p.count > 1 ? cat(", a stack of ", p.count) : "", p.epilogue == Epilogue::bias   ? ", with a bias"
             : p.epilogue == Epilogue::sums ? ", with the sums of the first's rows"
                                            : "",
             p.out == p.dtype ? "" : cat(", in ", p.out));
}
inline std::string text_of(const ConvolutionProblem& p) {
  const Conv2dShape& s = p.shape;
  const char* const pass = p.pass == ConvolutionPass::forward          ? ""
                           : p.pass == ConvolutionPass::backward_input ? "'s gradient by the input"
                                                                       : "'s gradient by the weight";
  return cat("convolution", pass, " ", p.dtype, " [", s.batch, ", ", s.in_channels, ", ", s.height, ", ",
             s.width, "] by [", s.out_channels, ", ", s.in_channels / s.groups, ", ", s.kernel_h, ", ", s.kernel_w,
             "], stride ", s.stride_h, " x ", s.stride_w, ", padding ", s.padding_h, " x ", s.padding_w, ", dilation ",
             s.dilation_h, " x ", s.dilation_w, ", groups ", s.groups,
             p.weight == p.dtype ? "" : cat(", in ", p.weight));
}

/// Logs the choice for a problem if requested; `choice()` gives the text.
template <class Problem, class Choice>
[[gnu::cold]] void log_plan(Cuda device, const Problem& problem, const Choice& choice) {
  if (!chorus::detail::env_switch("CHORUS_CUDA_PLANS", false)) return;
  chorus::detail::say(cat(device, ": ", text_of(problem), ": ", choice()));
}

/// Before a new plan: asking a library for one may do what a capture forbids. Throws UsageError if this thread's stream
/// is captured.
template <class Problem>
[[gnu::cold]] void require_eager(Cuda device, const Problem& problem) {
  check<UsageError>(!chorus::cuda::is_capturing(chorus::cuda::current_stream(device)),
                    "captured graph: expected only plans that eager steps have made, got a new one on ", device,
                    " for ", text_of(problem), "; warm up more: run the step eagerly until it has met this shape and "
                    "alignment (Graphed: GraphedOptions::warm_up)");
}

namespace detail {
inline std::atomic<bool>& direct_convolution_logged() {
  static std::atomic<bool> said = false;
  return said;
}
}  // namespace detail

/// Warns, once per process, that a convolution uses a direct kernel.
inline void log_direct(Cuda device, const ConvolutionProblem& problem) {
  if (detail::direct_convolution_logged().exchange(true, std::memory_order_relaxed)) [[likely]]
    return;
  chorus::detail::say(cat(device, ": ", text_of(problem), ": ",
                          CHORUS_USE_CUDNN ? "cuDNN has no engine for it" : "this program was compiled without cuDNN",
                          "; a direct kernel computes it, many times slower (this warning appears once)"));
}

}  // namespace chorus::kernels::cuda
