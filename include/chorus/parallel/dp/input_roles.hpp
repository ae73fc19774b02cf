#pragma once
/// InputRoles: which inputs a policy cuts along the batch.

#include <algorithm>
#include <array>
#include <chorus/parallel/dp/samples.hpp>
#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

namespace chorus::dp {

/// Decides which inputs of a policy hold no samples. An unmarked input holds samples if its length is the batch's.
/// Equal length may be chance: a mask [length, length], weights of features. If another size of the inputs also equals
/// the number of samples, the input's role in passes with other batch sizes decides. In the first pass it is refused,
/// or, if it is likely a target, cut with one warning.
class InputRoles {
 public:
  /// How a pass splits its batch, into at most `most` shares. Throws ShapeError if an input's role is unknown.
  template <class... Inputs>
  Split split(std::string_view policy, Index most, int dim, const Inputs&... inputs) {
    const Index batch = detail::samples_of(dim, inputs...);
    Split out{batch, static_cast<std::size_t>(std::clamp<Index>(batch, 1, most)), dim};
    if (out.devices == 1) return out;
    Look now{policy, batch};
    [[maybe_unused]] const auto look = [&]<class X>(const X& x) {
      using T = typename tensor_of<X>::value_type;
      if (detail::has_samples(x, dim) && see(now, value_of(x).shape(), detail::batch_axis_of<X>(dim),
                                             detail::says_batch_axis<X>, std::integral<T> && !std::same_as<T, bool>))
        out.whole.push_back(&x);
    };
    (detail::for_each_tensor(inputs, look), ...);
    end(now);
    return out;
  }

 private:
  /// The inputs of one pass, in order.
  struct Look {
    std::string_view policy;
    Index batch;
    std::span<const Index> first = {}, doubtful = {};
    bool coincides = false;          // another size of the first input equals the number of samples, too
    bool first_is_doubtful = false;  // it is unmarked and may be weights or a mask
    int doubt = 0;                   // 1: labels, 2: a row of numbers, 3: a mask, or samples along another axis
    std::size_t further = 0;
  };
  struct Known {
    std::size_t axes = 0;  // 0: unknown
    bool whole = false;
  };

  // Returns whether an input has no samples, although its length is the batch's. `says`: it is marked. `counts`: it
  // holds integers, so it has labels, not masks or weights.
  bool see(Look& now, std::span<const Index> shape, int axis, bool says, bool counts);
  void end(const Look& now) const;

  std::array<Known, 16> known_{};  // by input
};

}  // namespace chorus::dp

#if !CHORUS_COMPILED
#include <chorus/parallel/dp/input_roles_impl.hpp>
#endif
