// What the CUDA runtime answers now and then: that it is not done yet, that there are too many peers, that a call
// failed. Nothing of it is left for the next call, and memory is given out only in order.
#include <catch.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cuda/fault.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/tensor/tensor.hpp>
#include <vector>

#include "../../unit/comm/processes.hpp"
#include "../../unit/message_of.hpp"

namespace runtime_test {

using namespace chorus;
using Memory = Storage<Cuda>;

TEST_CASE("cuda: that work is not done yet is no error of the next call") {
  auto& counters = emulation::counters();
  const cuda::Event event(Cuda{});
  event.record(cuda::current_stream(Cuda{}));
  counters.not_ready = 1;
  CHECK_FALSE(event.done());
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(event.done());
  counters.not_ready = 3;
  cuda::synchronize(cuda::current_stream(Cuda{}));
  CHECK(counters.not_ready == 0);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("cuda: a copy to the host begins when what it copies is there, for it waits without a limit") {
  auto& counters = emulation::counters();
  const auto there = Tensor<float, 1, Cuda>::zeros({1000});
  kernels::fill(Cuda{}, Index{1000}, there.data(), 3.0f);
  const auto before = counters.waiting_copies.load();
  CHECK(there.to_vector() == std::vector<float>(1000, 3.0f));
  CHECK(counters.waiting_copies == before);
}

TEST_CASE("cuda: a device that has as many peers as it may copies from others still") {
  emulation::counters().too_many_peers = 1;
  const auto from = Tensor<float, 1, Cuda>::ones({10}, Cuda{1});
  const auto to = Tensor<float, 1, Cuda>::zeros({10}, Cuda{0});
  copy_bytes(to.device(), to.data(), from.device(), from.data(), from.bytes());
  CHECK(emulation::counters().too_many_peers == 0);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(to.to_vector() == std::vector<float>(10, 1.0f));
}

TEST_CASE("cuda: a copy from the host that found no pinned memory may be tried again") {
  emulation::counters().failing_host_allocations = 1;
  const std::vector<float> numbers(10, 2.0f);
  const auto there = Tensor<float, 1, Cuda>::empty({10}, Cuda{2});
  for (int turn = 0; turn < 5; ++turn) {  // so often that all pieces have their turn
    const auto copy = [&] { copy_bytes(Cuda{2}, there.data(), Cpu{}, numbers.data(), there.bytes()); };
    if (turn == 0)
      CHECK_THROWS_AS(copy(), DeviceError);
    else
      copy();
  }
  CHECK(there.to_vector() == numbers);
}

TEST_CASE("cuda: memory that another stream may still work with is not given out before it is in order") {
  constexpr std::size_t bytes = 40'000'000;
  const cuda::Stream other(Cuda{});
  const void* first = nullptr;
  {
    const Memory block(Cuda{}, bytes);
    first = block.data();
    cuda::record_use(block.block(), other);
    emulation::counters().failing_waits = 2;  // at its release, and when memory is asked for
  }
  CHECK(emulation::counters().failing_waits == 1);
  CHECK(Memory(Cuda{}, bytes).data() != first);
  CHECK(emulation::counters().failing_waits == 0);
  const Memory one(Cuda{}, bytes), two(Cuda{}, bytes);
  CHECK((one.data() == first || two.data() == first));
}

TEST_CASE("cuda: a fault is thrown when the kernel has written all of it, once") {
  cuda::Fault& fault = *cuda::fault_of(Cuda{1});
  fault.set = cuda::Fault::claimed;
  CHECK_NOTHROW(cuda::check_faults(Cuda{1}));
  const auto note = kernels::cuda::fault_note(Cuda{1}, "gather", "index");
  note(3, 7, 5);  // the first is kept
  fault.set = cuda::Fault::none;
  note(4, 8, 5);
  note(5, 9, 5);
  CHECK(fault.set == cuda::Fault::written);
  CHECK(message_of<UsageError>([] { cuda::check_faults(Cuda{1}); }) ==
        "gather: index 8 at position 4 is not in [0, 5)");
  CHECK_NOTHROW(cuda::check_faults(Cuda{1}));
}

TEST_CASE("cuda: where cuBLASLt calls a bias of doubles invalid, a kernel adds it") {
  const auto x = Tensor<double, 2, Cuda>::from({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4});
  nn::Linear<Cuda, double> layer{4, 2};
  layer.weight.assign(Tensor<double, 2, Cuda>::full({2, 4}, 0.5));
  layer.bias.assign(Tensor<double, 1, Cuda>::from({1, 2}, {2}));
  CHECK(value_of(layer(x)).to_vector() == std::vector<double>{6, 7, 14, 15});
}

// On a new stream: bytes of the driver's blocks that hold tensors of 40, 4000 and 0 bytes, and another one after them,
// or -1 inside a block; then how many blocks there are more by then.
std::string blocks(const char* exact) {
  return test::Ranks(1,
                     [exact](const comm::World&) {
                       setenv("CHORUS_CUDA_EXACT_MEMORY", exact, 1);
                       const cuda::Stream stream(Cuda{});
                       const cuda::StreamScope scope(stream);
                       const auto& blocks = emulation::device_memory().blocks;
                       const auto bytes_of = [&](const Memory& memory) {
                         const auto at = blocks.find(static_cast<const char*>(memory.data()));
                         return at == blocks.end() ? " -1" : cat(' ', at->second.first - at->first);
                       };
                       std::string text;
                       const auto before = blocks.size();
                       {
                         const Memory small(Cuda{}, 40), larger(Cuda{}, 4000), none(Cuda{}, 0);
                         text = bytes_of(small) + bytes_of(larger) + bytes_of(none);
                       }
                       const Memory later(Cuda{}, 4000);
                       return cat(text, bytes_of(later), ' ', blocks.size() - before);
                     })
      .texts()[0];
}

TEST_CASE("cuda: exact memory gives each tensor a block of its own, and gives it back") {
  CHECK(blocks("1") == " 40 4000 1 4000 1");
  CHECK(blocks("0") == " 2097152 -1 -1 -1 1");
  CHECK_THAT(blocks("yes"), Catch::Matchers::Contains("CHORUS_CUDA_EXACT_MEMORY must be 0 or 1, got 'yes'"));
}

}  // namespace runtime_test
