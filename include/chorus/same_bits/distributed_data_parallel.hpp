#pragma once
/// DistributedDataParallel with canonical shares: gradients are sent as sums of shares, with an all-gather, and
/// `no_sync` saves no messages. Each bucket is sent as soon as a rank's last share has its gradients.

#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/same_bits/distributed_policy.hpp>
