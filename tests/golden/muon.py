#!/usr/bin/env python3
"""Writes muon.hpp: Newton-Schulz iterations and steps of torch.optim.Muon.
usage: python3 muon.py > muon.hpp"""

import pathlib
import textwrap

import torch
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize


def matrix(rows, columns, seed):
    """The test has the same formula."""
    i = torch.arange(rows * columns)
    return (((i * i * 7919 + i * 104729 + seed * 15485863) % 2003 - 1001).float() / 1001).reshape(rows, columns)


def text(values, of):
    return textwrap.fill(", ".join(of(value) for value in values), 112, subsequent_indent=" " * 6)


print("#pragma once")
print(f"// Written by {pathlib.Path(__file__).name} with PyTorch {torch.__version__.split('+')[0]}.")
print("#include <array>\n#include <chorus/optim/muon.hpp>\n#include <cstdint>\n#include <vector>\n\nnamespace golden_muon {\n")
print("/// Numbers 0, stride, 2 stride, ... of the result for matrix(rows, columns, 1), as bits of bf16.")
print("struct Orthogonal {\n  int rows, columns, stride;\n  std::vector<std::uint16_t> bits;\n};")
print("inline const std::vector<Orthogonal> orthogonal = {")
for rows, columns, stride in ((8, 8, 1), (64, 32, 67), (32, 64, 67), (128, 128, 601)):
    result = orthogonalize(matrix(rows, columns, 1), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    bits = result.contiguous().view(torch.int16).flatten()[::stride].tolist()
    print(f"    {{{rows}, {columns}, {stride},\n     {{{text(bits, lambda b: hex(b & 0xffff))}}}}},")
print("};\n")
print("/// matrix(6, 4, 1) after steps with the gradients matrix(6, 4, 2), matrix(6, 4, 3) and matrix(6, 4, 4).")
print("struct Steps {\n  chorus::optim::MuonOptions options;\n  std::array<float, 24> after;\n};")
print("inline const std::vector<Steps> steps = {")
for theirs, ours in (
    ({"lr": .02}, "{.lr = 0.02}"),
    ({"lr": .1, "weight_decay": .3, "momentum": .3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
     "{.lr = 0.1, .weight_decay = 0.3, .momentum = 0.3, .nesterov = false,\n"
     "      .adjust_lr = chorus::optim::AdjustLr::match_rms_adamw}"),
    ({"lr": .1, "ns_coefficients": (2, -1.5, .5), "eps": 5., "ns_steps": 3, "adjust_lr_fn": "spectral_unclamped"},
     "{.lr = 0.1, .ns_coefficients = {2, -1.5, 0.5}, .eps = 5, .ns_steps = 3,\n"
     "      .adjust_lr = chorus::optim::AdjustLr::spectral_unclamped}"),
):
    parameter = torch.nn.Parameter(matrix(6, 4, 1))
    muon = torch.optim.Muon([parameter], **theirs)
    for seed in (2, 3, 4):
        parameter.grad = matrix(6, 4, seed)
        muon.step()
    print(f"    {{{ours},\n     {{{text(parameter.flatten().tolist(), lambda v: f'{v:.9g}f')}}}}},")
print("};\n\n}  // namespace golden_muon")
