#!/usr/bin/env python3
"""Makes more golden cases: the shapes, axes and attributes that the files beside this one leave out.

usage: generate.py DIR [NAME ...]   (needs PyTorch 1.13 or later; NAME: cases that begin so)

A case is one safetensors file; its __metadata__ has op, attrs (JSON) and torch. in.NAME is an input, out.NAME a result, gout.NAME
the gradient fed to backward for it, grad.NAME the gradient by in.NAME. Inputs are float32; PyTorch computes in float64, so that
what differs is the tested library's rounding alone.
"""

import json
import pathlib
import struct
import sys
import zlib

import torch
import torch.nn.functional as F

NAMES = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
directory = pathlib.Path(sys.argv[1])
wanted = tuple(sys.argv[2:])
generator = torch.Generator()


def save(name, op, attrs, tensors):
    header, data = {"__metadata__": {"op": op, "attrs": json.dumps(attrs), "torch": torch.__version__}}, b""
    for key, tensor in tensors.items():
        tensor = tensor.detach()
        tensor = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        raw = bytes(tensor.flatten().view(torch.uint8).tolist()) if tensor.numel() else b""
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (directory / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def case(name, op, function, inputs, attrs=None, no_grad=()):
    """function(attrs' values by name ... are up to it): takes the inputs by name, returns a tensor or a dict of outputs."""
    if wanted and not name.startswith(wanted):
        return
    inputs = {key: value() if callable(value) else value for key, value in inputs.items()}
    exact = {key: value.double().requires_grad_(key not in no_grad) if value.is_floating_point() else value
             for key, value in inputs.items()}
    outputs = function(*exact.values()) if len(exact) == 1 else function(**exact)
    outputs = outputs if isinstance(outputs, dict) else {"y": outputs}
    tensors = {f"in.{key}": value for key, value in inputs.items()}
    total = 0
    for key, value in outputs.items():
        tensors[f"out.{key}"] = value
        if value.requires_grad:
            gout = torch.randn(value.shape, generator=generator)
            tensors[f"gout.{key}"] = gout
            total = total + (value * gout).sum()
    if torch.is_tensor(total):
        leaves = {key: value for key, value in exact.items() if value.requires_grad}
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for key, grad in zip(leaves, grads):
            if grad is not None:
                tensors[f"grad.{key}"] = grad
    save(name, op, attrs or {}, tensors)


def randn(*shape, scale=1.0):
    return lambda: torch.randn(shape, generator=generator) * scale


def uniform(*shape, low=0.0, high=1.0):
    return lambda: torch.rand(shape, generator=generator) * (high - low) + low


def integers(high, *shape):
    return lambda: torch.randint(high, shape, generator=generator)


def mask(*shape):
    return lambda: torch.rand(shape, generator=generator) < 0.4


def of(module_function, **attrs):
    return lambda x: module_function(x, **attrs)


def elementwise():
    for name, low, high in [("abs", -3, 3), ("neg", -3, 3), ("square", -3, 3), ("sqrt", .01, 9), ("rsqrt", .1, 9),
                            ("reciprocal", .2, 4), ("exp", -5, 5), ("log", .01, 9), ("log1p", -.9, 9), ("sin", -9, 9),
                            ("cos", -9, 9), ("tanh", -3, 3), ("erf", -4, 4)]:
        case(f"{name}_4d", name, getattr(torch, name), {"x": uniform(2, 3, 1, 13, low=low, high=high)})
        case(f"{name}_one", name, getattr(torch, name), {"x": uniform(low=low, high=high)})
        case(f"{name}_empty", name, getattr(torch, name), {"x": uniform(0, 3, low=low, high=high)})
    for name, function in [("relu", F.relu), ("relu6", F.relu6), ("sigmoid", torch.sigmoid), ("log_sigmoid", F.logsigmoid),
                           ("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
                           ("mish", F.mish), ("hardsigmoid", F.hardsigmoid), ("hardswish", F.hardswish)]:
        case(f"{name}_wide", name, function, {"x": randn(3, 5, 7, scale=20.0)})
    edges = torch.tensor([-4., -3., -1., -.0, 0., 1., 3., 4., 6., 7.])
    for name, function in [("relu", F.relu), ("relu6", F.relu6), ("hardsigmoid", F.hardsigmoid), ("hardtanh", F.hardtanh),
                           ("abs", torch.abs), ("leaky_relu", F.leaky_relu), ("elu", F.elu)]:
        case(f"{name}_edges", name, function, {"x": edges})
    case("leaky_relu_slope", "leaky_relu", of(F.leaky_relu, negative_slope=.3), {"x": randn(19)}, {"negative_slope": .3})
    case("elu_alpha", "elu", of(F.elu, alpha=1.7), {"x": randn(19)}, {"alpha": 1.7})
    case("softplus_beta", "softplus", of(F.softplus, beta=2.0, threshold=3.0), {"x": randn(41, scale=3.0)}, {"beta": 2.0, "threshold": 3.0})
    case("hardtanh_limits", "hardtanh", of(F.hardtanh, min_val=-.3, max_val=2.0), {"x": randn(41)}, {"min": -.3, "max": 2.0})
    case("clamp_min", "clamp", of(torch.clamp, min=.1), {"x": randn(41)}, {"min": .1})
    case("clamp_max", "clamp", of(torch.clamp, max=.1), {"x": randn(41)}, {"max": .1, "min": None})
    for exponent in (-2.0, -1.0, -.5, 0.0, .5, 1.0, 1.7, 2.0, 4.0):
        case(f"pow_{exponent}", "pow", of(torch.pow, exponent=exponent), {"x": uniform(3, 11, low=.3, high=2)}, {"exponent": exponent})
    case("pow_negative_base", "pow", of(torch.pow, exponent=3.0), {"x": randn(17)}, {"exponent": 3.0})
    shapes = [((3,), (2, 3)), ((), (4, 5)), ((2, 1, 3, 1), (4, 1, 5)), ((1,), (1,)), ((0, 3), (3,)), ((5, 1), (1, 7)), ((2, 3, 4), (2, 3, 4)),
              ((1, 1, 6), (4, 3, 6)), ((4, 3, 6), (4, 1, 1))]
    for name, function in [("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div), ("maximum", torch.maximum),
                           ("minimum", torch.minimum), ("pow", torch.pow)]:
        for i, (a, b) in enumerate(shapes):
            case(f"{name}_shapes{i}", name, lambda x, y: function(x, y),
                 {"x": uniform(*a, low=.3, high=2), "y": uniform(*b, low=.3, high=2)})
    ties = torch.tensor([[1., 2., 2.], [0., -1., 2.]])
    case("maximum_ties", "maximum", lambda x, y: torch.maximum(x, y), {"x": ties, "y": torch.tensor([1., 2., 3.])})
    case("minimum_ties", "minimum", lambda x, y: torch.minimum(x, y), {"x": ties, "y": torch.tensor([1., 2., 3.])})
    case("masked_fill_4d", "masked_fill", lambda x, mask: x.masked_fill(mask, 2.5), {"x": randn(2, 3, 4, 5), "mask": mask(2, 3, 4, 5)}, {"value": 2.5})
    case("masked_fill_broadcast", "masked_fill", lambda x, mask: x.masked_fill(mask, -7.0), {"x": randn(2, 3, 4), "mask": mask(3, 1)}, {"value": -7.0})
    case("where", "where", lambda mask, a, b: torch.where(mask, a, b), {"mask": mask(3, 4), "a": randn(3, 4), "b": randn(3, 4)})
    case("where_broadcast", "where", lambda mask, a, b: torch.where(mask, a, b), {"mask": mask(3, 1), "a": randn(2, 3, 4), "b": randn(4)})


def reductions():
    shapes = {"a": ((4, 5, 6), (0, 1, 2, -1, -2, -3)), "b": ((7,), (0, -1)), "c": ((2, 3, 1, 5, 2), (0, 2, 3, -1)), "d": ((3, 67), (0, 1)),
              "e": ((1, 1), (0, 1)), "f": ((0, 4), (0, 1)), "g": ((129, 33), (0, 1))}
    for name, function in [("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin), ("logsumexp", torch.logsumexp),
                           ("var", torch.var)]:
        for key, (shape, axes) in shapes.items():
            for axis in axes:
                for keep in (False, True):
                    if (key == "f" and axis == 0 and name != "sum") or (name == "var" and shape[axis] < 2):
                        continue
                    case(f"{name}_{key}{axis}{'k' if keep else ''}", name, lambda x: function(x, dim=axis, keepdim=keep), {"x": randn(*shape)},
                         {"axis": axis, "keepdim": keep} | ({"unbiased": True} if name == "var" else {}))
        for axes in ((0, 2), (-1, 1), (0, 1, 2)):
            for keep in (False, True):
                case(f"{name}_axes{'_'.join(map(str, axes))}{'k' if keep else ''}", name,
                     lambda x: function(x, dim=axes, keepdim=keep), {"x": randn(3, 4, 5)},
                     {"axis": list(axes), "keepdim": keep} | ({"unbiased": True} if name == "var" else {}))
    for unbiased in (False, True):
        case(f"var_all{unbiased}", "var", lambda x: torch.var(x, unbiased=unbiased), {"x": randn(3, 5)}, {"axis": None, "unbiased": unbiased, "keepdim": False})
    case("var_offset", "var", lambda x: torch.var(x, 1, unbiased=True), {"x": lambda: torch.randn(4, 50, generator=generator) + 1000}, {"axis": 1, "unbiased": True, "keepdim": False})
    case("logsumexp_large", "logsumexp", lambda x: torch.logsumexp(x, 1), {"x": randn(3, 9, scale=300.0)}, {"axis": 1, "keepdim": False})
    case("logsumexp_all", "logsumexp", lambda x: torch.logsumexp(x, (0, 1)), {"x": randn(3, 9)}, {"axis": None, "keepdim": False})
    ties = torch.tensor([[1., 3., 3.], [0., 0., 0.], [5., 4., 5.]])
    case("amax_ties", "amax", lambda x: torch.amax(x, 1), {"x": ties}, {"axis": 1, "keepdim": False})
    case("amin_ties_all", "amin", lambda x: torch.amin(x, (0, 1)), {"x": ties}, {"axis": None, "keepdim": False})
    for name, function in [("softmax", F.softmax), ("log_softmax", F.log_softmax)]:
        for shape, axis in [((5,), 0), ((4, 5, 6), 0), ((4, 5, 6), -1), ((4, 5, 6), -2), ((2, 3, 4, 5), 1), ((3, 100), 1), ((100, 3), 0), ((1, 1), 1), ((0, 5), 1)]:
            case(f"{name}_{'x'.join(map(str, shape))}_{axis}", name, lambda x: function(x, dim=axis), {"x": randn(*shape, scale=3.0)}, {"axis": axis})
        case(f"{name}_large", name, lambda x: function(x, dim=1), {"x": randn(3, 7, scale=10.0)}, {"axis": 1})
    for shape, axis in [((5,), 0), ((4, 5, 6), 0), ((4, 5, 6), -1), ((4, 5, 6), 1), ((1, 3), 0), ((0, 3), 1)]:
        label = f"{'x'.join(map(str, shape))}_{axis}"
        case(f"cumsum_{label}", "cumsum", lambda x: torch.cumsum(x, axis), {"x": randn(*shape)}, {"axis": axis})
        case(f"cumprod_{label}", "cumprod", lambda x: torch.cumprod(x, axis), {"x": randn(*shape)}, {"axis": axis})
        if 0 not in shape:
            case(f"argmax_{label}", "argmax", lambda x: torch.argmax(x, axis), {"x": randn(*shape)}, {"axis": axis}, no_grad=("x",))
            case(f"argmin_{label}", "argmin", lambda x: torch.argmin(x, axis), {"x": randn(*shape)}, {"axis": axis}, no_grad=("x",))
            case(f"argmax_keep_{label}", "argmax", lambda x: torch.argmax(x, axis, keepdim=True), {"x": randn(*shape)}, {"axis": axis, "keepdim": True}, no_grad=("x",))
    case("cumprod_zeros", "cumprod", lambda x: torch.cumprod(x, 1), {"x": torch.tensor([[1., 0., 2., 3.], [0., 2., 0., 4.], [1., 2., 3., 4.]])}, {"axis": 1})
    case("argmax_all", "argmax", lambda x: torch.argmax(x), {"x": randn(3, 5)}, {"axis": None}, no_grad=("x",))
    for descending in (False, True):
        def sort(x):
            values, indices = torch.sort(x, dim=1, descending=descending)
            return {"y": values, "index": indices}
        case(f"sort_{descending}", "sort", sort, {"x": randn(3, 7, 2)}, {"axis": 1, "descending": descending})
        def topk(x):
            values, indices = torch.topk(x, 3, dim=-1, largest=descending)
            return {"y": values, "index": indices}
        case(f"topk_{descending}", "topk", topk, {"x": randn(2, 3, 7)}, {"axis": -1, "k": 3, "largest": descending})


def shapes():
    case("reshape_minus1", "reshape", lambda x: x.reshape(3, -1), {"x": randn(2, 3, 4)}, {"shape": [3, -1]})
    case("reshape_up", "reshape", lambda x: x.reshape(1, 2, 2, 1, 6), {"x": randn(4, 6)}, {"shape": [1, 2, 2, 1, 6]})
    case("reshape_scalar", "reshape", lambda x: x.reshape(()), {"x": randn(1, 1)}, {"shape": []})
    case("reshape_empty", "reshape", lambda x: x.reshape(3, 0), {"x": randn(0, 6)}, {"shape": [3, 0]})
    for axes in ([1, 0], [0, 1], [-1, 0]):
        case(f"permute_{axes}".replace(" ", ""), "permute", lambda x: x.permute(axes), {"x": randn(19, 37)}, {"axes": axes})
    for axes in ([0, 3, 1, 2], [3, 2, 1, 0], [0, 2, 1, 3], [-1, -2, 0, 1]):
        case(f"permute_{axes}".replace(" ", ""), "permute", lambda x: x.permute(axes), {"x": randn(2, 5, 3, 4)}, {"axes": axes})
    for axis, start, stop in ((0, 0, 2), (-1, 1, 5), (1, 2, 2), (1, 0, 6)):
        case(f"slice_{axis}_{start}_{stop}", "slice", lambda x: x.narrow(axis, start, stop - start), {"x": randn(3, 6, 5)}, {"axis": axis, "start": start, "stop": stop})
    for axis in (0, 1, -1):
        sizes = [[3, 4, 5] for _ in range(3)]
        for i, size in enumerate(sizes):
            size[axis] = i + 1
        case(f"concat3_{axis}", "concat", lambda a, b, c: torch.cat((a, b, c), axis), {"a": randn(*sizes[0]), "b": randn(*sizes[1]), "c": randn(*sizes[2])}, {"axis": axis})
        case(f"stack3_{axis}", "stack", lambda a, b, c: torch.stack((a, b, c), axis), {"a": randn(2, 3), "b": randn(2, 3), "c": randn(2, 3)}, {"axis": axis})
    case("concat_empty", "concat", lambda a, b: torch.cat((a, b), 0), {"a": randn(0, 3), "b": randn(2, 3)}, {"axis": 0})
    case("concat_one", "concat", lambda a: torch.cat((a,), 0), {"a": randn(2, 3)}, {"axis": 0})
    case("pad2d_value", "pad2d", lambda x: F.pad(x, (2, 0, 1, 1), value=-1.5), {"x": randn(3, 4, 5)}, {"left": 2, "right": 0, "top": 1, "bottom": 1, "value": -1.5})
    for mode in ("reflect", "replicate", "circular"):
        case(f"pad2d_{mode}", "pad2d", lambda x: F.pad(x, (2, 1, 1, 3), mode=mode), {"x": randn(2, 3, 4, 5)},
             {"left": 2, "right": 1, "top": 1, "bottom": 3, "mode": mode})
    case("upsample_nearest_list", "upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=(3, 1)), {"x": randn(2, 3, 4, 5)}, {"scale": [3, 1]})
    case("upsample_nearest_one", "upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=1), {"x": randn(1, 1, 1, 1)}, {"scale": 1})
    for align in (False, True):
        for size in ((8, 10), (3, 3), (4, 5), (1, 1), (7, 2)):
            case(f"upsample_bilinear_{align}_{size[0]}x{size[1]}", "upsample_bilinear2d", lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=align),
                 {"x": randn(2, 3, 4, 5)}, {"size": list(size), "align_corners": align})
    case("gather_axis0", "gather", lambda x, index: torch.gather(x, 0, index), {"x": randn(4, 5), "index": integers(4, 7, 3)}, {"axis": 0})
    case("gather_negative", "gather", lambda x, index: torch.gather(x, -1, index), {"x": randn(2, 3, 4), "index": integers(4, 2, 2, 9)}, {"axis": -1})
    case("gather_middle", "gather", lambda x, index: torch.gather(x, 1, index), {"x": randn(2, 3, 4), "index": integers(3, 1, 5, 4)}, {"axis": 1})
    case("scatter_add", "scatter_add", lambda x, index, src: x.scatter_add(1, index, src), {"x": randn(3, 5), "index": integers(5, 3, 4), "src": randn(3, 4)}, {"axis": 1})
    case("scatter_add0", "scatter_add", lambda x, index, src: x.scatter_add(0, index, src), {"x": randn(3, 5, 2), "index": integers(3, 4, 5, 2), "src": randn(4, 5, 2)}, {"axis": 0})
    case("scatter", "scatter", lambda x, index, src: x.scatter(1, index, src),
         {"x": randn(3, 5), "index": torch.tensor([[0, 2], [4, 1], [3, 0]]), "src": randn(3, 2)}, {"axis": 1})
    for axis, size in ((0, 6), (1, 5), (-1, 3)):
        case(f"index_select_{axis}", "index_select", lambda x, index: torch.index_select(x, axis, index), {"x": randn(6, 5, 3), "index": integers(size, 8)}, {"axis": axis})
    case("index_select_none", "index_select", lambda x, index: torch.index_select(x, 0, index), {"x": randn(6, 5), "index": integers(6, 0)}, {"axis": 0})
    case("embedding_1d", "embedding", lambda weight, index: F.embedding(index, weight), {"weight": randn(9, 4), "index": integers(9, 30)})
    case("embedding_3d", "embedding", lambda weight, index: F.embedding(index, weight), {"weight": randn(5, 3), "index": integers(5, 2, 1, 4)})
    case("embedding_padding", "embedding", lambda weight, index: F.embedding(index, weight, padding_idx=1), {"weight": randn(3, 2), "index": integers(3, 12)}, {"padding_idx": 1})
    for pattern, sizes in (("ij,jk->ik", ((3, 4), (4, 5))), ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))), ("bij,jk->bik", ((2, 3, 4), (4, 5))),
                           ("i,j->ij", ((3,), (4,))), ("bi,bi->b", ((3, 4), (3, 4))), ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
                           ("ij,ij->", ((3, 4), (3, 4))), ("ij,kj->ki", ((3, 4), (2, 4))), ("bij,bkj->kib", ((2, 3, 4), (2, 5, 4))),
                           ("ij,k->jk", ((3, 4), (2,)))):
        case(f"einsum_{pattern.replace(',', '_').replace('->', '_to_')}", "einsum", lambda a, b: torch.einsum(pattern, a, b), {"a": randn(*sizes[0]), "b": randn(*sizes[1])}, {"equation": pattern})


def products():
    for i, (a, b) in enumerate((((1, 1), (1, 1)), ((65, 130), (130, 67)), ((3, 0), (0, 4)), ((0, 3), (3, 4)), ((2, 3, 4, 5), (2, 3, 5, 6)),
                                ((2, 1, 4, 5), (3, 5, 6)), ((4, 5), (3, 5, 6)), ((3, 4, 5), (5, 6)), ((1, 300), (300, 1)), ((17, 1), (1, 19)))):
        case(f"matmul_{i}", "matmul", lambda a, b: torch.matmul(a, b), {"a": randn(*a), "b": randn(*b)})
    case("linear_no_bias", "linear", lambda x, weight: F.linear(x, weight), {"x": randn(3, 2, 4, 7), "weight": randn(5, 7)})
    case("linear_1d", "linear", lambda x, weight, bias: F.linear(x, weight, bias), {"x": randn(7), "weight": randn(5, 7), "bias": randn(5)})
    case("linear_empty", "linear", lambda x, weight, bias: F.linear(x, weight, bias), {"x": randn(0, 7), "weight": randn(5, 7), "bias": randn(5)})
    case("linear_wide", "linear", lambda x, weight, bias: F.linear(x, weight, bias), {"x": randn(65, 257), "weight": randn(33, 257), "bias": randn(33)})
    number = 0
    for stride in (1, 2, [2, 1], [1, 3]):
        for padding in (0, 1, [2, 1]):
            for dilation in (1, 2, [1, 2]):
                for groups, kernel in ((1, (3, 3)), (2, (1, 3)), (4, (2, 3))):
                    number += 1
                    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
                    bias = {"bias": randn(8)} if number % 3 else {}
                    case(f"conv2d_{number:03}", "conv2d", lambda x, weight, bias=None: F.conv2d(x, weight, bias, **attrs),
                         {"x": randn(2, 4, 9, 8), "weight": randn(8, 4 // groups, *kernel)} | bias, attrs)
                    if number % 2:
                        extra = 1 if stride == 2 else 0
                        attrs = attrs | {"output_padding": extra}
                        case(f"conv_transpose2d_{number:03}", "conv_transpose2d", lambda x, weight, bias=None: F.conv_transpose2d(x, weight, bias, **attrs),
                             {"x": randn(2, 4, 5, 6), "weight": randn(4, 8 // groups, *kernel)} | bias, attrs)
    plain = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    case("conv2d_empty", "conv2d", lambda x, weight: F.conv2d(x, weight), {"x": randn(0, 3, 6, 6), "weight": randn(2, 3, 3, 3)}, plain)
    case("conv2d_whole", "conv2d", lambda x, weight: F.conv2d(x, weight), {"x": randn(3, 5, 4, 6), "weight": randn(2, 5, 4, 6)}, plain)
    case("conv2d_1channel", "conv2d", lambda x, weight: F.conv2d(x, weight, padding=3), {"x": randn(1, 1, 28, 28), "weight": randn(3, 1, 7, 7)}, plain | {"padding": 3})
    case("conv2d_many", "conv2d", lambda x, weight: F.conv2d(x, weight, padding=1, stride=2), {"x": randn(1, 33, 13, 11), "weight": randn(17, 33, 3, 3)}, plain | {"padding": 1, "stride": 2})
    case("conv2d_big_padding", "conv2d", lambda x, weight: F.conv2d(x, weight, padding=4), {"x": randn(2, 2, 3, 3), "weight": randn(2, 2, 2, 2)}, plain | {"padding": 4})
    for i, attrs in enumerate(({"stride": 2, "padding": 0, "dilation": 1, "groups": 1}, {"stride": 1, "padding": 2, "dilation": 2, "groups": 2},
                               {"stride": 3, "padding": 1, "dilation": 1, "groups": 4})):
        case(f"conv1d_{i}", "conv1d", lambda x, weight, bias=None: F.conv1d(x, weight, bias, **attrs),
             {"x": randn(2, 4, 17), "weight": randn(8, 4 // attrs["groups"], 3)} | ({"bias": randn(8)} if i else {}), attrs)
        case(f"conv_transpose1d_{i}", "conv_transpose1d", lambda x, weight, bias=None: F.conv_transpose1d(x, weight, bias, **attrs),
             {"x": randn(2, 4, 7), "weight": randn(4, 8 // attrs["groups"], 3)} | ({"bias": randn(8)} if i else {}), attrs)
    for i, attrs in enumerate(({"stride": 1, "padding": 0, "dilation": 1, "groups": 1}, {"stride": 2, "padding": 1, "dilation": 1, "groups": 2},
                               {"stride": [1, 2, 1], "padding": [1, 0, 2], "dilation": [2, 1, 2], "groups": 1})):
        case(f"conv3d_{i}", "conv3d", lambda x, weight, bias=None: F.conv3d(x, weight, bias, **attrs),
             {"x": randn(2, 4, 5, 6, 7), "weight": randn(4, 4 // attrs["groups"], 3, 2, 3)} | ({"bias": randn(4)} if i else {}), attrs)


def pooling():
    for i, attrs in enumerate(({"kernel": 3, "stride": 1, "padding": 0}, {"kernel": [2, 3], "stride": [2, 1], "padding": [1, 0]}, {"kernel": 2, "stride": 3, "padding": 1},
                               {"kernel": [7, 8], "stride": 1, "padding": 0}, {"kernel": 1, "stride": 1, "padding": 0}, {"kernel": 5, "stride": 2, "padding": 2})):
        k, s, p = attrs["kernel"], attrs["stride"], attrs["padding"]
        case(f"max_pool2d_{i}", "max_pool2d", lambda x: F.max_pool2d(x, k, s, p), {"x": randn(2, 3, 7, 8)}, attrs)
        case(f"avg_pool2d_{i}", "avg_pool2d", lambda x: F.avg_pool2d(x, k, s, p), {"x": randn(2, 3, 7, 8)}, attrs)
        case(f"avg_pool2d_exclude_{i}", "avg_pool2d", lambda x: F.avg_pool2d(x, k, s, p, count_include_pad=False), {"x": randn(2, 3, 7, 8)}, attrs | {"count_include_pad": False})
    case("max_pool2d_ties", "max_pool2d", lambda x: F.max_pool2d(x, 2, 1), {"x": torch.ones(1, 1, 4, 4)}, {"kernel": 2, "stride": 1, "padding": 0})
    case("max_pool2d_empty", "max_pool2d", lambda x: F.max_pool2d(x, 2), {"x": randn(0, 3, 4, 4)}, {"kernel": 2})
    for size in (1, 3, [2, 5], [7, 1], [9, 10]):
        case(f"adaptive_avg_pool2d_{size}".replace(" ", ""), "adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, size), {"x": randn(2, 3, 7, 8)}, {"output": size})
        case(f"adaptive_max_pool2d_{size}".replace(" ", ""), "adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, size), {"x": randn(2, 3, 7, 8)}, {"output": size})


def normalisation():
    for training in (False, True):
        for key, shape in (("1d", (8, 5)), ("1d3", (4, 5, 7)), ("2d", (3, 5, 4, 6))):
            for eps, momentum, affine in ((1e-5, .1, True), (1e-3, .5, False)):
                def norm(x, running_mean, running_var, weight=None, bias=None):
                    mean, var = running_mean.detach().clone(), running_var.detach().clone()
                    y = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
                    return {"y": y, "running_mean": mean, "running_var": var}
                inputs = {"x": randn(*shape), "running_mean": randn(5), "running_var": uniform(5, low=.5, high=2)}
                if affine:
                    inputs |= {"weight": randn(5), "bias": randn(5)}
                case(f"batch_norm_{key}_{training}_{affine}", f"batch_norm{key[:2]}", norm, inputs, {"training": training, "momentum": momentum, "eps": eps},
                     no_grad=("running_mean", "running_var"))
    for shape, inner, affine in (((7,), 1, True), ((2, 3, 4, 5), 2, True), ((2, 3, 4), 3, True), ((3, 1), 1, True), ((5, 77), 1, False), ((0, 4), 1, True)):
        inputs = {"x": randn(*shape)} | ({"weight": randn(*shape[-inner:]), "bias": randn(*shape[-inner:])} if affine else {})
        case(f"layer_norm_{'x'.join(map(str, shape))}_{inner}", "layer_norm", lambda x, weight=None, bias=None: F.layer_norm(x, shape[-inner:], weight, bias, 1e-4), inputs,
             {"eps": 1e-4, "normalized": inner})
    for shape, groups in (((2, 6, 3), 3), ((2, 6, 5), 6), ((3, 4, 3, 2), 1), ((2, 4, 2, 3, 2), 2)):
        case(f"group_norm_{'x'.join(map(str, shape))}_{groups}", "group_norm", lambda x, weight, bias: F.group_norm(x, groups, weight, bias, 1e-5),
             {"x": randn(*shape), "weight": randn(shape[1]), "bias": randn(shape[1])}, {"groups": groups, "eps": 1e-5})
    case("group_norm_plain", "group_norm", lambda x: F.group_norm(x, 2), {"x": randn(2, 4, 5)}, {"groups": 2, "eps": 1e-5})
    for shape in ((2, 3, 5), (2, 3, 4, 5)):
        case(f"instance_norm_{len(shape)}", "instance_norm", lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias), {"x": randn(*shape), "weight": randn(3), "bias": randn(3)}, {"eps": 1e-5})
    def rms(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
    for shape in ((7,), (2, 9), (2, 3, 4, 5)):
        case(f"rms_norm_{len(shape)}", "rms_norm", rms, {"x": randn(*shape), "weight": randn(shape[-1])}, {"eps": 1e-5})


def attend(q, k, v, causal=False, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** .5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def attention():
    for i, (q, k, v, causal) in enumerate((((5, 4), (7, 4), (7, 3), False), ((2, 5, 4), (2, 5, 4), (2, 5, 6), True), ((2, 3, 1, 8), (2, 3, 9, 8), (2, 3, 9, 8), False),
                                           ((1, 2, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16), True), ((2, 4, 3), (2, 6, 3), (2, 6, 3), True))):
        case(f"attention_{i}", "scaled_dot_product_attention", lambda q, k, v: attend(q, k, v, causal), {"q": randn(*q), "k": randn(*k), "v": randn(*v)}, {"causal": causal})
    allowed = torch.tensor([[True, False, True], [True, True, True], [False, True, False], [True, True, False]])
    case("attention_mask", "scaled_dot_product_attention", lambda q, k, v, mask: attend(q, k, v, mask=mask), {"q": randn(2, 4, 5), "k": randn(2, 3, 5), "v": randn(2, 3, 6), "mask": allowed},
         {"causal": False})


def losses():
    pairs = {"mse_loss": F.mse_loss, "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss, "huber_loss": F.huber_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}
    for name, function in pairs.items():
        target = uniform if name == "bce_with_logits" else randn
        for reduction in ("mean", "sum", "none"):
            for shape in ((7,), (2, 3, 4)):
                case(f"{name}_{reduction}_{len(shape)}", name, lambda x, target: function(x, target, reduction=reduction), {"x": randn(*shape, scale=2.0), "target": target(*shape)}, {"reduction": reduction})
    case("smooth_l1_loss_beta", "smooth_l1_loss", lambda x, target: F.smooth_l1_loss(x, target, beta=.3), {"x": randn(9), "target": randn(9)}, {"reduction": "mean", "beta": .3})
    case("huber_loss_delta", "huber_loss", lambda x, target: F.huber_loss(x, target, delta=.3), {"x": randn(9), "target": randn(9)}, {"reduction": "mean", "delta": .3})
    case("bce_with_logits_large", "bce_with_logits", lambda x, target: F.binary_cross_entropy_with_logits(x, target), {"x": randn(9, scale=100.0), "target": uniform(9)}, {"reduction": "mean"})
    case("bce_with_logits_weights", "bce_with_logits", lambda x, target, weight, pos_weight: F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight),
         {"x": randn(4, 3), "target": uniform(4, 3), "weight": uniform(4, 3), "pos_weight": uniform(3, high=4)}, {"reduction": "mean"}, no_grad=("weight", "pos_weight"))
    for reduction in ("batchmean", "mean", "sum", "none"):
        case(f"kl_div_{reduction}", "kl_div", lambda x, target: F.kl_div(x, target, reduction=reduction), {"x": uniform(4, 5, low=-4, high=0), "target": uniform(4, 5)}, {"reduction": reduction})
    case("kl_div_zeros", "kl_div", lambda x, target: F.kl_div(x, target, reduction="sum"), {"x": uniform(4, low=-4, high=0), "target": torch.tensor([0., .5, 0., .5])}, {"reduction": "sum"}, no_grad=("target",))
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, .2):
            for weighted in (False, True):
                attrs = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 2}
                inputs = {"x": randn(6, 5), "target": torch.tensor([0, 2, 4, 1, 2, 3])} | ({"weight": uniform(5, low=.2, high=2)} if weighted else {})
                name = f"{reduction}_{smoothing}_{weighted}"
                case(f"cross_entropy_{name}", "cross_entropy", lambda x, target, weight=None: F.cross_entropy(x, target, weight, **attrs), inputs, attrs, no_grad=("weight",))
                if smoothing == 0:
                    plain = {"reduction": reduction, "ignore_index": 2}
                    case(f"nll_loss_{name}", "nll_loss", lambda x, target, weight=None: F.nll_loss(x, target, weight, **plain), inputs, plain, no_grad=("weight",))
        case(f"cross_entropy_images_{reduction}", "cross_entropy", lambda x, target: F.cross_entropy(x, target, reduction=reduction), {"x": randn(2, 4, 3, 5), "target": integers(4, 2, 3, 5)},
             {"reduction": reduction})
        case(f"cross_entropy_probabilities_{reduction}", "cross_entropy", lambda x, target: F.cross_entropy(x, target, reduction=reduction, label_smoothing=.1),
             {"x": randn(4, 3), "target": lambda: torch.rand(4, 3, generator=generator).softmax(1)}, {"reduction": reduction, "label_smoothing": .1}, no_grad=("target",))
        case(f"triplet_{reduction}", "triplet_margin_loss", lambda anchor, positive, negative: F.triplet_margin_loss(anchor, positive, negative, margin=.8, reduction=reduction),
             {"anchor": randn(7, 4), "positive": randn(7, 4), "negative": randn(7, 4)}, {"margin": .8, "reduction": reduction})
        signs = torch.tensor([1., -1., 1., -1., -1., 1.])
        case(f"cosine_embedding_{reduction}", "cosine_embedding_loss", lambda a, b, target: F.cosine_embedding_loss(a, b, target, margin=.1, reduction=reduction), {"a": randn(6, 4), "b": randn(6, 4), "target": signs},
             {"margin": .1, "reduction": reduction}, no_grad=("target",))
        case(f"margin_ranking_{reduction}", "margin_ranking_loss", lambda a, b, target: F.margin_ranking_loss(a, b, target, margin=.5, reduction=reduction), {"a": randn(6), "b": randn(6), "target": signs},
             {"margin": .5, "reduction": reduction}, no_grad=("target",))
        case(f"hinge_embedding_{reduction}", "hinge_embedding_loss", lambda x, target: F.hinge_embedding_loss(x, target, margin=.7, reduction=reduction), {"x": randn(6), "target": signs},
             {"margin": .7, "reduction": reduction}, no_grad=("target",))
        case(f"gaussian_nll_{reduction}", "gaussian_nll_loss", lambda x, target, var: F.gaussian_nll_loss(x, target, var, full=True, reduction=reduction), {"x": randn(4, 3), "target": randn(4, 3), "var": uniform(4, 3, low=.2, high=2)},
             {"full": True, "reduction": reduction})
        case(f"poisson_nll_{reduction}", "poisson_nll_loss", lambda x, target: F.poisson_nll_loss(x, target, reduction=reduction), {"x": randn(4, 3), "target": uniform(4, 3, high=5)},
             {"log_input": True, "reduction": reduction}, no_grad=("target",))
        case(f"soft_margin_{reduction}", "soft_margin_loss", lambda x, target: F.soft_margin_loss(x, target, reduction=reduction), {"x": randn(6), "target": signs}, {"reduction": reduction}, no_grad=("target",))
    case("gaussian_nll_clamped", "gaussian_nll_loss", lambda x, target, var: F.gaussian_nll_loss(x, target, var, eps=.5), {"x": randn(9), "target": randn(9), "var": uniform(9, low=.2, high=2)}, {"eps": .5, "reduction": "mean"})
    case("poisson_nll_full", "poisson_nll_loss", lambda x, target: F.poisson_nll_loss(x, target, log_input=False, full=True), {"x": uniform(4, 3, low=.2, high=3), "target": uniform(4, 3, high=5)},
         {"log_input": False, "full": True, "reduction": "mean"}, no_grad=("target",))
    def cosine(a, b):
        return F.cosine_similarity(a, b, dim=1)
    case("cosine_similarity", "cosine_similarity", cosine, {"a": randn(4, 5), "b": randn(4, 5)}, {"axis": 1})


def recurrent():
    for op, module in (("lstm", torch.nn.LSTM), ("gru", torch.nn.GRU)):
        for layers, both, batch_first, states in ((1, False, False, False), (2, False, True, False), (1, True, True, False), (2, True, True, True), (3, False, False, True)):
            net = module(5, 4, layers, bidirectional=both, batch_first=batch_first).double()
            names = [name for name, _ in net.named_parameters()]
            inputs = {"x": randn(3, 6, 5)} | {name: randn(*p.shape, scale=.5) for name, p in net.named_parameters()}
            batch = 3 if batch_first else 6
            if states:
                inputs["h0"] = randn(layers * (2 if both else 1), batch, 4)
                if op == "lstm":
                    inputs["c0"] = randn(layers * (2 if both else 1), batch, 4)

            def run(x, h0=None, c0=None, **parameters):
                state = None if h0 is None else (h0, c0) if op == "lstm" else h0
                for name in names:
                    del net._parameters[name]
                    setattr(net, name, parameters[name])
                net._flat_weights = [parameters[name] for name in names]
                y, last = net(x, state)
                for name in names:
                    delattr(net, name)
                    net._parameters[name] = None
                return {"y": y, "h": last[0], "c": last[1]} if op == "lstm" else {"y": y, "h": last}
            case(f"{op}_{layers}_{both}_{batch_first}_{states}", op, run, inputs, {"batch_first": batch_first, "num_layers": layers, "bidirectional": both})


def transformer():
    def module_case(name, op, module, inputs, forward, attrs):
        module = module.double()
        names = [key for key, _ in module.named_parameters()]
        parameters = {key: randn(*p.shape, scale=.3) for key, p in module.named_parameters()}

        def run(**values):
            given = {key: values.pop(key) for key in names}
            for key, value in given.items():
                owner = module
                *path, last = key.split(".")
                for part in path:
                    owner = getattr(owner, part)
                owner._parameters.pop(last, None)
                owner.__dict__[last] = value
            return forward(module, **values)
        case(name, op, run, inputs | parameters, attrs)

    def hidden(queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).triu(1)
    for causal in (False, True):
        for bias in (False, True):
            module_case(f"multihead_attention_{causal}_{bias}", "multihead_attention", torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=True),
                        {"query": randn(2, 5, 8), "key": randn(2, 6, 8), "value": randn(2, 6, 8)},
                        lambda m, query, key, value: m(query, key, value, attn_mask=hidden(5, 6) if causal else None)[0], {"heads": 2, "causal": causal})
    for first in (False, True):
        options = {"nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True, "norm_first": first, "activation": "gelu" if first else "relu"}
        attrs = {"heads": 2, "feed_forward": 12, "norm_first": first, "gelu": first}
        module_case(f"transformer_encoder_layer_{first}", "transformer_encoder_layer", torch.nn.TransformerEncoderLayer(8, **options), {"x": randn(2, 5, 8)},
                    lambda m, x: m(x, hidden(5, 5)), attrs | {"causal": True})
        module_case(f"transformer_decoder_layer_{first}", "transformer_decoder_layer", torch.nn.TransformerDecoderLayer(8, **options), {"x": randn(2, 5, 8), "memory": randn(2, 3, 8)},
                    lambda m, x, memory: m(x, memory, hidden(5, 5)), attrs)


def activations():
    for name, function, attrs in (("selu", F.selu, {}), ("celu", of(F.celu, alpha=1.5), {"alpha": 1.5}), ("softsign", F.softsign, {}), ("tanhshrink", F.tanhshrink, {}),
                                  ("hardshrink", of(F.hardshrink, lambd=.3), {"lambda": .3}), ("softshrink", of(F.softshrink, lambd=.3), {"lambda": .3}),
                                  ("threshold", of(F.threshold, threshold=.2, value=-4.0), {"threshold": .2, "value": -4.0})):
        case(name, name, function, {"x": randn(3, 37)}, attrs)
    for slopes in (1, 3):
        case(f"prelu_{slopes}", "prelu", lambda x, weight: F.prelu(x, weight), {"x": randn(2, 3, 4), "weight": randn(slopes)})
    for axis in (0, -1):
        case(f"glu_{axis}", "glu", lambda x: F.glu(x, axis), {"x": randn(4, 6)}, {"axis": axis})


def optimizers():
    def optimizer(name, op, make, attrs, steps=8):
        if wanted and not name.startswith(wanted):
            return
        p = torch.randn(3, 5, generator=generator)
        grads = torch.randn(steps, 3, 5, generator=generator)
        parameter = torch.nn.Parameter(p.double())
        tool = make([parameter])
        after = []
        for grad in grads:
            parameter.grad = grad.double()
            tool.step()
            after.append(parameter.detach().clone())
        save(name, op, attrs, {"in.p": p, "in.grads": grads, "out.p_after": torch.stack(after)})
    O = torch.optim
    for name, attrs in (("dampening", {"lr": .1, "momentum": .8, "dampening": .3}), ("decay", {"lr": .05, "weight_decay": .1}), ("nesterov_decay", {"lr": .1, "momentum": .5, "nesterov": True, "weight_decay": .2})):
        optimizer(f"sgd_{name}", "optim.sgd", lambda p: O.SGD(p, **attrs), attrs)
    for name, attrs in (("defaults", {"lr": .001}), ("amsgrad_decay", {"lr": .1, "betas": [.5, .9], "eps": 1e-3, "weight_decay": .1, "amsgrad": True})):
        optimizer(f"adam_{name}", "optim.adam", lambda p: O.Adam(p, **attrs), attrs)
        optimizer(f"adamw_{name}", "optim.adamw", lambda p: O.AdamW(p, **attrs), attrs)
    for name, attrs in (("defaults", {"lr": .01}), ("decay", {"lr": .02, "alpha": .5, "weight_decay": .1}), ("centered", {"lr": .01, "centered": True, "momentum": .3})):
        optimizer(f"rmsprop_{name}", "optim.rmsprop", lambda p: O.RMSprop(p, **attrs), attrs)
    for name, attrs in (("defaults", {"lr": .01}), ("decay", {"lr": .05, "betas": [.5, .9], "eps": 1e-3, "weight_decay": .1})):
        optimizer(f"radam_{name}", "optim.radam", lambda p: O.RAdam(p, **attrs), attrs, steps=12)
    for name, attrs in (("defaults", {"lr": .3, "max_iter": 8}), ("short", {"lr": .2, "max_iter": 12, "history_size": 2})):
        if wanted and not f"lbfgs_{name}".startswith(wanted):
            continue
        # Minimizes sum(w (p - t)^2 + (p - t)^4).
        p, t, w = (torch.randn(6, generator=generator) for _ in range(3))
        w = w.abs() + .2
        parameter = torch.nn.Parameter(p.double())
        tool = O.LBFGS([parameter], **attrs)
        after = []
        def closure():
            tool.zero_grad()
            loss = (w.double() * (parameter - t.double()) ** 2 + (parameter - t.double()) ** 4).sum()
            loss.backward()
            return loss
        for _ in range(3):
            tool.step(closure)
            after.append(parameter.detach().clone())
        save(f"lbfgs_{name}", "optim.lbfgs", attrs, {"in.p": p, "in.t": t, "in.w": w, "out.p_after": torch.stack(after)})
    optimizer("adagrad_decay", "optim.adagrad", lambda p: O.Adagrad(p, lr=.1, lr_decay=.2, weight_decay=.1), {"lr": .1, "lr_decay": .2, "weight_decay": .1})

    for name, attrs in (("min", {"factor": .5, "patience": 1}), ("max", {"factor": .1, "patience": 0, "mode": "max", "cooldown": 2, "threshold": .05}),
                        ("floor", {"factor": .3, "patience": 0, "min_lr": .01})):
        if wanted and not f"schedule_plateau_{name}".startswith(wanted):
            continue
        tool = O.SGD([torch.nn.Parameter(torch.zeros(1))], lr=.2)
        scheduler = O.lr_scheduler.ReduceLROnPlateau(tool, **attrs)
        measure = torch.tensor([5., 4., 4., 4., 3.9, 4., 4.1, 4.2, 4.2, 1., 2., 2., 2., 2., 2., .99, .9, .95, .95])
        rates = []
        for value in measure.tolist():
            scheduler.step(value)
            rates.append(tool.param_groups[0]["lr"])
        save(f"schedule_plateau_{name}", "schedule.plateau", attrs | {"lr": .2}, {"in.measure": measure, "out.lr": torch.tensor(rates)})


def functions():
    ties = torch.tensor([[1., 2., float("nan"), -1.], [2., 2., 3., float("inf")]])
    row = torch.tensor([1., 2., 3., 4.])
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        case(f"{name}_broadcast", name, lambda x, y: getattr(torch, name)(x, y).float(), {"x": ties, "y": row}, no_grad=("x", "y"))
    for name in ("isnan", "isinf", "isfinite"):
        case(name, name, lambda x: getattr(torch, name)(x).float(), {"x": ties}, no_grad=("x",))
    for axis in (0, -1):
        case(f"any_{axis}", "any", lambda x: torch.any(x > 1.5, axis).float(), {"x": ties}, {"axis": axis, "above": 1.5}, no_grad=("x",))
        case(f"all_{axis}", "all", lambda x: torch.all(x > 1.5, axis).float(), {"x": ties}, {"axis": axis, "above": 1.5}, no_grad=("x",))
    case("masked_select", "masked_select", lambda x, mask: torch.masked_select(x, mask), {"x": randn(3, 4), "mask": mask(4)})
    case("nonzero", "nonzero", lambda mask: torch.nonzero(mask), {"mask": mask(3, 4)})
    case("linspace", "linspace", lambda: torch.linspace(-1.5, 2.5, 7, dtype=torch.float64), {}, {"start": -1.5, "stop": 2.5, "count": 7})
    case("arange", "arange", lambda: torch.arange(-1.0, 2.0, .3, dtype=torch.float64), {}, {"start": -1.0, "stop": 2.0, "step": .3})
    case("one_hot", "one_hot", lambda index: F.one_hot(index, 5), {"index": integers(5, 2, 3)}, {"classes": 5})
    for diagonal in (-1, 0, 2):
        case(f"tril_{diagonal}", "tril", of(torch.tril, diagonal=diagonal), {"x": randn(2, 3, 4)}, {"diagonal": diagonal})
        case(f"triu_{diagonal}", "triu", of(torch.triu, diagonal=diagonal), {"x": randn(2, 3, 4)}, {"diagonal": diagonal})
        case(f"diag_vector_{diagonal}", "diag", of(torch.diag, diagonal=diagonal), {"x": randn(3)}, {"diagonal": diagonal})
        case(f"diag_matrix_{diagonal}", "diag", of(torch.diag, diagonal=diagonal), {"x": randn(3, 4)}, {"diagonal": diagonal})
    case("repeat", "repeat", lambda x: x.repeat(2, 3, 1, 2), {"x": randn(2, 1, 3)}, {"times": [2, 3, 1, 2]})
    case("flip", "flip", lambda x: torch.flip(x, (0, -1)), {"x": randn(2, 3, 4)}, {"axes": [0, -1]})
    for shift, axis in ((1, 0), (-5, -1)):
        case(f"roll_{axis}", "roll", lambda x: torch.roll(x, shift, axis), {"x": randn(2, 3, 4)}, {"shift": shift, "axis": axis})
    case("outer", "outer", lambda a, b: torch.outer(a, b), {"a": randn(3), "b": randn(4)})
    case("dot", "dot", lambda a, b: torch.dot(a, b), {"a": randn(5), "b": randn(5)})
    case("cross", "cross", lambda a, b: torch.linalg.cross(a, b, dim=0), {"a": randn(3, 4), "b": randn(3, 1)}, {"axis": 0})
    def unique(x):
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return {"values": values, "inverse": inverse, "counts": counts}
    case("unique", "unique", unique, {"x": lambda: torch.randint(4, (3, 5), generator=generator).float()}, no_grad=("x",))
    for right in (False, True):
        case(f"searchsorted_{right}", "searchsorted", lambda sorted, values: torch.searchsorted(sorted, values, right=right),
             {"sorted": torch.tensor([-1., 0., 0., 2., 2., 5.]), "values": torch.tensor([[0., 2., -3.], [6., 5., 1.]])}, {"right": right},
             no_grad=("sorted", "values"))
    case("bincount", "bincount", lambda x: torch.bincount(x, minlength=4), {"x": integers(7, 20)}, {"at_least": 4})
    case("histogram", "histogram", lambda x: torch.histc(x, 4, -1, 1), {"x": uniform(50, low=-1.5, high=1.5)}, {"bins": 4, "low": -1.0, "high": 1.0}, no_grad=("x",))
    case("logaddexp", "logaddexp", lambda a, b: torch.logaddexp(a, b), {"a": randn(3, 4, scale=9.0), "b": randn(4, scale=9.0)})
    case("nan_to_num", "nan_to_num", lambda x: torch.nan_to_num(x, .5, 7.0, -8.0), {"x": torch.cat((ties[0], ties[1], -ties[1]))}, {"nan": .5, "above": 7.0, "below": -8.0})
    for p in (1.0, 2.0, 3.0):
        case(f"cdist_{p}", "cdist", lambda a, b: torch.cdist(a, b, p), {"a": randn(2, 3, 4), "b": randn(2, 5, 4)}, {"p": p})


def linear_algebra():
    L = torch.linalg
    case("linalg_solve", "linalg.solve", lambda a, b: L.solve(a, b), {"a": randn(2, 3, 3), "b": randn(2, 3, 2)})
    case("linalg_inverse", "linalg.inverse", lambda x: L.inv(x), {"x": randn(2, 4, 4)})
    case("linalg_det", "linalg.det", lambda x: L.det(x), {"x": randn(2, 4, 4)})
    # What is factorized is x + xT + 6 on the diagonal.
    def symmetric(x):
        return x + x.transpose(-1, -2) + 6 * torch.eye(x.shape[-1], dtype=x.dtype)
    case("linalg_cholesky", "linalg.cholesky", lambda x: L.cholesky(symmetric(x)), {"x": uniform(2, 4, 4)})
    def qr(x):
        q, r = L.qr(x)
        return {"q": q, "r": r}
    case("linalg_qr", "linalg.qr", qr, {"x": randn(2, 5, 3)})
    # Squares, and U VT: what does not depend on signs.
    def svd(x):
        u, s, vh = L.svd(x, full_matrices=False)
        return {"u2": u * u, "s": s, "uv": u @ vh}
    case("linalg_svd_tall", "linalg.svd", svd, {"x": randn(2, 5, 3)})
    case("linalg_svd_wide", "linalg.svd", svd, {"x": randn(2, 3, 5)})
    def eigh(x):
        w, v = L.eigh(symmetric(x))
        return {"w": w, "v2": v * v}
    case("linalg_eigh", "linalg.eigh", eigh, {"x": randn(2, 4, 4)})


def fourier():
    # Complex numbers are pairs in the files.
    as_complex, as_pairs = torch.view_as_complex, torch.view_as_real
    for n in (None, 6, 9):
        for norm in ("backward", "ortho", "forward"):
            options = {"n": n, "norm": norm}
            name = f"{n or 'all'}_{norm}"
            case(f"fft_rfft_{name}", "fft.rfft", lambda x: as_pairs(torch.fft.rfft(x, **options)), {"x": randn(3, 8)}, options)
            case(f"fft_irfft_{name}", "fft.irfft", lambda x: torch.fft.irfft(as_complex(x), **options), {"x": randn(3, 5, 2)}, options)
            case(f"fft_fft_{name}", "fft.fft", lambda x: as_pairs(torch.fft.fft(as_complex(x), **options)), {"x": randn(3, 7, 2)}, options)
            case(f"fft_ifft_{name}", "fft.ifft", lambda x: as_pairs(torch.fft.ifft(as_complex(x), **options)), {"x": randn(3, 7, 2)}, options)
    for s in (None, (6, 7)):
        options = {"s": s, "norm": "ortho" if s else "backward"}
        name = "cut" if s else "all"
        case(f"fft_rfft2_{name}", "fft.rfft2", lambda x: as_pairs(torch.fft.rfft2(x, **options)), {"x": randn(2, 5, 8)}, options)
        case(f"fft_irfft2_{name}", "fft.irfft2", lambda x: torch.fft.irfft2(as_complex(x), **options), {"x": randn(2, 5, 5, 2)}, options)
        case(f"fft_fft2_{name}", "fft.fft2", lambda x: as_pairs(torch.fft.fft2(as_complex(x), **options)), {"x": randn(2, 4, 8, 2)}, options)
        case(f"fft_ifft2_{name}", "fft.ifft2", lambda x: as_pairs(torch.fft.ifft2(as_complex(x), **options)), {"x": randn(2, 4, 8, 2)}, options)


def further():
    """Lists, rounding, order, scattered reductions, images, cells, distributions."""
    for name in ("sign", "floor", "ceil", "round"):
        case(name, name, getattr(torch, name), {"x": randn(3, 7, scale=3.0)})
    case("lgamma", "lgamma", torch.lgamma, {"x": uniform(3, 7, low=-3.0, high=9.0)})
    case("digamma", "digamma", torch.digamma, {"x": uniform(3, 7, low=.1, high=30.0)})
    case("atan2", "atan2", lambda y, x: torch.atan2(y, x), {"y": randn(3, 4), "x": randn(4)})
    case("concat_list", "concat_list", lambda a, b, c: torch.cat((a, b, c), 1), {"a": randn(2, 3, 2), "b": randn(2, 1, 2), "c": randn(2, 4, 2)}, {"axis": 1})
    case("stack_list", "stack_list", lambda a, b, c: torch.stack((a, b, c), -1), {"a": randn(2, 3), "b": randn(2, 3), "c": randn(2, 3)}, {"axis": -1})
    def parts(cut):
        return lambda x: {f"y{i}": part for i, part in enumerate(cut(x))}
    case("split", "split", parts(lambda x: torch.split(x, 3, 1)), {"x": randn(2, 7)}, {"size": 3, "axis": 1})
    case("split_sizes", "split", parts(lambda x: torch.split(x, [4, 1, 2], 1)), {"x": randn(2, 7)}, {"sizes": [4, 1, 2], "axis": 1})
    case("chunk", "chunk", parts(lambda x: torch.chunk(x, 5, 1)), {"x": randn(2, 7)}, {"chunks": 5, "axis": 1})
    case("unbind", "unbind", parts(lambda x: torch.unbind(x, 1)), {"x": randn(2, 3)}, {"axis": 1})
    case("meshgrid", "meshgrid", lambda a, b: dict(zip(("p", "q"), torch.meshgrid(a, b, indexing="ij"))), {"a": randn(3), "b": randn(2)})
    for axis in (0, -1):
        case(f"prod_{axis}", "prod", of(torch.prod, dim=axis), {"x": randn(3, 4)}, {"axis": axis})
        case(f"median_{axis}", "median", lambda x: dict(zip(("y", "index"), torch.median(x, axis))), {"x": randn(5, 4)}, {"axis": axis})
    case("prod_zeros", "prod", of(torch.prod, dim=1), {"x": torch.tensor([[2., 0., 3.], [0., 0., 1.], [1., 2., 3.]])}, {"axis": 1})
    case("median_all", "median", torch.median, {"x": torch.tensor([[3., 1., 2.], [2., 4., 2.]])})
    for q in (0.0, .3, .5, 1.0):
        for interpolation in ("linear", "lower", "higher", "nearest", "midpoint"):
            if interpolation == "linear" or q == .3:
                case(f"quantile_{q}_{interpolation}", "quantile", of(torch.quantile, q=q, dim=1, interpolation=interpolation), {"x": randn(3, 6)},
                     {"q": q, "axis": 1, "interpolation": interpolation})
    case("index_add", "index_add", lambda x, index, src: x.index_add(1, index, src), {"x": randn(2, 4, 3), "index": integers(4, 6), "src": randn(2, 6, 3)}, {"axis": 1})
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for own in (True, False):
            case(f"scatter_reduce_{how}_{own}", "scatter_reduce", lambda x, index, src: x.scatter_reduce(0, index, src, how, include_self=own),
                 {"x": randn(4, 3), "index": integers(3, 5, 3), "src": randn(5, 3)}, {"axis": 0, "how": how, "include_self": own})
    for mode in ("bilinear", "nearest"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                case(f"grid_sample_{mode}_{padding}_{corners}", "grid_sample",
                     lambda x, grid: F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners),
                     {"x": randn(2, 2, 3, 4), "grid": uniform(2, 3, 2, 2, low=-1.8, high=1.8)}, {"mode": mode, "padding": padding, "align_corners": corners})
    case("unfold", "unfold", of(F.unfold, kernel_size=(2, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1)), {"x": randn(2, 3, 4, 6)},
         {"window": [2, 3], "dilation": [1, 2], "padding": [1, 0], "stride": [2, 1]})
    case("pixel_shuffle", "pixel_shuffle", of(F.pixel_shuffle, upscale_factor=2), {"x": randn(2, 8, 2, 3)}, {"factor": 2})
    case("max_pool1d", "max_pool1d", of(F.max_pool1d, kernel_size=3, stride=2, padding=1), {"x": randn(2, 3, 8)}, {"window": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil": False})
    case("max_pool1d_ceil", "max_pool1d", of(F.max_pool1d, kernel_size=3, dilation=2, ceil_mode=True), {"x": randn(2, 3, 9)}, {"window": 3, "stride": 0, "padding": 0, "dilation": 2, "ceil": True})

    for op, module in (("lstm_cell", torch.nn.LSTMCell), ("gru_cell", torch.nn.GRUCell)):
        for states in (False, True):
            net = module(3, 2).double()
            names = [name for name, _ in net.named_parameters()]
            inputs = {"x": randn(4, 3)} | {name: randn(*p.shape, scale=.5) for name, p in net.named_parameters()}
            if states:
                inputs |= {"h0": randn(4, 2)} | ({"c0": randn(4, 2)} if op == "lstm_cell" else {})
            def run(x, h0=None, c0=None, **parameters):
                state = None if h0 is None else (h0, c0) if op == "lstm_cell" else h0
                out = torch.func.functional_call(net, parameters, (x, state))
                return dict(zip(("h", "c"), out)) if op == "lstm_cell" else {"h": out}
            case(f"{op}_{states}", op, run, inputs)

    D = torch.distributions
    def both(make):
        """The distribution from p and from q: log_prob and entropy of p, and the divergence of q."""
        def run(**values):
            x = values.pop("x")
            p, q = (make(**{key[:-1]: value for key, value in values.items() if key[-1] == end}) for end in "pq")
            return {"log_prob": p.log_prob(x), "entropy": p.entropy(), "kl": D.kl_divergence(p, q)}
        return run
    case("normal", "distributions.normal", both(lambda a, b: D.Normal(a, b)),
         {"x": randn(3, 2), "ap": randn(3, 2), "bp": uniform(3, 2, low=.2, high=2.0), "aq": randn(3, 2), "bq": uniform(3, 2, low=.2, high=2.0)})
    case("beta", "distributions.beta", both(lambda a, b: D.Beta(a, b)),
         {"x": uniform(3, 2, low=.05, high=.95), **{key: uniform(3, 2, low=.3, high=5.0) for key in ("ap", "bp", "aq", "bq")}})
    for kind in ("logits", "probs"):
        numbers = (lambda *shape: uniform(*shape, low=.1, high=.9)) if kind == "probs" else (lambda *shape: randn(*shape, scale=2.0))
        case(f"bernoulli_{kind}", "distributions.bernoulli", both(lambda a: D.Bernoulli(**{kind: a})),
             {"x": lambda: (torch.rand(3, 2, generator=generator) < .5).float(), "ap": numbers(3, 2), "aq": numbers(3, 2)}, {"kind": kind}, no_grad=("x",))
        case(f"categorical_{kind}", "distributions.categorical", both(lambda a: D.Categorical(**{kind: a})),
             {"x": integers(4, 3), "ap": numbers(3, 4), "aq": numbers(3, 4)}, {"kind": kind})


for number, part in enumerate((elementwise, reductions, shapes, products, pooling, normalisation, attention, losses, recurrent, transformer, activations, optimizers, functions, linear_algebra, fourier, further)):
    generator.manual_seed(zlib.crc32(part.__name__.encode()))
    torch.manual_seed(number)
    part()
