#pragma once
/// Policies and types around models that <chorus/chorus.hpp> declares without their headers: if a program forgets a
/// header, the compiler's message names it.

#include <chorus/core/config.hpp>
#include <cstddef>

namespace chorus {

namespace comm {
class AnyCommunicator;
}
template <std::size_t Bytes = (std::size_t{4} << 20)>
struct ByBytes;
struct AverageParameters;
struct NoSequenceSplit;
struct OneForwardOneBackward;
struct ReduceScatter;

template <class Model, class Units = ByBytes<>, class Communicator = comm::AnyCommunicator,
          class Averages = ReduceScatter>
class FullyShardedDataParallel;  // needs #include <chorus/parallel/fully_sharded_data_parallel.hpp>
template <class Model, class Sequence = NoSequenceSplit, class Communicator = comm::AnyCommunicator>
class TensorParallel;  // needs #include <chorus/parallel/tensor_parallel.hpp>
template <class Model, class Order = OneForwardOneBackward, class Communicator = comm::AnyCommunicator>
class Pipeline;  // needs #include <chorus/parallel/pipeline.hpp>
template <class Model, class... Axes>
class Mesh;  // needs #include <chorus/parallel/mesh.hpp>
template <class Model, int Shares = 0>
class SameBits;  // needs #include <chorus/same_bits.hpp>
template <class Model, class Outer = AverageParameters, class Communicator = comm::AnyCommunicator>
class LocalSgd;  // needs #include <chorus/parallel/local_sgd.hpp>
template <class Model, class Communicator = comm::AnyCommunicator>
class ParameterServer;  // needs #include <chorus/parallel/parameter_server.hpp>
template <class Model>
class SequenceParallel;  // needs #include <chorus/parallel/sequence_parallel.hpp>

}  // namespace chorus
