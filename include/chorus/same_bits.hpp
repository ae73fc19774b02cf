#pragma once
/// The same bits on any number of devices: `ch::DistributedDataParallel<ch::SameBits<Model, 8>>`. See
/// same_bits/README.md. Pipeline, TensorParallel and Mesh have headers of their own in same_bits/.

#include <chorus/same_bits/data_parallel.hpp>
#include <chorus/same_bits/distributed_data_parallel.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/single_device.hpp>
