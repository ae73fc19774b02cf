#pragma once
/// Which ranks hold the same GPU.

#include <algorithm>
#include <array>
#include <chorus/comm/objects.hpp>
#include <cstddef>
#include <cstdint>

namespace chorus::comm {

/// A rank's GPU. Its number would not do: a launcher may show each process one GPU alone, which is then number 0.
struct GpuSeat {
  std::uint64_t machine = 0;
  std::array<std::uint8_t, 16> uuid{};

  bool operator==(const GpuSeat&) const = default;
};

/// What the ranks' GPUs mean for NCCL.
struct GpuSharing {
  bool shared = false;      ///< another rank holds this rank's GPU
  bool one_machine = true;  ///< all ranks are on one machine
};

/// All ranks call it, each with its own GPU.
template <class Communicator>
[[gnu::cold]] GpuSharing gpu_sharing(Communicator& ranks, const GpuSeat& own) {
  const auto seats = all_gather_structs(ranks, own);
  return {.shared = std::count(seats.begin(), seats.end(), own) > 1,
          .one_machine = std::all_of(seats.begin(), seats.end(),
                                     [&](const GpuSeat& seat) { return seat.machine == own.machine; })};
}

}  // namespace chorus::comm
