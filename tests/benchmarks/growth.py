#!/usr/bin/env python3
"""How cost grows with size: layers, parameters, batch, ranks, length, samples, nodes of the tape, compile time.

usage: growth.py [--only REGEX] [--rounds 1] [--limit 30] GROWTH CHORUS_SIMULATE

A row of a table for each thing: its seconds by size; the slope of their logarithms, by least squares over the upper half
of the sizes' range, beside that of the ideal; and the cost of the largest size over what the ideal makes of the cheapest
size, which is the one whose seconds are the least part of the ideal's. Above 2 the row ends in "!". A size that takes
longer than the limit, or more memory than there is, ends its row. Compile times are user seconds of CXX (default g++)
with -O0 and chorus::compiled, above those of the smallest size. All of it takes some four minutes of two cores."""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Callable

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
POLICIES = ["SingleDevice", "DataParallel", "DistributedDataParallel", "LocalSgd", "ParameterServer",
            "FullyShardedDataParallel", "SequenceParallel", "TensorParallel"]
EIGEN = os.environ.get("EIGEN", "/usr/include/eigen3")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("growth")
parser.add_argument("simulate")
parser.add_argument("--only", default=".", help="rows whose names match")
parser.add_argument("--rounds", type=int, default=1)
parser.add_argument("--limit", type=float, default=30, help="seconds of one run")
options = parser.parse_args()


def program(kind, column="seconds"):
    """A kind of growth.cpp: its seconds, or MiB."""
    def run(size):
        done = subprocess.run([options.growth, kind, str(size)], capture_output=True, text=True, timeout=options.limit)
        found = re.search(rf"{column}=([\d.]+)", done.stdout)
        if done.returncode != 0 or not found:
            sys.exit(f"growth {kind} {size}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return float(found[1])
    return run


def user_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def simulated(*how):
    def run(ranks):
        begin = time.monotonic()
        user_seconds([options.simulate, "--brief", "--ranks", str(ranks), *how])
        return time.monotonic() - begin
    return run


def compiled(text):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "program.cpp"
        source.write_text(text)
        return user_seconds([os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-DCHORUS_COMPILED=1", "-DCHORUS_ALLOW_UNOPTIMIZED=1",
                             "-I", str(TOP / "include"), "-isystem", EIGEN, "-c", str(source), "-o", f"{folder}/program.o"])


def layers_compiled(count):
    script = HERE / "compile_time" / "layers.sh"
    return compiled(subprocess.run([str(script), str(count)], capture_output=True, text=True, check=True).stdout)


@functools.cache
def nets_compiled(*nets):
    """A file that trains these nets: pairs of a policy and the number of a model."""
    headers = "".join(f"#include <chorus/parallel/{name}.hpp>\n" for name in (
        "fully_sharded_data_parallel", "local_sgd", "parameter_server", "sequence_parallel", "tensor_parallel"))
    calls = "".join(f"    case {i}: return train<ch::{policy}<Model<ch::Cpu, {model}>>, Model<ch::Cpu, {model}>>(argc, argv);\n"
                    for i, (policy, model) in enumerate(nets))
    return compiled(f"""#include <chorus/chorus.hpp>
{headers}
namespace ch = chorus;

template <class Device, int Number>
struct Model : ch::nn::Module {{
  ch::nn::Linear<Device> fc1{{8, 8}}, fc2{{8, 8 + Number}};
  CHORUS_MODULE(Model, fc1, fc2)
  auto forward(const auto& x) const {{ return fc2(ch::relu(fc1(x))); }}
}};

template <class Net, class Model>
int train(int argc, char** argv) {{
  return ch::launch<Net>(argc, argv, [](ch::Run& run) {{
    Net net{{Model{{}}, run}};
    ch::optim::Sgd optimizer{{net.parameters(), {{.lr = 0.1}}}};
    const auto x = ch::Tensor<float, 2>::zeros({{4, 8}});
    const auto y = ch::Tensor<std::int64_t, 1>::zeros({{4}});
    optimizer.zero_grad();
    ch::cross_entropy(net(x), y).backward();
    optimizer.step();
  }});
}}

int main(int argc, char** argv) {{
  switch (argc) {{
{calls}    default: return 0;
  }}
}}
""")


def policies_compiled(count):
    return nets_compiled(*((policy, 1) for policy in POLICIES[:count]))


def policies_alone(count):
    """What the first policies cost in a file of their own each, above a file without one."""
    return sum(nets_compiled((policy, 1)) - nets_compiled() for policy in POLICIES[:count])


def models_compiled(count):
    return nets_compiled(*(("DistributedDataParallel", model) for model in range(count)))


def linear(n):
    return n


def square(n):
    return n * n


def n_log_n(n):
    return n * math.log2(2 * n)


@dataclasses.dataclass
class Row:
    name: str
    cost: Callable[[int], float]
    sizes: list[int]
    ideal: Callable[[int], float] = linear
    ideal_name: str = "n"
    unit: str = "s"
    above_first: bool = False  # costs are those above the first size's


DECADES = [10, 30, 100, 300, 1000]
RANKS = [1, 2, 4, 8, 16, 32, 64]
ALIKE = [64, 256, 1024, 4096, 16384]
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
NODES = [1000, 10_000, 100_000, 1_000_000]
ROWS = [
    Row("step, layers", program("layers"), DECADES),
    Row("step, layers, DataParallel on 2", program("layers_dp"), DECADES),
    Row("step, layers, DDP on 2", program("layers_ddp"), DECADES),
    Row("net and optimizer made, layers", program("layers_built"), DECADES),
    Row("net made, layers, DDP on 2", program("layers_built_ddp"), DECADES),
    Row("step, parameters, batch 1", program("parameters"), [10**5, 10**6, 10**7, 10**8, 3 * 10**8]),
    Row("step of the toy CNN, batch", program("batch"), [1, 4, 16, 64, 256, 1024, 4096]),
    Row("step of an MLP, batch", program("batch_mlp"), [1, 4, 16, 64, 256, 1024, 4096]),
    Row("step of the MLP, batch 64, DataParallel, devices", program("devices"), RANKS),
    Row("step of the MLP, batch 64, DDP, ranks", program("ranks"), RANKS),
    Row("all-reduce of 1 MiB, ranks", program("ranks_1mib"), RANKS[1:]),
    Row("all-reduce of 8 bytes, ranks", program("ranks_8bytes"), RANKS[1:], n_log_n, "n log n"),
    Row("ranks start, meet and end", program("ranks_meet"), RANKS[1:]),
    Row("chorus-simulate, ranks alike", simulated(), ALIKE),
    Row("chorus-simulate, a straggler", simulated("--straggler", "5:1.3"), ALIKE),
    Row("chorus-simulate, jitter", simulated("--jitter", "0.05"), ALIKE),
    Row("chorus-simulate, islands of 8", simulated("--links", "nvlink8+25gbit"), ALIKE),
    Row("chorus-simulate, fsdp", simulated("--policy", "fsdp"), ALIKE),
    Row("terms of a loss, DDP on 2", program("terms"), [10, 100, 1000, 10_000]),
    Row("attention, causal, both ways, length", program("attention"), LENGTHS, square, "n^2"),
    Row("its memory", program("attention", "mib"), LENGTHS, unit="MiB"),
    Row("sampler, an epoch, samples", program("sampler"), [10**3, 10**4, 10**5, 10**6, 10**7]),
    Row("loader, an epoch, samples", program("loader"), [10**3, 10**4, 10**5, 10**6]),
    Row("tape, both ways, nodes", program("tape"), NODES),
    Row("tape, recorded and dropped", program("tape_dropped"), NODES),
    Row("tape, memory", program("tape", "mib"), NODES, unit="MiB"),
    Row("compile, layers in CHORUS_MODULE", layers_compiled, [5, 900, 2700], above_first=True),
    Row("compile, models under DDP in a file", models_compiled, [0, 8, 32, 128], above_first=True),
    Row("compile, policies in a file", policies_compiled, [0, 2, 4, 8], policies_alone, "sum alone", above_first=True),
]


def slope(points):
    """By least squares over the upper half of the sizes' range, in logarithms."""
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    middle = (logs[0][0] + logs[-1][0]) / 2
    upper = [point for point in logs if point[0] >= middle - 1e-9]
    return statistics.linear_regression(*zip(*(upper if len(upper) > 1 else logs[-2:]))).slope


def short(number):
    return f"{number:.3g}" if number < 1e5 else f"{number:.0e}".replace("e+0", "e")


def measured(row):
    """Sizes and costs, until one takes too long."""
    points, started = [], 0.0
    for size in row.sizes:
        try:
            started = time.monotonic()
            points.append((size, statistics.median(row.cost(size) for _ in range(options.rounds))))
        except subprocess.TimeoutExpired:
            print(f"{row.name}: {size} took more than {time.monotonic() - started:.0f} s", file=sys.stderr)
            break
    return points


print("| what grows | sizes | at each | slope | ideal | its slope | over the ideal |\n|---|---|---|---|---|---|---|")
for row in ROWS:
    if not re.search(options.only, row.name):
        continue
    points = measured(row)
    ideals = [(size, row.ideal(size)) for size, _ in points]
    if row.above_first:
        points = [(size, max(0.05, cost - points[0][1])) for size, cost in points[1:]]
        ideals = [(size, max(0.05, ideal - ideals[0][1])) for size, ideal in ideals[1:]]
    cheapest = min(cost / ideal for (_, cost), (_, ideal) in zip(points, ideals))
    factor = points[-1][1] / ideals[-1][1] / cheapest
    print(f"| {row.name} | {', '.join(short(size) for size, _ in points)} "
          f"| {', '.join(short(cost) for _, cost in points)} {row.unit} | {slope(points):.2f} | {row.ideal_name} "
          f"| {slope(ideals):.2f} | {factor:.2f}{'!' if factor > 2 else ''} |", flush=True)
