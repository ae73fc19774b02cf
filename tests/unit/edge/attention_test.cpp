#include <chorus/ops/attention.hpp>
#include <chorus/ops/ctc_loss.hpp>

#include "edge.hpp"

namespace attention_test {
using namespace edge;

// [batch, 1, 3, 3]
template <class F>
ch::Tensor<bool, 4, Device> mask(Index batch, const F& sees) {
  auto out = ch::Tensor<bool, 4>::empty({batch, 1, 3, 3});
  for (Index b = 0; b < batch; ++b)
    for (Index i = 0; i < 3; ++i)
      for (Index j = 0; j < 3; ++j) out.data()[(b * 3 + i) * 3 + j] = sees(b, i, j);
  return ch::to_device(out, Device{});
}
// This key and the one before; the second sample has one key alone.
bool window(Index b, Index i, Index j) { return (j == i || j == i - 1) && !(b == 1 && j > 0); }
bool nothing(Index, Index, Index) { return false; }

template <class T>
Tensor<T, 4> added(const ch::Tensor<bool, 4, Device>& seen) {
  return ch::masked_fill(Tensor<T, 4>::full(seen.shape(), T(-INFINITY), Device{}), seen, 0);
}

TEST_CASE("attention at the edge is PyTorch's") {
  Group group("attention");
  const auto is_right = [&](const char* name, const auto& f) {
    operator_is_right<4, 4, 4>(group, name, f, Rounding::absolute);
  };
  const auto attend = [](const auto&... in) { return ch::scaled_dot_product_attention(in...); };
  is_right("attention", attend);
  is_right("attention causal", [=](const auto& q, const auto& k, const auto& v) { return attend(q, k, v, true); });
  is_right("attention window and padding",
           [=](const auto& q, const auto& k, const auto& v) { return attend(q, k, v, mask(2, window)); });
  is_right("attention all masked",
           [=](const auto& q, const auto& k, const auto& v) { return attend(q, k, v, mask(q.shape()[0], nothing)); });
  is_right("attention window and padding added", [=](const auto& q, const auto& k, const auto& v) {
    using T = typename ch::tensor_of<std::decay_t<decltype(q)>>::value_type;
    return attend(q, k, v, added<T>(mask(2, window)));
  });
  is_right("attention all masked added", [=](const auto& q, const auto& k, const auto& v) {
    using T = typename ch::tensor_of<std::decay_t<decltype(q)>>::value_type;
    return attend(q, k, v, added<T>(mask(2, nothing)));
  });
  is_right("attention causal and masked", [=](const auto& q, const auto& k, const auto& v) {
    const auto later = mask(2, [](Index b, Index i, Index j) { return window(b, i, j) && j > 0; });
    return ch::scaled_dot_product_attention(q, k, v, later, {.causal = true});
  });
  group_is_whole(group);
}

TEST_CASE("ctc_loss at the edge is PyTorch's") {
  Group group("ctc");
  const auto labels = ch::Tensor<std::int64_t, 2>::from({1, 2, 2, 3, 3, 1}, {2, 3});
  const auto times = ch::Tensor<std::int64_t, 1>::from({5, 3}, {2}),
             lengths = ch::Tensor<std::int64_t, 1>::from({2, 3}, {2});
  for (const bool zero : {false, true}) {
    const std::string suffix = zero ? " zero" : "";
    const auto is_right = [&](const std::string& name, const auto& f) {
      operator_is_right<3>(group, name + suffix, f, Rounding::absolute);
    };
    is_right("ctc_loss none", [&](const auto& x) {
      return ch::ctc_loss_per_sample(ch::log_softmax(x, 2), labels, times, lengths, {.zero_infinity = zero});
    });
    is_right("ctc_loss mean", [&](const auto& x) {
      return ch::ctc_loss(ch::log_softmax(x, 2), labels, times, lengths, {.zero_infinity = zero});
    });
    is_right("ctc_loss sum", [&](const auto& x) {
      return ch::ctc_loss(ch::log_softmax(x, 2), labels, times, lengths,
                          {.reduction = ch::Reduction::sum, .zero_infinity = zero});
    });
  }
  group_is_whole(group);
}

}  // namespace attention_test
