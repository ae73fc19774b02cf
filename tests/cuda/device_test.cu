// The device itself: memory, copies, faults that kernels see.
#include <chorus/core/cuda/fault.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/indexing.hpp>
#include <thread>

#include "../unit/message_of.hpp"
#include "compare.hpp"

namespace device_test {

using namespace chorus;
using Memory = Storage<Cuda>;

TEST_CASE("numbers travel to the device and back") {
  if (!gpu_present()) return;
  const auto sent = numbers<float>(6'000'000, 1);  // more pieces of staging than there are
  auto first = sent;
  const auto there = Tensor<float, 1, Cuda>::from(first, {6'000'000});
  first.assign(first.size(), 0.0f);  // may change at once
  CHECK(there.to_vector() == sent);
  const auto copy = Tensor<float, 1, Cuda>::zeros({6'000'000});
  CHECK(copy.to_vector() == std::vector<float>(sent.size()));
  copy_bytes(copy.device(), copy.data(), there.device(), there.data(), there.bytes());
  CHECK(copy.to_vector() == sent);
  if (cuda::device_count() > 1) {
    const auto other = Tensor<float, 1, Cuda>::empty({6'000'000}, Cuda{1});
    copy_bytes(other.device(), other.data(), there.device(), there.data(), there.bytes());
    CHECK(other.to_vector() == sent);
  }
}

TEST_CASE("freed memory is used again on its stream, not on another") {
  if (!gpu_present()) return;
  auto& allocator = CachingAllocator<Cuda>::of(Cuda{});
  for (const std::size_t bytes : {1000u, 700'000u, 30'000'000u}) {
    const void* first = Memory(Cuda{}, bytes).data();
    CHECK(reinterpret_cast<std::uintptr_t>(first) % 256 == 0);
    const auto before = allocator.system_allocations();
    CHECK(Memory(Cuda{}, bytes).data() == first);
    CHECK(allocator.system_allocations() == before);
    const cuda::Stream own(Cuda{});
    const cuda::StreamScope scope(own);
    CHECK(Memory(Cuda{}, bytes).data() != first);
  }
  allocator.empty_cache();
}

TEST_CASE("memory that another stream works with comes back in order") {
  if (!gpu_present()) return;
  constexpr std::size_t bytes = 20'000'000;
  const cuda::Stream other(Cuda{});
  const Memory kept(Cuda{}, bytes);
  zero_bytes(Cuda{}, kept.data(), bytes);
  const void* first = nullptr;
  {
    const Memory block(Cuda{}, bytes);
    first = block.data();
    kernels::fill(Cuda{}, static_cast<Index>(bytes), static_cast<std::uint8_t*>(block.data()), std::uint8_t{7});
    cuda::order(Cuda{}, cuda::compute_stream(Cuda{}), other);
    const cuda::StreamScope scope(other);
    copy_bytes(Cuda{}, kept.data(), Cuda{}, block.data(), bytes);
    cuda::record_use(block.block(), other);
  }
  const Memory again(Cuda{}, bytes);
  CHECK(again.data() == first);
  zero_bytes(Cuda{}, again.data(), bytes);
  cuda::synchronize(Cuda{});
  cuda::order(Cuda{}, other, cuda::compute_stream(Cuda{}));
  std::uint8_t last = 0;
  copy_bytes(Cpu{}, &last, Cuda{}, static_cast<const std::uint8_t*>(kept.data()) + bytes - 1, 1);
  CHECK(last == 7);
}

TEST_CASE("a copy between devices waits for what is copied, and what is copied waits for the copy") {
  if (!gpu_present()) return;
  if (cuda::device_count() < 2) {
    WARN("one GPU: nothing to copy between");
    return;
  }
  const auto here = Tensor<float, 1, Cuda>::empty({3'000'000}, Cuda{0}),
             there = Tensor<float, 1, Cuda>::zeros({3'000'000}, Cuda{1});
  kernels::fill(Cuda{0}, here.numel(), here.data(), 3.0f);
  copy_bytes(Cuda{1}, there.data(), Cuda{0}, here.data(), here.bytes());
  kernels::fill(Cuda{0}, here.numel(), here.data(), 4.0f);
  cuda::synchronize(Cuda{0});
  CHECK(there.to_vector() == std::vector<float>(3'000'000, 3.0f));
}

TEST_CASE("memory is accounted by kind, apart from the CPU's, and its end is an error that says so") {
  if (!gpu_present()) return;
  using Kind = trace::Memory;
  const std::array kinds{Kind::parameters, Kind::gradients, Kind::activations, Kind::optimizer};
  const int slot = trace_slot(Cuda{});
  const auto in_use = [&] {
    std::vector<std::int64_t> bytes;
    for (const Kind kind : kinds) bytes.push_back(static_cast<std::int64_t>(trace::memory(slot, kind)));
    return bytes;
  };
  const auto before = in_use();
  const auto host = trace::memory(0, Kind::optimizer);
  {
    std::vector<Memory> held;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const MemoryScope scope(kinds[i]);
      held.emplace_back(Cuda{}, (4 + i) << 20);
    }
    const auto message = message_of<Error>([] { Memory(Cuda{}, std::size_t{1} << 50); });
    CAPTURE(message);
    CHECK(message.starts_with("out of memory on cuda:0: asked for 1125899906842624 bytes; in use: "));
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const std::int64_t bytes = before[i] + static_cast<std::int64_t>((4 + i) << 20);
      CHECK(in_use()[i] == bytes);
      CHECK(message.find(cat(trace::name(kinds[i]), " ", bytes >> 20, " MiB")) != std::string::npos);
    }
    CHECK(trace::memory(0, Kind::optimizer) == host);
    CHECK(message.find("MiB free") != std::string::npos);
  }
  CHECK(in_use() == before);
}

TEST_CASE("a private pool serves what it has seen, and nothing else once it is sealed") {
  if (!gpu_present()) return;
  const cuda::Stream stream(Cuda{});
  Memory survivor;
  {
    const cuda::PrivatePool pool(Cuda{}, stream);
    const cuda::StreamScope on_stream(stream);
    const cuda::PoolScope scope(pool);
    const auto step = [] {
      const Memory a(Cuda{}, 1000), b(Cuda{}, 3'000'000);
      return std::pair(a.data(), b.data());
    };
    const auto first = step();
    const auto allocations = pool->system_allocations();
    pool->seal(true);
    CHECK(step() == first);
    CHECK(pool->system_allocations() == allocations);
    const auto message = message_of<Error>([] { Memory(Cuda{}, 50'000'000); });
    CHECK(message.starts_with("captured step: the private memory pool of cuda:0 has no block of "));
    pool->seal(false);
    survivor = Memory(Cuda{}, 1000);
    CHECK(survivor.data() == first.first);
  }
  const Memory outside(Cuda{}, 1000);  // not from the pool, whose memory lives as long as the survivor
  CHECK(outside.data() != survivor.data());
  zero_bytes(Cuda{}, survivor.data(), 1000);
  cuda::synchronize(Cuda{});
}

TEST_CASE("what a private pool leaves behind outlives its stream") {
  if (!gpu_present()) return;
  const cuda::Stream other(Cuda{});
  Memory first, second;
  {
    const cuda::Stream stream(Cuda{});
    const cuda::PrivatePool pool(Cuda{}, stream);
    const cuda::StreamScope on_stream(stream);
    const cuda::PoolScope scope(pool);
    first = Memory(Cuda{}, 1000);
    second = Memory(Cuda{}, 3'000'000);
    cuda::record_use(first.block(), other);
  }
  first = {};
  zero_bytes(Cuda{}, second.data(), 3'000'000);
  cuda::synchronize(Cuda{});
  second = {};
}

TEST_CASE("threads may take and give back at once") {
  if (!gpu_present()) return;
  const auto before = trace::memory(trace_slot(Cuda{})).current;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      std::vector<Memory> alive;
      for (int i = 0; i < 500; ++i) {
        alive.emplace_back(Cuda{}, static_cast<std::size_t>(100 + (i * 3701 + t) % 900'000));
        if (alive.size() > 20) alive.clear();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(trace::memory(trace_slot(Cuda{})).current == before);
}

TEST_CASE("what only a kernel sees is thrown by the next wait, once") {
  if (!gpu_present()) return;
  const auto x = Tensor<float, 1, Cuda>::ones({6}), y = Tensor<float, 1, Cuda>::ones({4});
  const auto index = Tensor<std::int64_t, 1, Cuda>::from({1, 7}, {2});
  kernels::index_select(Cuda{}, {1, 3, 2}, 2, index.data(), x.data(), y.data());
  CHECK(message_of<UsageError>([&] { y.to_vector(); }) == "index_select: index 7 at position 1 is not in [0, 3)");
  CHECK(y.to_vector() == std::vector<float>{1, 1, 0, 0});
}

}  // namespace device_test
