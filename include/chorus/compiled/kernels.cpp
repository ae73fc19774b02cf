// Part of the library chorus::compiled: the kernels on the CPU.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/compiled/erased.hpp>
#include <chorus/kernels/attention.hpp>
#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/batch_norm.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cross_entropy.hpp>
#include <chorus/kernels/cumulative.hpp>
#include <chorus/kernels/dropout.hpp>
#include <chorus/kernels/few_rows.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/group_norm.hpp>
#include <chorus/kernels/indexing.hpp>
#include <chorus/kernels/layer_norm.hpp>
#include <chorus/kernels/lstm.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/kernels/random.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/kernels/resample.hpp>
#include <chorus/kernels/softmax.hpp>
#include <chorus/kernels/sort.hpp>
#include <chorus/kernels/square_sum.hpp>

namespace chorus::kernels {

template <class T>
struct Floating {
  static inline const Erased table[] = {
      erased(&axpy<T>),
      erased(&scale<T>),
      erased(&gemm<T>),
      erased(&gemm_stack<T>),
      erased(&linear_of_few_rows<T>),
      erased(&lstm_forward<T>),
      erased(&lstm_backward<T>),
      erased(&attention_forward<T>),
      erased(&attention_backward<T>),
      erased(&conv2d_forward<T>),
      erased(&conv2d_backward_input<T>),
      erased(&conv2d_backward_weight<T>),
      erased(&conv2d_backward_bias<T>),
      erased(&max_pool2d_forward<T>),
      erased(&max_pool2d_backward<T>),
      erased(&avg_pool2d_forward<T>),
      erased(&avg_pool2d_backward<T>),
      erased(&resample<T>),
      erased(&batch_norm_sums<T>),
      erased(&batch_norm_statistics<T>),
      erased(&batch_norm_normalise<T>),
      erased(&batch_norm_forward_train<T>),
      erased(&batch_norm_forward_eval<T>),
      erased(&batch_norm_backward_sums<T>),
      erased(&batch_norm_backward_affine<T>),
      erased(&batch_norm_backward_input<T>),
      erased(&batch_norm_backward_train<T>),
      erased(&batch_norm_backward_eval<T>),
      erased(&layer_norm_forward<T>),
      erased(&layer_norm_backward<T>),
      erased(&group_norm_forward<T>),
      erased(&group_norm_backward<T>),
      erased(&softmax_forward<T>),
      erased(&softmax_backward<T>),
      erased(&log_softmax_forward<T>),
      erased(&log_softmax_backward<T>),
      erased(&logsumexp_forward<T>),
      erased(&logsumexp_backward<T>),
      erased(&cross_entropy_forward<T>),
      erased(&cross_entropy_backward<T>),
      erased(&image_cross_entropy_forward<T>),
      erased(&image_cross_entropy_backward<T>),
      erased(&nll_loss_forward<T>),
      erased(&nll_loss_backward<T>),
      erased(&sum<T>),
      erased(&sum_backward<T>),
      erased(&mean<T>),
      erased(&mean_backward<T>),
      erased(&amax<T>),
      erased(&amax_backward<T>),
      erased(&amin<T>),
      erased(&amin_backward<T>),
      erased(&argmax<T>),
      erased(&var<T>),
      erased(&var_backward<T>),
      erased(&cumsum<T>),
      erased(&cumprod<T>),
      erased(&cumprod_backward<T>),
      erased(&dropout_forward<T>),
      erased(&dropout_backward<T>),
      erased(&fill_uniform<T>),
      erased(&fill_normal<T>),
      erased(&draw_uniform<T>),
      erased(&draw_normal<T>),
      erased(&is_below<T>),
      erased(&index_select_backward<T>),
      erased(&gather_backward<T>),
      erased(&scatter<T>),
      erased(&sgd_step<T>),
      erased(&adam_step<T>),
      erased(&rms_prop_step<T>),
      erased(&adagrad_step<T>),
      erased(&square_sum<T>),
  };
};
template struct Floating<float>;
template struct Floating<double>;

template <class T>
struct Movement {
  static inline const Erased table[] = {
      erased(&fill<T>),           erased(&argsort<T>),         erased(&take_block<T>),      erased(&put_block<T>),
      erased(&copy_strided<T>),   erased(&scatter_strided<T>), erased(&index_select<T>),    erased(&gather<T>),
      erased(&convert<T, float>), erased(&convert<float, T>),  erased(&convert<T, double>), erased(&convert<double, T>),
      erased(&pad_block<T>),
  };
};
template struct Movement<float>;
template struct Movement<double>;
template struct Movement<std::int32_t>;
template struct Movement<std::int64_t>;
template struct Movement<std::uint8_t>;
template struct Movement<bool>;
template struct Movement<bf16>;
template struct Movement<half>;

// Other integers are read from files, converted and sorted.
template <class T>
struct Copy {
  static inline const Erased table[] = {erased(&fill<T>), erased(&argsort<T>),
                                        erased(&copy_strided<T>), erased(&scatter_strided<T>),
                                        erased(&convert<T, float>), erased(&convert<float, T>)};
};
template struct Copy<std::int8_t>;
template struct Copy<std::int16_t>;
template struct Copy<std::uint16_t>;
template struct Copy<std::uint32_t>;
template struct Copy<std::uint64_t>;

// What is not a conversion around a kernel for floats. Products of bf16 depend on the library's processor.
template <class T, class Other>
struct Narrower {
  static inline const Erased table[] = {
      erased(&axpy<T>),           erased(&scale<T>),   erased(&cumsum<T>),        erased(&cumprod<T>),
      erased(&convert<T, Other>), erased(&gemm<T, T>), erased(&convert<bool, T>), erased(&convert<std::int64_t, T>),
      erased(&gemm<T, float>),    erased(&gemm_stack<T>)};
};
template struct Narrower<bf16, half>;
template struct Narrower<half, bf16>;

template <class... T>
struct Integers {
  static inline const Erased table[] = {erased(&draw_integers<T>)...};
};
template struct Integers<std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t, std::uint16_t,
                         std::uint32_t, std::uint64_t>;

}  // namespace chorus::kernels
