#include <chorus/tensor/tensor.hpp>

#include <thread>
#include <vector>

#include <catch.hpp>

#include "../message_of.hpp"

namespace allocator_test {

namespace ch = chorus;
using Storage = ch::Storage<ch::Cpu>;

// By default a sanitizer ends the program when memory runs out, which one test provokes.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

// Devices that no other test uses.
constexpr ch::Cpu device{40}, shared{41};
auto& allocator() { return ch::CachingAllocator<ch::Cpu>::of(device); }

TEST_CASE("freed memory is used again") {
  const void* first;
  {
    const Storage block(device, 1000);
    first = block.data();
  }
  const auto before = allocator().system_allocations();
  const Storage same(device, 1000);
  CHECK(same.data() == first);
  const Storage another(device, 1000);
  CHECK(another.data() != first);
  CHECK(allocator().system_allocations() == before + 1);
}

TEST_CASE("a repeated step asks the system for nothing") {
  const auto step = [] {
    std::vector<ch::Tensor<float, 2>> alive;
    for (const ch::Index size : {1, 7, 64, 65, 1000, 100'000})
      alive.push_back(ch::Tensor<float, 2>::empty({size, 3}, device));
  };
  step();
  const auto before = allocator().system_allocations();
  for (int i = 0; i < 3; ++i) step();
  CHECK(allocator().system_allocations() == before);
}

TEST_CASE("blocks are aligned, and at most a quarter larger than asked") {
  for (std::size_t bytes = 1; bytes < 5'000'000; bytes = bytes * 9 / 8 + 1) {
    CAPTURE(bytes);
    const Storage block(device, bytes);
    CHECK(block.bytes() >= bytes);
    if (bytes > 256) CHECK(static_cast<double>(block.bytes()) <= 1.25 * static_cast<double>(bytes) + 1);
    CHECK(reinterpret_cast<std::uintptr_t>(block.data()) % 64 == 0);
    static_cast<char*>(block.data())[0] = static_cast<char*>(block.data())[block.bytes() - 1] = 1;
  }
  CHECK(Storage(device, 0).data() != nullptr);
}

TEST_CASE("memory is accounted by device and kind") {
  const auto held = [](ch::trace::Memory kind) { return ch::trace::memory(device.index, kind); };
  const auto activations = held(ch::trace::Memory::activations), optimizer = held(ch::trace::Memory::optimizer);
  {
    const Storage plain(device, 512);
    const ch::MemoryScope scope(ch::trace::Memory::optimizer);
    const Storage state(device, 1024);
    CHECK(held(ch::trace::Memory::activations) == activations + 512);
    CHECK(held(ch::trace::Memory::optimizer) == optimizer + 1024);
    const auto share = state;
    CHECK(held(ch::trace::Memory::optimizer) == optimizer + 1024);
  }
  CHECK(held(ch::trace::Memory::activations) == activations);
  CHECK(held(ch::trace::Memory::optimizer) == optimizer);
  CHECK(ch::trace::memory(device.index).peak >= 1536);
}

TEST_CASE("unused memory can be given back") {
  { const Storage block(device, 3'000'000); }
  allocator().empty_cache();
  const auto before = allocator().system_allocations();
  { const Storage block(device, 3'000'000); }
  CHECK(allocator().system_allocations() == before + 1);
}

TEST_CASE("handles count their block") {
  Storage a(device, 100);
  CHECK(a.owners() == 1);
  Storage b = a, c = std::move(b);
  CHECK(a.owners() == 2);
  CHECK(b.data() == nullptr);
  c = {};
  CHECK(a.owners() == 1);
  a = Storage(a);
  CHECK(a.owners() == 1);
  CHECK(a.device() == device);
}

TEST_CASE("threads may take and give back at once") {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      std::vector<Storage> alive;
      for (int i = 0; i < 2000; ++i) {
        const Storage block(shared, static_cast<std::size_t>(100 + (i * 37 + t) % 3000));
        static_cast<char*>(block.data())[0] = static_cast<char>(t);
        if (i % 3 == 0) alive.push_back(block);
        if (alive.size() > 50) alive.clear();
        if (static_cast<char*>(block.data())[0] != static_cast<char>(t)) std::abort();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(ch::trace::memory(shared.index).current == 0);
}

TEST_CASE("messages of the allocator") {
  CHECK(message_of<ch::DeviceError>([] { Storage(ch::Cpu{64}, 1); }) ==
        "device cpu:64 does not exist: cpu devices are numbered 0 to 63");
  CHECK(message_of<ch::DeviceError>([] { ch::Tensor<float, 1>::zeros({1}, ch::Cpu{-1}); }) ==
        "device cpu:-1 does not exist: cpu devices are numbered 0 to 63");
  const auto message = message_of<ch::Error>([] { Storage(device, std::size_t{1} << 62); });
  CHECK(message.starts_with("out of memory on cpu:40: asked for 4611686018427387904 bytes; in use: activations 0 MiB"));
}

}  // namespace allocator_test
