#pragma once
/// InputRoles: which inputs of a policy that cuts its batches are cut.

#include <algorithm>
#include <array>
#include <chorus/parallel/dp/samples.hpp>
#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

namespace chorus::dp {

/// Knows which inputs of a policy belong to no sample. One that says nothing belongs to the samples where it is as long
/// as the batch. That may be by chance: a mask [length, length], weights of features. Where the number of samples is
/// another size of the inputs, too, an input is what it was in passes with batches of other sizes. In a first pass it
/// is refused; or, where it is likely to be a target, it is cut, and a warning says so once.
class InputRoles {
 public:
  /// How a pass splits its batch, into `most` shares at most. Throws ShapeError where it isn't known which inputs are
  /// cut.
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
  /// At one pass's inputs, in their order.
  struct Look {
    std::string_view policy;
    Index batch;
    std::span<const Index> first = {}, doubtful = {};
    bool coincides = false;          // the number of samples is another size of the first input, too
    bool first_is_doubtful = false;  // it says nothing, and may be weights or a mask
    int doubt = 0;                   // 1: labels, 2: a row of numbers, 3: a mask, or samples elsewhere
    std::size_t further = 0;
  };
  struct Known {
    std::size_t axes = 0;  // 0: nothing is known
    bool whole = false;
  };

  // Returns whether an input is whole, though it is as long as the batch. `says`: its axis. `counts`: integers, which
  // are labels rather than masks or weights.
  bool see(Look& now, std::span<const Index> shape, int axis, bool says, bool counts);
  void end(const Look& now) const;

  std::array<Known, 16> known_{};  // by their order
};

}  // namespace chorus::dp

#if !CHORUS_COMPILED
#include <chorus/parallel/dp/input_roles_impl.hpp>
#endif
