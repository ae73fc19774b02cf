#pragma once
/// Ranks over the NCCL stand-in, each in its own process.

#include "nccl_stand_in.hpp"
#include "processes.hpp"

namespace test {

using StandInNccl = ch::comm::NcclCommunicator<StandIn>;

/// One rank: the communicator over host memory, the communicator that carries the stand-in's collectives, the device.
struct NcclRank {
  ch::comm::World data_world;
  ch::comm::AnyCommunicator control, data;
  std::shared_ptr<StandInDevice> device;

  NcclRank(const ch::comm::World& world, int data_port, int data_listener)
      : data_world(world), control(ch::comm::connect(world)) {
    data_world.master_port = data_port;
    data_world.listen_fd = world.rank == 0 ? data_listener : -1;
    data = ch::comm::connect(data_world);
    device = std::make_shared<StandInDevice>(&data);
  }
  StandInNccl nccl(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    return StandInNccl(control, 0, timeout, StandIn{device});
  }
};

/// What `body(rank)` returns in each of `size` processes.
inline std::vector<std::string> nccl_ranks(int size, const std::function<std::string(NcclRank&)>& body) {
  auto listener = free_port();
  const int port = listener.local().port(), fd = listener.fd();
  return Ranks(size,
               [&](const ch::comm::World& world) {
                 NcclRank rank(world, port, fd);
                 return body(rank);
               })
      .texts();
}

}  // namespace test
