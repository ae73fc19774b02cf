#pragma once
/// Gradients that are sent in one byte per number.

#include <algorithm>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/hooks/bucket_states.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace chorus {

/// Each block of 512 numbers is sent as integers in [-127, 127] and one float, its unit (Dettmers, "8-bit
/// approximations for parallelism in deep learning", ICLR 2016, with linear steps). Ranks all-gather the messages and
/// add them in rank order. The rounding error is added to the next step's gradient. Each of n ranks sends n - 1 times
/// the bucket's numbers as bytes, and 4 bytes per block: less than an all-reduce of floats for up to 8 ranks.
struct Quantize8Bit {
  static constexpr std::size_t block = 512;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    auto& state = states.of<State<T>>(bucket.index);
    const std::size_t count = bucket.gradients.size(), blocks = (count + block - 1) / block;
    if (communicator.size() == 1) {
      if (!state.rest.empty()) add_rest(bucket, state);
      return {};
    }
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    state.rest.resize(count);
    state.values.resize(count);
    state.own.resize(blocks * sizeof(float) + count);
    state.all.resize(state.own.size() * static_cast<std::size_t>(communicator.size()));
    copy_bytes(Cpu{}, state.values.data(), bucket.device, bucket.gradients.data(), count * sizeof(T));
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t begin = b * block, end = std::min(count, begin + block);
      T largest = 0;
      for (std::size_t i = begin; i < end; ++i) {
        if (even > 0) state.values[i] += state.rest[i] / even;
        const T size = std::abs(state.values[i]);
        if (size > largest || std::isnan(size)) largest = size;
      }
      const T unit = static_cast<T>(static_cast<float>(largest / 127));
      auto* steps = reinterpret_cast<std::int8_t*>(state.own.data() + blocks * sizeof(float));
      const bool finite = std::isfinite(unit);
      for (std::size_t i = begin; i < end; ++i) {
        const T step = finite && unit > 0 ? std::nearbyint(std::clamp(state.values[i] / unit, T{-127}, T{127})) : T{0};
        steps[i] = static_cast<std::int8_t>(finite ? step : T{1});  // times a NaN unit
        if (even > 0) state.rest[i] = finite ? even * (state.values[i] - step * unit) : T{0};
      }
      const float sent = static_cast<float>(unit) * static_cast<float>(bucket.weight);
      std::memcpy(state.own.data() + b * sizeof(float), &sent, sizeof sent);
    }
    return communicator.all_gather_async(std::span<const std::uint8_t>(state.own), std::span<std::uint8_t>(state.all),
                                         {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    const std::size_t count = bucket.gradients.size(), blocks = (count + block - 1) / block;
    std::fill(state.values.begin(), state.values.end(), T{0});
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(communicator.size()); ++rank) {
      const std::uint8_t* message = state.all.data() + rank * state.own.size();
      const auto* steps = reinterpret_cast<const std::int8_t*>(message + blocks * sizeof(float));
      for (std::size_t b = 0; b < blocks; ++b) {
        float unit;
        std::memcpy(&unit, message + b * sizeof(float), sizeof unit);
        for (std::size_t i = b * block; i < std::min(count, (b + 1) * block); ++i)
          state.values[i] += static_cast<T>(unit) * static_cast<T>(steps[i]);
      }
    }
    copy_bytes(bucket.device, bucket.gradients.data(), Cpu{}, state.values.data(), count * sizeof(T));
    return {};
  }

  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& rest = states.of<State<T>>(bucket.index).rest;
    if (make) rest.resize(bucket.gradients.size());
    if (rest.empty()) return;
    for (const auto& part : bucket.parts) visit("rest", part, part.shape, Cpu{}, rest.data() + part.begin);
  }

  template <class T>
  struct State {
    std::vector<T> rest, values;         // residual; scratch
    std::vector<std::uint8_t> own, all;  // messages: the units of all blocks, then the integers
  };
  detail::BucketStates states = {};

 private:
  template <class T, Device D>
  static void add_rest(const GradBucket<T, D>& bucket, State<T>& state) {
    auto rest = Tensor<T, 1, D>::empty({static_cast<Index>(state.rest.size())}, bucket.device);
    copy_bytes(bucket.device, rest.data(), Cpu{}, state.rest.data(), bucket.gradients.size_bytes());
    detail::add_rest(rest, bucket.gradients, bucket.device);
    state.rest.clear();
  }
};

}  // namespace chorus
