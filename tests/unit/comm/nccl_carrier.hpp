#pragma once
/// NCCL's stand-in as a backend that `connect` knows, for tests that run over any of them.

#include <chorus/comm/connect.hpp>
#include <chorus/comm/split.hpp>

#include "nccl_stand_in.hpp"

namespace test {

/// One rank: the communicator over host memory, the one that carries the stand-in's collectives, and the device.
struct NcclCarrier {
  ch::comm::AnyCommunicator control, data;
  std::shared_ptr<StandInDevice> device = std::make_shared<StandInDevice>(&data);
  ch::comm::detail::NcclEngine<StandIn> engine;

  explicit NcclCarrier(const ch::comm::World& world)
      : control(ch::comm::connect(world)),
        data(ch::comm::connect(ch::comm::split(control, world, 0))),
        engine(control, 0, world.timeout, StandIn{device}) {
    of(engine) = this;
  }
  NcclCarrier(const NcclCarrier&) = delete;
  ~NcclCarrier() { of(engine) = nullptr; }

  /// `host_computes`: see StandInDevice, which policies on CPUs want.
  static void register_it(bool host_computes = false) {
    host() = host_computes;
    ch::comm::register_backend(ch::comm::Backend::nccl, [](const ch::comm::World& world) {
      const auto carrier = std::make_shared<NcclCarrier>(world);
      carrier->device->host_computes = host();
      return std::shared_ptr<ch::comm::Engine>(carrier, &carrier->engine);
    });
  }
  /// What is behind a communicator; null where that is something else.
  static NcclCarrier* behind(const ch::comm::AnyCommunicator& c) { return of(c.engine()); }

  /// Has the compute stream do `work`, behind what it was given so far.
  void compute(std::function<void()> work) {
    if (device->host_computes)
      work();
    else
      device->compute(std::move(work));
  }
  /// Returns when the streams have done all they were given; throws what has failed.
  void synchronize() {
    ch::check<ch::Error>(device->finish(), "the compute stream did not come to its end");
    engine.queue().synchronize();
  }

 private:
  static bool& host() {
    static bool computes = false;
    return computes;
  }
  static NcclCarrier*& of(const ch::comm::Engine& engine) {
    static std::map<const ch::comm::Engine*, NcclCarrier*> all;
    return all[&engine];
  }
};

}  // namespace test
