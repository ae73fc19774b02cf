#pragma once
/// DistributedDataParallel in canonical shares: gradients travel as sums of shares, by an all-gather, and `no_sync`
/// saves no messages. Each bucket leaves as soon as a rank's last share has its gradients.

#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/same_bits/distributed_policy.hpp>
