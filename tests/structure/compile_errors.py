#!/usr/bin/env python3
"""What the compiler says of mistakes in programs: one error of 15 lines at most, beside the names of the headers on the
way to it, and in it a sentence that tells what to do. Programs with placement types come from
unit/tensor_parallel/placement_programs.hpp, whose comments have a mistake beside each right program.

    compile_errors.py INCLUDE_DIRECTORY EIGEN_DIRECTORY COMPILER...
"""
import pathlib
import re
import subprocess
import sys

INCLUDE, EIGEN, *COMPILERS = filter(None, sys.argv[1:])
MOST_LINES = 15
BEGIN = """
#include <chorus/chorus.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/transposed_convolution.hpp>
#include <chorus/parallel/expert.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/sequence_parallel.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <iostream>
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
LISTED = "policy: expected a model that lists its members by CHORUS_MODULE"
COLUMNS = "int main() { ch::nn::ColumnParallelLinear<ch::Cpu> up{4, 6}; const auto x = up(ones<float, 2>({2, 4}));"
MIXES = ": it mixes columns, which ranks split"
TESTS = pathlib.Path(__file__).resolve().parents[1]
PLACED = re.findall(r"^ *// says: (.*)\n((?: *// wrong: .*\n)+)",
                    (TESTS / "unit/tensor_parallel/placement_programs.hpp").read_text(), re.MULTILINE)
BLOCKS = """
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
TYPO = """
struct Typo : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  CHORUS_MODULE(Typo, fc)
  auto forward(const auto& x) const { return ch::relu(fc(x)).no_such_thing(); }
};
"""
LOGITS = "int main() { ch::cross_entropy(ones<float, %d>({%s}), ch::Tensor<%s>::ones({%s})).backward(); }"
CASES = [
    ("", """
int main() {
  ch::nn::Linear<ch::Cpu> fc{2, 1};
  const auto x = ones<float, 2>({1, 2});
  std::cout << fc.weight << x << x.value() << x.shape() << ch::cat(x, fc.weight);
}"""),
    ("'chorus::nn::Conv2dOptions' has no non-static data member named 'kernel_size'",
     "const auto conv = ch::nn::Conv2dOptions{.kernel_size = 5};"),
    ("'chorus::optim::SgdOptions' has no non-static data member named 'momentm'",
     "auto sgd(auto parameters) { return ch::optim::Sgd{parameters, ch::optim::SgdOptions{.lr = 0.1, .momentm = 0.9}}; }"),
    ("'chorus::data::LoaderOptions' has no non-static data member named 'batch_size'",
     "auto loader(auto data, auto s) { return ch::data::DataLoader{data, s, ch::data::LoaderOptions{.batch_size = 4}}; }"),
    ("'chorus::DistributedDataParallelOptions' has no non-static data member named 'bucket_cap'",
     "const auto ddp = ch::DistributedDataParallelOptions{.bucket_cap = 4};"),
    ("needs #include <chorus/nn/attention.hpp>", """
struct Attends : ch::nn::Module {
  ch::nn::MultiheadAttention<ch::Cpu> attention{4, 2};
  CHORUS_MODULE(Attends, attention)
};"""),
    ("MixedPrecision: the model takes integers and returns float, so all its layers would run in float", """
struct Words : Layer {
  ch::nn::Embedding<ch::Cpu> words{4, 4};
  auto forward(const ch::Tensor<std::int64_t, 2>& x) const { return fc(words(x)); }
};
int main() { ch::nn::MixedPrecision<Words>{}(ch::Tensor<std::int64_t, 2>::zeros({2, 4})); }"""),
    ("DistributedDataParallel: expected a hook with comm::Work start(const GradBucket<T, D>&, Communicator&)", """
struct Hook {
  template <class T, ch::Device D>
  ch::comm::Work start(const ch::GradBucket<T, D>&) { return {}; }
};
using Net = ch::DistributedDataParallel<Layer, Hook>;
int main(int argc, char** argv) {
  return ch::launch<Net>(argc, argv, [](ch::Run& run) { Net net{Layer{}, run}; });
}"""),
    ("concat and stack of a std::vector need #include <chorus/ops/lists.hpp>",
     "int main() { const auto x = ch::concat(0, std::vector<ch::Tensor<float, 1>>{}); }"),
    ("needs #include <chorus/nn/recurrent.hpp>", "struct Remembers : Layer { ch::nn::LSTM<ch::Cpu> lstm{4, 2}; };"),
    ("io::load needs #include <chorus/io/load_model.hpp>", 'int main() { Layer net; ch::io::load(net, "x"); }'),
    ("no member named 'no_such_thing'",
     TYPO + "int main() { ch::SingleDevice<Typo> net{Typo{}}; net(ones<float, 2>({2, 4})); }"),
    ("no member named 'no_such_thing'",
     TYPO + "int main() { ch::DataParallel<Typo> net{Typo{}, {}}; net(ones<float, 2>({2, 4})); }"),
    ("no member named 'no_such_thing'",
     TYPO + "void go(ch::Run& run) { ch::DistributedDataParallel<Typo> net{Typo{}, run}; net(ones<float, 2>({2, 4})); }"),
    ("cross_entropy: expected labels in a Tensor of std::int64_t", LOGITS % (2, "2, 3", "float, 1", "2")),
    ("cross_entropy: expected labels in a Tensor of std::int64_t", LOGITS % (2, "2, 3", "int, 1", "2")),
    ("cross_entropy: expected logits [batch, classes] and labels [batch]", LOGITS % (4, "2, 3, 1, 1", "std::int64_t, 1", "2")),
    ("cross_entropy: for logits of more than two axes #include <chorus/ops/class_losses.hpp>",
     LOGITS % (4, "2, 3, 1, 1", "std::int64_t, 3", "2, 1, 1")),
    ("Pipeline: the model needs CHORUS_PIPELINE(...) with its links in their order", """
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Pipeline<Layer> net{Layer{}, alone, {}};
  net(ch::Tensor<float, 2>::ones({2, 4})).backward();
}"""),
    ("Mesh: expected axes in the order Pipe, Data, Sequence, Shard, Tensor or Expert, each at most once", """
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Mesh<Layer, ch::mesh::Tensor<2>, ch::mesh::Data<2>> net{Layer{}, alone, {}};
}"""),
    ("Mesh: mesh::Sequence divides sequences already: expected mesh::Tensor<ranks> without SequenceSplit", """
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Mesh<Layer, ch::mesh::Sequence<2>, ch::mesh::Tensor<2, ch::SequenceSplit>> net{Layer{}, alone, {}};
}"""),
    ("Mesh: expected mesh::Data alone with mesh::Expert, whose ranks have other shares of the batch", """
int main() {
  ch::comm::AnyCommunicator alone;
  ch::Mesh<Layer, ch::mesh::Shard<2>, ch::mesh::Expert<2>> net{Layer{}, alone, {}};
}"""),
    ("CHORUS_PIPELINE: the last link takes the targets, and here it is a ModuleList",
     BLOCKS + "int main() { const auto x = ones<float, 2>({2, 4}); ch::SingleDevice<Blocks<Block<0>>>{{}}(x, x); }"),
    ("CHORUS_PIPELINE: the output of a ModuleList's blocks must have the rank and type of their input",
     BLOCKS + "int main() { ch::SingleDevice<Blocks<Block<1>>>{{}}(ones<float, 2>({2, 4})); }"),
    ("", """
int main() {
  auto x = ch::Tensor<float, 2>::ones({2, 3});
  x[0] = x[1];
  x[1] = 5;
  x.transpose(0, 1) = ch::Tensor<float, 1>::ones({2});
  x = ch::Tensor<float, 2>::ones({2, 3});
  auto y = ones<float, 2>({2, 3});
  y = y + y;
}"""),
    ("x[i] = y: expected a Tensor or a number; for a Variable use value()",
     "int main() { ch::Tensor<float, 2>::ones({2, 3})[0] = ones<float, 1>({3}); }"),
    ("x[i] = y: expected one scalar type; to<float>(y) converts",
     "int main() { ch::Tensor<float, 2>::ones({2, 3})[0] = ch::Tensor<double, 1>::ones({3}); }"),
    ("x[i] = y: the right side has more axes than the left side",
     "int main() { ch::Tensor<float, 2>::ones({2, 3})[0] = ch::Tensor<float, 2>::ones({2, 3}); }"),
    ("x[i] = number: expected an integer for a tensor of integers",
     "int main() { ch::Tensor<std::int64_t, 2>::ones({2, 3})[0] = 0.5; }"),
    ("x = y: expected a Tensor of the same scalar type, rank and device. Declare x as auto or Variable(x) to assign a Variable;", """
int main() {
  auto h = ch::Tensor<float, 2>::zeros({2, 4});
  h = ch::tanh(ones<float, 2>({2, 4}) + h);
}"""),
    ("use parameter.assign(y), buffer.assign(y), x.slice(0, 0, n) = y",
     "int main() { Layer net; net.fc.weight.value() = ch::Tensor<float, 2>::ones({4, 4}); }"),
    ("it would not write through a view; use concat or where",
     "int main() { auto x = ones<float, 2>({2, 3}); ch::slice(x, 0, 0, 1) = x; }"),
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
    ("for a list of modules use nn::ModuleList<M>, not std::vector<M>", """
struct Listed : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  std::vector<Layer> layers;
  CHORUS_MODULE(Listed, fc, layers)
  auto forward(const auto& x) const { return fc(x); }
};
int main() { ch::SingleDevice<Listed> net{Listed{}}; }"""),
    ("return a tuple, or give the field one axis of size 1", """
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
    ("TensorParallel: the model returns a part of a value, a copy or a term of a sum", """
struct Unfinished : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{4, 4};
  CHORUS_MODULE(Unfinished, fc)
  auto forward(const auto& x) const { return ch::mean(ch::take_part<ch::axis::Tensor, 0>(fc(x))); }
};
auto go(ch::Run& run) { ch::TensorParallel<Unfinished> net{Unfinished{}, run}; net(ch::Tensor<float, 2>::ones({2, 4})); }"""),
]
assert len(PLACED) >= 30
PLACED_CASES = [(said, "using namespace bugs; auto program(const Own& m, const X& x) {\n" +
                 re.sub(" *// wrong: ", "", lines) + "}") for said, lines in PLACED]
CASES += PLACED_CASES



def blocks_of(said):
    """A compiler's text, cut into its errors: each with the lines before it that say where it is, and its notes."""
    blocks, place = [[]], []
    for line in said.splitlines():
        if re.search(r"^(In file included| +from) |^\S+: (In|At) |   required (from|by) |\[ skipping ", line):
            place.append(line)
            continue
        if ": error: " in line and any(": error: " in earlier for earlier in blocks[-1]):
            blocks.append([])
        blocks[-1] += [*place, line]
        place = []
    return blocks


def compiled(compiler, cases):
    """What the compiler says of all cases, each a file and a namespace of its own, and whether it takes them."""
    text = BEGIN
    if any(case in PLACED_CASES for case in cases):
        if "clang" in compiler:  # it compiles the right programs in the unit test
            text += "#define CHORUS_TESTS_WRONG_PROGRAMS_ALONE\n"
        text += "#include <unit/tensor_parallel/placement_programs.hpp>\n"
    for i, (_, program) in enumerate(cases):
        text += f'namespace case_{i} {{\n#line 1 "case_{i}"\n'
        text += program.replace("int main()", "void program()") + "\n}\n"
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-DEIGEN_NO_CUDA", "-DCHORUS_COMPILED=1", "-I", INCLUDE, "-I", str(TESTS), "-isystem",
                           EIGEN, *(["-ferror-limit=0"] if "clang" in compiler else []), "-x", "c++", "-"],
                          input=text, capture_output=True, text=True)
    return done.returncode == 0, done.stderr.replace("\u2018", "'").replace("\u2019", "'")


for name in COMPILERS:
    taken, all_said = compiled(name, [case for case in CASES if not case[0]])
    assert taken, all_said
    wrong = [case for case in CASES if case[0]]
    taken, all_said = compiled(name, wrong)
    assert not taken
    found = {}
    for block in blocks_of(all_said):
        mentioned = re.search(r"\bcase_(\d+):\d", "\n".join(block))
        assert mentioned or "clang" in name, "\n".join(block)
        if mentioned is None:  # clang goes on in headers, about a class whose assertion has failed
            continue
        found.setdefault(int(mentioned[1]), []).append(block)
    for number, (sentence, source) in enumerate(wrong):
        about = found.get(number, [])
        told = "\n".join(line for block in about for line in block)
        told = f"{name}, expected '{sentence}':\n{source}\n{told}"
        assert about, told
        if "clang" not in name or wrong[number] in PLACED_CASES:  # it has words of its own for others
            said = "\n".join(about[0])
            place, _, rest = sentence.partition(": ")  # of placement types: two lines say them
            named = re.search(rf"chorus::(operator)?{re.escape(place)}[<(]", said) is not None
            assert len(about) == 1 and (sentence in said or named and rest in said), told
            lines = [line for line in about[0] if not re.match(r"In file included| +from ", line)]
            assert len(lines) <= MOST_LINES, f"{len(lines)} lines; {told}"
