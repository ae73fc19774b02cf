#pragma once
/// How ranks come to memory that they have in common.

#include <unistd.h>

#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/comm/shared_window.hpp>
#include <chorus/comm/transport/shared_memory.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::comm {

template <class Communicator>
std::vector<std::shared_ptr<std::byte>> allocate_shared(Communicator& communicator, std::size_t bytes) {
  struct Message {
    Window window = {};
    std::int64_t pid = 0, bytes = 0;
  };
  static_assert(is_message<Message, sizeof(Window) + 16>);
  const auto own = static_cast<std::size_t>(communicator.rank());
  std::shared_ptr<std::byte> mine;
  Message message{.pid = getpid(), .bytes = static_cast<std::int64_t>(bytes)};
  if (bytes > 0) try {
      mine = SharedMemory::allocate(bytes);
      message.window = SharedMemory::find(mine.get(), bytes);
    } catch (const CommError&) {  // the others hear of it
    }
  const auto messages = all_gather_structs(communicator, message);
  std::vector<std::shared_ptr<std::byte>> memory(messages.size());
  std::int32_t mapped = bytes == 0 || mine ? 1 : 0;
  try {
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      if (rank == own || messages[rank].bytes == 0) continue;
      const auto& window = messages[rank].window;
      const auto region = std::make_shared<SharedRegion>(open_region(static_cast<int>(messages[rank].pid), window));
      memory[rank] = {region, region->data() + window.offset};
    }
  } catch (const CommError&) {
    mapped = 0;
  }
  communicator.all_reduce(std::span(&mapped, 1), ReduceOp::min, {});
  if (mapped == 0) return {};
  memory[own] = std::move(mine);
  return memory;
}

}  // namespace chorus::comm
