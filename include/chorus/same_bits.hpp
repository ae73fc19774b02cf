#pragma once
/// The same bits on any number of devices: `ch::DistributedDataParallel<ch::SameBits<Model, 8>>`. See
/// same_bits/README.md.

#include <chorus/same_bits/data_parallel.hpp>
#include <chorus/same_bits/distributed_data_parallel.hpp>
#include <chorus/same_bits/mesh.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/single_device.hpp>
#include <chorus/same_bits/tensor_parallel.hpp>
