#!/usr/bin/env python3
"""Writes orders.hpp: element-wise functions' derivatives of the orders 1 to 4 by PyTorch, in double.
usage: python3 orders.py > orders.hpp"""

import pathlib

import torch
import torch.nn.functional as F

POINTS = [0.3, 0.9, 1.7, 2.6]
FUNCTIONS = {
    "reciprocal": lambda x: 1 / x,
    "one_minus": lambda x: (1 - x) ** 3,
    "quotient": lambda x: (x - 2) / (1 + x * x),
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "square": lambda x: torch.square(x) * x,
    "pow3": lambda x: x ** 3,
    "pow2_5": lambda x: x ** 2.5,
    "power": lambda x: x ** (x + 1),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: F.relu(x - 1) * x,
    "softplus": lambda x: F.softplus(x, beta=1.5),
    "silu": F.silu,
    "mish": F.mish,
    "elu": lambda x: F.elu(x - 1) * x,
    "log_sigmoid": F.logsigmoid,
    "maximum": lambda x: torch.maximum(x * x, x + 1) * x,
    "where": lambda x: torch.where(x > 1, torch.sin(x), x ** 3),
}

print("#pragma once")
print(f"// Written by {pathlib.Path(__file__).name} with PyTorch {torch.__version__.split('+')[0]}: rows are orders 1 to 4.")
print("#include <array>\n#include <map>\n#include <string_view>\n\nnamespace golden_orders {\n")
print(f"inline constexpr std::array<double, {len(POINTS)}> points = {{{', '.join(map(str, POINTS))}}};")
print(f"using Rows = std::array<std::array<double, {len(POINTS)}>, 4>;")
print("inline const std::map<std::string_view, Rows> derivatives = {")
for name, function in FUNCTIONS.items():
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    y, rows = function(x), []
    for _ in range(4):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        y = y + 0 * x
        rows.append("{" + ", ".join(f"{v:.17g}" for v in y.tolist()) + "}")
    print(f'    {{"{name}",\n     {{{{' + ",\n       ".join(rows) + "}}},")
print("};\n\n}  // namespace golden_orders")
