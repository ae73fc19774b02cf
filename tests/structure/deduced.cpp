/// The policies' template arguments, as compilers deduce them from a communicator: it is no run.
#include <chorus/nn/linear.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <type_traits>

namespace ch = chorus;

template <class D>
struct Model : ch::nn::Module {
  ch::nn::Linear<D> fc{2, 2};
  CHORUS_MODULE(Model, fc)
  auto forward(const auto& x) const { return fc(x); }
};
using Net = Model<ch::Cpu>;

template <class Expected, class Got>
void require_type(const Got&) {
  static_assert(std::is_same_v<Expected, Got>);
}

void deduce(ch::comm::AnyCommunicator& communicator) {
  require_type<ch::DistributedDataParallel<Net>>(ch::DistributedDataParallel{Net{}, communicator});
  require_type<ch::DistributedDataParallel<Net>>(ch::DistributedDataParallel{Net{}, communicator, {}, 3});
  require_type<ch::LocalSgd<Net>>(ch::LocalSgd{Net{}, communicator});
  require_type<ch::LocalSgd<Net>>(ch::LocalSgd{Net{}, communicator, {}, 3});
  require_type<ch::ParameterServer<Net>>(ch::ParameterServer{Net{}, communicator});
  require_type<ch::ParameterServer<Net>>(ch::ParameterServer{Net{}, communicator, 3});
  require_type<ch::ParameterServer<Net>>(ch::ParameterServer{Net{}, communicator, {}, 3});
}
