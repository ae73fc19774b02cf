#pragma once
/// Programs that select a policy around one model on the command line.

#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/launch_any_of.hpp>
#include <chorus/parallel/single_device.hpp>

namespace chorus {

/// `launch_any_of` with the four policies that suit every model: `--policy single` (default), `dp`, `ddp` or `fsdp`,
/// plus `--devices N` and the other options of `launch`. The body is compiled for each of the four.
template <class Model, class Body>
int launch_any(int argc, char** argv, const Body& body) {
  return launch_any_of<SingleDevice<Model>, DataParallel<Model>, DistributedDataParallel<Model>,
                       FullyShardedDataParallel<Model>>(argc, argv, body);
}

}  // namespace chorus
