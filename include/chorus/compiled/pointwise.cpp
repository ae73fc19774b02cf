// Part of the library chorus::compiled: the element-wise functions of the library's own functors on the CPU.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/kernels/pointwise.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/distances.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/recurrent.hpp>
#include <chorus/ops/rounding.hpp>
#include <chorus/ops/special_functions.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/muon.hpp>
#include <chorus/optim/radam.hpp>
#include <chorus/optim/rmsprop.hpp>
#include <chorus/parallel/hooks/not_sent.hpp>

namespace chorus::kernels {

template <class T, std::size_t N>
using Arrays = std::array<T*, N>;
using Strides = std::span<const Index>;

// Tables name the kernels of a functor, so that they are emitted here; nobody reads them.
template <class F, class T, std::size_t N>
struct OfSameShape {
  static inline void (*const forward)(Cpu, const F&, Index, const Arrays<const T, N>&, T*) = pointwise_forward;
  static inline void (*const backward)(Cpu, const F&, Index, const Arrays<const T, N>&, const T*, const Arrays<T, N>&,
                                       const std::array<bool, N>&) = pointwise_backward;
};
template <class F, class T, std::size_t N>
struct Broadcast {
  static inline void (*const forward)(Cpu, const F&, Strides, const Arrays<const T, N>&, const std::array<Strides, N>&,
                                      T*) = pointwise_forward;
  static inline void (*const backward)(Cpu, const F&, Strides, const Arrays<const T, N>&, const std::array<Strides, N>&,
                                       const T*, const Arrays<T, N>&, const std::array<Strides, N>&,
                                       const std::array<bool, N>&) = pointwise_backward;
};

#define CHORUS_UNARY(F)                               \
  template struct OfSameShape<functors::F, float, 1>; \
  template struct OfSameShape<functors::F, double, 1>;
#define CHORUS_OF_SEVERAL(F, N)                        \
  template struct OfSameShape<functors::F, float, N>;  \
  template struct OfSameShape<functors::F, double, N>; \
  template struct Broadcast<functors::F, float, N>;    \
  template struct Broadcast<functors::F, double, N>;

CHORUS_UNARY(Abs)
CHORUS_UNARY(AddScalar)
CHORUS_UNARY(Ceil)
CHORUS_UNARY(Celu)
CHORUS_UNARY(Clamp)
CHORUS_UNARY(Cos)
CHORUS_UNARY(Digamma)
CHORUS_UNARY(DivScalar)
CHORUS_UNARY(DivideInto)
CHORUS_UNARY(DivisorOrOne)
CHORUS_UNARY(Elu)
CHORUS_UNARY(Erf)
CHORUS_UNARY(Exp)
CHORUS_UNARY(Floor)
CHORUS_UNARY(Gelu)
CHORUS_UNARY(GeluTanh)
CHORUS_UNARY(Hardshrink)
CHORUS_UNARY(Hardsigmoid)
CHORUS_UNARY(Hardswish)
CHORUS_UNARY(IsZero)
CHORUS_UNARY(LeakyRelu)
CHORUS_UNARY(Lgamma)
CHORUS_UNARY(Log)
CHORUS_UNARY(Log1p)
CHORUS_UNARY(LogSigmoid)
CHORUS_UNARY(Mish)
CHORUS_UNARY(MulScalar)
CHORUS_UNARY(NanToNum)
CHORUS_UNARY(Neg)
CHORUS_UNARY(PowScalar)
CHORUS_UNARY(Reciprocal)
CHORUS_UNARY(Relu)
CHORUS_UNARY(Relu6)
CHORUS_UNARY(Round)
CHORUS_UNARY(Rsqrt)
CHORUS_UNARY(Selu)
CHORUS_UNARY(Sigmoid)
CHORUS_UNARY(Sign)
CHORUS_UNARY(Silu)
CHORUS_UNARY(Sin)
CHORUS_UNARY(Softplus)
CHORUS_UNARY(Softshrink)
CHORUS_UNARY(Softsign)
CHORUS_UNARY(Sqrt)
CHORUS_UNARY(Square)
CHORUS_UNARY(SquareUnit)
CHORUS_UNARY(Stirling)
CHORUS_UNARY(SubtractFrom)
CHORUS_UNARY(Tanh)
CHORUS_UNARY(Tanhshrink)
CHORUS_UNARY(Threshold)

CHORUS_OF_SEVERAL(AbsoluteError, 2)
CHORUS_OF_SEVERAL(Add, 2)
CHORUS_OF_SEVERAL(Atan2, 2)
CHORUS_OF_SEVERAL(BinaryCrossEntropy, 2)
CHORUS_OF_SEVERAL(CosineEmbedding, 2)
CHORUS_OF_SEVERAL(Div, 2)
CHORUS_OF_SEVERAL(GaussianNll, 3)
CHORUS_OF_SEVERAL(GruCandidate, 4)
CHORUS_OF_SEVERAL(GruState, 4)
CHORUS_OF_SEVERAL(HingeEmbedding, 2)
CHORUS_OF_SEVERAL(Huber, 2)
CHORUS_OF_SEVERAL(KlDivergence, 2)
CHORUS_OF_SEVERAL(LogAddExp, 2)
CHORUS_OF_SEVERAL(LstmCell, 4)
CHORUS_OF_SEVERAL(LstmOutput, 2)
CHORUS_OF_SEVERAL(MarginRanking, 3)
CHORUS_OF_SEVERAL(MaskedFill, 2)
CHORUS_OF_SEVERAL(Maximum, 2)
CHORUS_OF_SEVERAL(Minimum, 2)
CHORUS_OF_SEVERAL(Mul, 2)
CHORUS_OF_SEVERAL(PoissonNll, 2)
CHORUS_OF_SEVERAL(PoissonNllOfLog, 2)
CHORUS_OF_SEVERAL(Pow, 2)
CHORUS_OF_SEVERAL(Prelu, 2)
CHORUS_OF_SEVERAL(ScaleShift, 3)
CHORUS_OF_SEVERAL(SmoothL1, 2)
CHORUS_OF_SEVERAL(SoftMargin, 2)
CHORUS_OF_SEVERAL(SquaredError, 2)
CHORUS_OF_SEVERAL(Sub, 2)
CHORUS_OF_SEVERAL(WeightedBinaryCrossEntropy, 4)
CHORUS_OF_SEVERAL(Where, 3)

// Steps of optimizers and of hooks have no backward.
template <class F, class T, std::size_t N>
struct Forward {
  static inline void (*const forward)(Cpu, const F&, Index, const Arrays<const T, N>&, T*) = pointwise_forward;
};
#define CHORUS_STEP(F, N)                              \
  template struct Forward<optim::detail::F, float, N>; \
  template struct Forward<optim::detail::F, double, N>;
CHORUS_STEP(CenteredMean, 3)
CHORUS_STEP(CenteredSquare, 3)
CHORUS_STEP(CenteredStep, 5)
CHORUS_STEP(LambDirection, 3)
CHORUS_STEP(DividedBy, 1)
CHORUS_STEP(Lerp, 2)
CHORUS_STEP(LionStep, 3)
CHORUS_STEP(Mix, 2)
CHORUS_STEP(MixSquare, 2)
CHORUS_STEP(RAdamStep, 3)
template struct Forward<chorus::detail::NotSent, float, 2>;
template struct Forward<chorus::detail::NotSent, double, 2>;

}  // namespace chorus::kernels
