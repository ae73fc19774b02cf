// Part of the library chorus::compiled: datasets, loaders and model files.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/comm/any_communicator.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/mnist.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/data/tokenizer.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/io/write_in_parts.hpp>

template class chorus::data::detail::Loader<chorus::data::Batch>;

namespace chorus::io::detail {

template void save_module<Cpu>(nn::Module&, const std::string&, const Metadata&);
template void write_in_parts<Cpu>(comm::AnyCommunicator&, const std::string&, const std::vector<TensorPlace<Cpu>>&,
                                  const Metadata&, bool);

}  // namespace chorus::io::detail
