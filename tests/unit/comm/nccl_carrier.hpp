#pragma once
/// The NCCL stand-in as a backend that `connect` knows, for tests that run over any backend.

#include <chorus/comm/connect.hpp>
#include <chorus/comm/split.hpp>

#include "nccl_stand_in.hpp"

namespace test {

/// One rank: the communicator over host memory, the communicator that carries the stand-in's collectives, the device.
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

  /// `host_computes`: see StandInDevice; policies on CPUs need it.
  static void register_it(bool host_computes = false) {
    host() = host_computes;
    ch::comm::register_backend(ch::comm::Backend::nccl, [](const ch::comm::World& world) {
      const auto carrier = std::make_shared<NcclCarrier>(world);
      carrier->device->host_computes = host();
      return std::shared_ptr<ch::comm::Engine>(carrier, &carrier->engine);
    });
  }
  /// The stand-in behind a communicator, or null if the communicator has another backend.
  static NcclCarrier* behind(const ch::comm::AnyCommunicator& c) { return of(c.engine()); }

  /// Enqueues `work` on the compute stream.
  void compute(std::function<void()> work) {
    if (device->host_computes)
      work();
    else
      device->compute(std::move(work));
  }
  /// Waits until the streams are idle; throws their error.
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
