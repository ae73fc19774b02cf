#pragma once
/// What DistributedDataParallel's core refuses.

#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>

namespace chorus::ddp {

template <Device D, class Communicator>
[[noreturn, gnu::cold]] void refuse_second_arrival(const Core<D, Communicator>& core, std::size_t i) {
  fail<UsageError>(core.where(), core.name(i),
                   " got its gradient in several parts in one backward pass (backward within backward); if it always "
                   "does, set static_graph");
}

template <Device D, class Communicator>
[[noreturn, gnu::cold]] void refuse_missing(const Core<D, Communicator>& core) {
  fail<UsageError>("DistributedDataParallel: on rank ", core.ranks.rank(), " no gradient came for ",
                   core.fill_missing(),
                   ". If they are not always used, set find_unused_parameters; if never, set_requires_grad(false)");
}

}  // namespace chorus::ddp
