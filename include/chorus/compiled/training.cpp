// Part of the library chorus::compiled: what trains models on the CPU, whatever the model.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/autograd/tape.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/nn/summary.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/parallel/dp/input_roles.hpp>
#include <chorus/parallel/dp/thread_batch_group.hpp>
#include <chorus/train/metrics.hpp>
#include <chorus/train/progress.hpp>

namespace chorus {

template class nn::FlatParameters<Cpu>;
template class nn::detail::SummaryTable<Cpu>;
template std::vector<nn::NamedParameter<Cpu>> nn::named_parameters<Cpu>(nn::Module&);
template std::vector<nn::NamedBuffer<Cpu>> nn::named_buffers<Cpu>(nn::Module&);

}  // namespace chorus
