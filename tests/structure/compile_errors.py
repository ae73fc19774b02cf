#!/usr/bin/env python3
"""What the compiler says of mistakes in programs: one error, a sentence that tells what to do.

    compile_errors.py COMPILER INCLUDE_DIRECTORY EIGEN_DIRECTORY
"""
import subprocess
import sys

COMPILER, INCLUDE, EIGEN = sys.argv[1:]
BEGIN = """
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/transposed_convolution.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/single_device.hpp>
#include <vector>
namespace ch = chorus;
template <class T, int Rank>
auto ones(const ch::Shape<Rank>& shape) { return ch::Variable<T, Rank>(ch::Tensor<T, Rank>::ones(shape), true); }
struct Layer : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  CHORUS_MODULE(Layer, fc)
  auto forward(const auto& x) const { return fc(x); }
};
"""
TYPES = "different scalar types; to<float>(x) converts one"
UNLISTED = """
struct Unlisted : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  auto forward(const auto& x) const { return fc(x); }
};
auto use(auto& net) { return ch::sum(net(ones<float, 2>({2, 4}))); }
"""
LISTED = "a policy needs a model that lists its members by CHORUS_MODULE"
COLUMNS = "int main() { ch::nn::ColumnParallelLinear<ch::Cpu> up{4, 6}; const auto x = up(ones<float, 2>({2, 4}));"
MIXES = ": it mixes columns, of which each rank has a part: use gather_columns(x), or a RowParallelLinear"
BLOCKS = """
#include <chorus/nn/chain.hpp>
template <int More>
struct Block : Layer {
  auto operator()(const auto& x) const {
    return ch::reshape(x, std::array<ch::Index, std::size_t(ch::tensor_of<decltype(x)>::rank + More)>{});
  }
};
template <class M>
struct Blocks : ch::nn::Module {
  ch::nn::ModuleList<M> blocks;
  CHORUS_MODULE(Blocks, blocks)
  CHORUS_PIPELINE(blocks)
};
"""
CASES = [
    ("Pipeline: the model needs CHORUS_PIPELINE(...) with its links in their order", """
#include <chorus/parallel/pipeline.hpp>
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Pipeline<Layer> net{Layer{}, alone, {}};
  net(ch::Tensor<float, 2>::ones({2, 4})).backward();
}"""),
    ("Mesh: axes go from the outside in: Pipe, Data, Shard, Tensor, each at most once", """
#include <chorus/parallel/mesh.hpp>
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Mesh<Layer, ch::mesh::Tensor<2>, ch::mesh::Data<2>> net{Layer{}, alone, {}};
}"""),
    ("CHORUS_PIPELINE: the targets go to the last link with the output before it, and that is a ModuleList here",
     BLOCKS + "int main() { const auto x = ones<float, 2>({2, 4}); ch::SingleDevice<Blocks<Block<0>>>{{}}(x, x); }"),
    ("CHORUS_PIPELINE: the blocks of a ModuleList have to give what they take",
     BLOCKS + "int main() { ch::SingleDevice<Blocks<Block<1>>>{{}}(ones<float, 2>({2, 4})); }"),
    ("", "int main() { ch::sum(ch::SingleDevice<Layer>{Layer{}}(ones<float, 2>({2, 4}))).backward(); }"),
    ("element-wise: operands have " + TYPES,
     "int main() { ch::sum(ones<double, 2>({2, 3}) + ones<float, 1>({3})).backward(); }"),
    ("matmul: operands have " + TYPES,
     "int main() { ch::sum(ch::matmul(ones<double, 3>({2, 3, 4}), ones<float, 2>({4, 5}))).backward(); }"),
    ("linear: input and weights have " + TYPES,
     "int main() { ch::sum(ch::SingleDevice<Layer>{Layer{}}(ch::Tensor<double, 2>::ones({2, 4}))).backward(); }"),
    ("", COLUMNS + "ch::nn::RowParallelLinear<ch::Cpu> down{6, 4}; ch::sum(down(ch::relu(x) * 2)).backward(); }"),
    ("softmax" + MIXES, COLUMNS + "ch::sum(ch::softmax(x, 1)).backward(); }"),
    ("linear" + MIXES, COLUMNS + "ch::nn::Linear<ch::Cpu> down{6, 4}; ch::sum(down(ch::relu(x))).backward(); }"),
    ("conv2d: input and weights have " + TYPES,
     "int main() { ch::nn::Conv2d<ch::Cpu> conv{3, 4, {.kernel = 3}};"
     "ch::sum(conv(ch::Tensor<std::uint8_t, 4>::ones({2, 3, 9, 9}))).backward(); }"),
    ("conv_transpose2d: input and weight have " + TYPES,
     "int main() { const auto x = ones<double, 4>({2, 3, 9, 9});"
     "ch::sum(ch::conv_transpose2d(x, ones<float, 4>({3, 4, 2, 2}))).backward(); }"),
    (LISTED, UNLISTED + "int main() { ch::SingleDevice<Unlisted> net{Unlisted{}}; use(net).backward(); }"),
    (LISTED, UNLISTED + "int main() { ch::DataParallel<Unlisted> net{Unlisted{}, {}}; use(net).backward(); }"),
    *((LISTED, UNLISTED + f"auto loss(ch::{policy}<Unlisted>& net) {{ return use(net); }}\n"
       f"void go(ch::comm::AnyCommunicator& ranks) {{ ch::{policy}<Unlisted> net{{Unlisted{{}}, ranks}}; loss(net); }}")
      for policy in ("DistributedDataParallel", "LocalSgd", "ParameterServer")),
    ("a list of modules is an nn::ModuleList<M>, not a std::vector<M>", """
struct Listed : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  std::vector<Layer> layers;
  CHORUS_MODULE(Listed, fc, layers)
  auto forward(const auto& x) const { return fc(x); }
};
int main() { ch::SingleDevice<Listed> net{Listed{}}; }"""),
    ("return a tuple in the struct's place, or give the field one axis, of size 1", """
struct Output {
  ch::Variable<float, 2> y;
  ch::Variable<float, 0> loss;
  auto fields() { return std::tie(y, loss); }
};
struct Returns : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  CHORUS_MODULE(Returns, fc)
  auto forward(const auto& x) const { return Output{fc(x), ch::sum(fc(x))}; }
};
int main() { ch::sum(ch::DataParallel<Returns>{Returns{}, {}}(ones<float, 2>({2, 4})).y).backward(); }"""),
]

ALONE = "clang" not in COMPILER  # which goes on about a class whose assertion has failed
COMMAND = [COMPILER, "-std=c++20", "-fsyntax-only", "-DEIGEN_NO_CUDA", "-I", INCLUDE, "-isystem", EIGEN, "-x", "c++"]
for sentence, program in CASES:
    done = subprocess.run([*COMMAND, "-"], input=BEGIN + program, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    if sentence:
        said = bool(errors) and sentence in errors[0] and (len(errors) == 1 or not ALONE)
        assert said, f"expected '{sentence}':\n{program}\n" + "\n".join(errors)
    else:
        assert done.returncode == 0, done.stderr
