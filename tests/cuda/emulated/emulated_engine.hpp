#pragma once
/// A communicator for the memory of the emulation's devices.

#include <chorus/comm/connect.hpp>
#include <memory>
#include <string_view>

namespace test {

namespace ch = chorus;

/// Calls name the memory of the emulation's devices, which is the host's, once their streams have come so far.
class EmulatedEngine final : public ch::comm::Engine {
 public:
  explicit EmulatedEngine(const ch::comm::World& world)
      : Engine(world.rank, world.size), host_(ch::comm::connect(world)) {}
  void now(const ch::comm::Call& call) override {
    emulation::finish_all();
    host_.engine().now(call);
  }
  ch::comm::Work later(const ch::comm::Call& call) override {
    emulation::finish_all();
    return host_.engine().later(call);
  }
  void abort(std::string_view why) noexcept override { host_.abort(why); }
  std::string_view name() const override { return "emulated"; }
  bool takes_device_memory() const override { return true; }

 private:
  ch::comm::AnyCommunicator host_;
};

}  // namespace test
