#!/usr/bin/env python3
"""Writes files of torch.save: state.pt, a state_dict with views, a tied tensor and several types; checkpoint.pt, a
checkpoint with more around it; module.pt, a whole module; legacy.pt, PyTorch's form before 1.6.

    pip install torch; generate.py"""

import pathlib

import torch

HERE = pathlib.Path(__file__).resolve().parent
base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
layer = torch.nn.Linear(2, 3)
with torch.no_grad():
    layer.weight.copy_(torch.arange(6.0).reshape(3, 2))
    layer.bias.copy_(torch.arange(3.0))
norm = torch.nn.BatchNorm1d(3)
state = torch.nn.Sequential(layer, norm).state_dict()
state.update({
    "base": base, "tied": base, "transposed": base.t(), "part": base[1:3, 2:5], "expanded": base[0, :1].expand(5), "number": torch.tensor(7),
    "empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(torch.tensor([1.5, -2.5])), "half": torch.tensor([0.5, 65504.0]).half(),
    "bfloat16": torch.tensor([1.0, -3.0]).bfloat16(), "double": torch.tensor([1 / 3], dtype=torch.float64), "uint16": torch.tensor([1, 65535]).to(torch.uint16),
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False]), "bytes": torch.tensor([-1, 2], dtype=torch.int8)})
torch.save(state, HERE / "state.pt")
optimizer = torch.optim.Adam(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
with torch.no_grad():
    layer.weight.copy_(torch.arange(6.0).reshape(3, 2))
    layer.bias.copy_(torch.arange(3.0))
torch.save({"epoch": 3, "model": layer.state_dict(), "optimizer": optimizer.state_dict(), "device": torch.device("cpu"),
            "size": torch.Size([1, 2]), "dtype": torch.float32, "loss": 0.5, "more": [1, (2, None, True)], "big": 1 << 40}, HERE / "checkpoint.pt")
torch.save(layer, HERE / "module.pt")
torch.save({"a": torch.ones(2)}, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
