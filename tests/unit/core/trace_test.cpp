#include <chorus/core/trace.hpp>

#include <catch.hpp>

#include "../message_of.hpp"

namespace trace_test {

namespace trace = chorus::trace;

TEST_CASE("traffic is counted by device and by what it carried") {
  trace::reset_traffic();
  trace::sent(3, trace::Traffic::gradients, 100);
  trace::sent(3, trace::Traffic::gradients, 20);
  trace::sent(3, trace::Traffic::control, 1);
  CHECK(trace::bytes_sent(3, trace::Traffic::gradients) == 120);
  CHECK(trace::bytes_sent(3) == 121);
  CHECK(trace::bytes_sent(4) == 0);
  trace::reset_traffic();
  CHECK(trace::bytes_sent(3) == 0);
}

TEST_CASE("memory is counted by device and kind, with its peak") {
  constexpr int device = 60;
  trace::allocated(device, trace::Memory::parameters, 100);
  trace::allocated(device, trace::Memory::activations, 50);
  trace::allocated(device, trace::Memory::activations, -50);
  CHECK(trace::memory(device).current == 100);
  CHECK(trace::memory(device).peak == 150);
  CHECK(trace::memory(device, trace::Memory::parameters) == 100);
  CHECK(trace::memory(device, trace::Memory::activations) == 0);
  trace::allocated(device, trace::Memory::parameters, -100);
}

TEST_CASE("a device that cannot be is refused") {
  CHECK(message_of<chorus::DeviceError>([] { trace::bytes_sent(128); }) ==
        "trace: device index 128 is not in [0, 128)");
  CHECK(message_of<chorus::DeviceError>([] { trace::sent(-1, trace::Traffic::control, 1); }) ==
        "trace: device index -1 is not in [0, 128)");
}

TEST_CASE("names of what is counted") {
  CHECK(trace::name(trace::Traffic::outputs) == "outputs");
  CHECK(trace::name(trace::Memory::buckets) == "buckets");
}

}  // namespace trace_test
