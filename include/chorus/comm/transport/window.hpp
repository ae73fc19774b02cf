#pragma once
/// `Window`: the location of a rank's data, for direct reads and writes by the other ranks of its machine.

#include <chorus/comm/transport/fixed_text.hpp>
#include <cstddef>
#include <cstdint>

namespace chorus::comm {

/// Identifies data of a process for other processes. Between threads an address is enough.
struct Window {
  std::uint64_t key = 0;     ///< random, also stored in front of the memory; 0: others can't reach it
  std::uint64_t bytes = 0;   ///< of the whole region
  std::uint64_t offset = 0;  ///< of the data in the region
  std::byte* address = nullptr;
  std::int32_t fd = -1;  ///< the owner's descriptor of the region
  std::int32_t reserved = 0;
};
static_assert(is_message<Window, 40>);

}  // namespace chorus::comm
