#!/usr/bin/env python3
"""Writes second_orders.hpp: for each operator f, by PyTorch in double, numbers x and the gradient by x of
sum(w * gradient by x of sum(v * f(x)^2)). The square makes linear operators count; v and w are as in
second_orders_test.cpp. Operators of several inputs take them from x one after the other.
usage: python3 second_orders.py > second_orders.hpp"""

import math
import pathlib
import random

import torch
import torch.nn.functional as F

CASES = {}


def case(name, function, *shapes, low=-2.0, high=2.0):
    CASES[name] = (function, shapes, low, high)


def index(*numbers):
    return torch.tensor(numbers)


ROW, FLAT, STACK, IMAGE = (7,), (2, 4), (2, 3, 2), (1, 2, 4, 4)

# Element-wise.
case("abs", torch.abs, ROW)
case("neg", torch.neg, ROW)
case("clamp", lambda x: torch.clamp(x, -0.7, 1.1), ROW)
case("hardtanh", F.hardtanh, ROW)
case("relu6", lambda x: F.relu6(x * 4), ROW)
case("hardsigmoid", lambda x: F.relu6(x * 2 + 3) / 6, ROW)  # PyTorch has no second derivative
case("hardswish", lambda x: F.hardswish(x * 2), ROW)
case("leaky_relu", lambda x: F.leaky_relu(x, 0.2), ROW)
case("elu", lambda x: F.elu(x, 1.5), ROW)
case("celu", lambda x: F.celu(x, 1.5), ROW)
case("selu", F.selu, ROW)
case("hardshrink", F.hardshrink, ROW)
case("softshrink", F.softshrink, ROW)
case("softsign", F.softsign, ROW)
case("tanhshrink", F.tanhshrink, ROW)
case("threshold", lambda x: F.threshold(x, 0.3, -1.0), ROW, low=-0.5)
case("lgamma", torch.lgamma, ROW, low=0.3, high=4)
case("digamma", torch.digamma, ROW, low=0.3, high=4)
case("nan_to_num", torch.nan_to_num, ROW)
case("to", lambda x: x.double(), ROW)
case("gelu", F.gelu, ROW)
case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), ROW)
case("softplus", lambda x: F.softplus(x, 2), ROW)
case("pow_scalar", lambda x: x ** 1.7, ROW, low=0.3)
case("prelu", lambda x, a: F.prelu(x, a), (2, 3, 2), (3,))
case("glu", lambda x: F.glu(x, 1), (2, 4))
# Element-wise, of two inputs, which broadcast.
case("add", lambda a, b: a + b, FLAT, (4,))
case("sub", lambda a, b: a - b, FLAT, (4,))
case("mul", lambda a, b: a * b, FLAT, (4,))
case("div", lambda a, b: a / b, FLAT, (4,), low=0.4)
case("pow", torch.pow, FLAT, (4,), low=0.4)
case("atan2", torch.atan2, FLAT, (4,))
case("logaddexp", torch.logaddexp, FLAT, (4,))
case("maximum", torch.maximum, FLAT, (4,))
case("minimum", torch.minimum, FLAT, (4,))
case("where", lambda a, b: torch.where(torch.tensor([True, False, False, True]), a, b), FLAT, (4,))
case("masked_fill", lambda a: a.masked_fill(torch.tensor([True, False, False, True]), 3), FLAT)
# Losses.
for reduction in ("mean", "sum", "none"):
    case(f"mse_loss_{reduction}", lambda x, t, r=reduction: F.mse_loss(x, t, reduction=r), ROW, ROW)
case("l1_loss", F.l1_loss, ROW, ROW)
case("huber_loss", lambda x, t: F.huber_loss(x, t, delta=0.8), ROW, ROW)
case("smooth_l1_loss", lambda x, t: F.smooth_l1_loss(x, t, beta=0.8), ROW, ROW)
case("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), FLAT, FLAT, low=0.2)
case("bce_with_logits", F.binary_cross_entropy_with_logits, ROW, ROW, low=0.1, high=0.9)
WEIGHTS = torch.tensor([0.5, 1, 2, 0.25, 1, 3, 0.1], dtype=torch.float64)
case("bce_with_logits_weights", lambda x, t: F.binary_cross_entropy_with_logits(x, t, WEIGHTS, pos_weight=WEIGHTS + 1),
     ROW, ROW, low=0.1, high=0.9)
SIGNS = torch.tensor([1., -1, 1, 1, -1, -1, 1], dtype=torch.float64)
case("hinge_embedding_loss", lambda x: F.hinge_embedding_loss(x, SIGNS), ROW)
case("margin_ranking_loss", lambda a, b: F.margin_ranking_loss(a, b, SIGNS, 0.4), ROW, ROW)
case("soft_margin_loss", lambda x: F.soft_margin_loss(x, SIGNS), ROW)
case("gaussian_nll_loss", lambda x, t, v: F.gaussian_nll_loss(x, t, v), ROW, ROW, ROW, low=0.3)
case("poisson_nll_loss", F.poisson_nll_loss, ROW, ROW, low=0.3)
case("triplet_margin_loss", lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=2), FLAT, FLAT, FLAT)
case("cosine_embedding_loss", lambda a, b: F.cosine_embedding_loss(a, b, SIGNS[:2], 0.1), FLAT, FLAT)
case("cosine_similarity", F.cosine_similarity, FLAT, FLAT)
case("cross_entropy", lambda x: F.cross_entropy(x, index(2, -100, 0), label_smoothing=0.2), (3, 4))
CLASS_WEIGHTS = torch.tensor([0.5, 1, 2, 0.25], dtype=torch.float64)
case("cross_entropy_weight", lambda x: F.cross_entropy(x, index(2, 1, 0), CLASS_WEIGHTS), (3, 4))
case("cross_entropy_images", lambda x: F.cross_entropy(x, index(2, 1, 0, 2).reshape(1, 2, 2)), (1, 3, 2, 2))
case("cross_entropy_probabilities", F.cross_entropy, FLAT, FLAT, low=0.1)
case("nll_loss", lambda x: F.nll_loss(x, index(2, 1, 0)), (3, 4))
# Reductions.
case("sum", lambda x: x.sum(1), STACK)
case("mean", lambda x: x.mean(), STACK)
case("var", lambda x: x.var(1), STACK)
case("var_axes", lambda x: x.var((0, 2)), STACK)
case("std", lambda x: x.std(1), STACK)
for p in (1, 2, 3, math.inf):
    case(f"norm_{p}", lambda x, p=p: torch.linalg.vector_norm(x, p, 1), STACK)
case("amax", lambda x: x.amax(1), STACK)
case("amin", lambda x: x.amin(1), STACK)
case("prod", lambda x: x.prod(1), STACK)
case("cumsum", lambda x: x.cumsum(1), STACK)
case("cumprod", lambda x: x.cumprod(1), STACK)
case("logsumexp", lambda x: x.logsumexp(1), STACK)
case("softmax", lambda x: x.softmax(1), STACK)
case("log_softmax", lambda x: x.log_softmax(1), STACK)
case("median", lambda x: x.median(1).values, STACK)
case("quantile", lambda x: x.quantile(0.3, 1), STACK)
case("sort", lambda x: x.sort(1).values, STACK)
case("topk", lambda x: x.topk(2, 1).values, STACK)
# Shapes and picking.
case("permute", lambda x: x.permute(2, 0, 1), STACK)
case("expand", lambda x: x.expand(3, 4), (3, 1))
case("slice", lambda x: x[:, 1:3], STACK)
case("concat", lambda a, b: torch.cat([a, b], 1), FLAT, (2, 2))
case("concat_list", lambda a, b: torch.cat([a, b, a], 1), FLAT, (2, 2))
case("stack_list", lambda a, b: torch.stack([a, b], 1), ROW, ROW)
case("split", lambda x: x.split(2, 1)[1], STACK)
case("unbind", lambda x: x.unbind(1)[2], STACK)
case("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="ij")[1], (2,), (3,))
case("flip", lambda x: x.flip(1), STACK)
case("roll", lambda x: x.roll(1, 1), STACK)
case("repeat", lambda x: x.repeat(2, 3), (2, 2))
case("tril", torch.tril, (3, 3))
case("diag", torch.diag, (3, 3))
case("pad2d", lambda x: F.pad(x, (1, 0, 0, 2), value=0.5), (2, 2, 3))
case("pad2d_reflect", lambda x: F.pad(x, (1, 0, 0, 1), "reflect"), (1, 1, 2, 3))
case("index_select", lambda x: x.index_select(1, index(2, 0, 2)), STACK)
case("gather", lambda x: x.gather(1, index(2, 0, 0, 1).reshape(2, 2)), (2, 3))
case("embedding", lambda w: F.embedding(index(2, 0, 2), w), (3, 2))
case("scatter", lambda x, s: x.scatter(1, index(2, 0, 0, 1).reshape(2, 2), s), (2, 3), (2, 2))
case("scatter_add", lambda x, s: x.scatter_add(1, index(2, 2, 0, 1).reshape(2, 2), s), (2, 3), (2, 2))
case("index_add", lambda x, s: x.index_add(1, index(2, 2), s), (2, 3), (2, 2))
for how in ("sum", "mean", "prod", "amax", "amin"):
    case(f"scatter_reduce_{how}", lambda x, s, h=how: x.scatter_reduce(1, index(2, 2, 0, 1).reshape(2, 2), s, h), (2, 3),
         (2, 2))
case("masked_select", lambda x: x.masked_select(torch.tensor([True, False, False, True])), FLAT)
# Products.
case("matmul", torch.matmul, (2, 3), (3, 2))
case("bmm", torch.matmul, STACK, (2, 2, 2))
case("linear", F.linear, (3, 2), (2, 2), (2,))
case("einsum", lambda a, b: torch.einsum("bij,kj->bik", a, b), STACK, (2, 2))
case("outer", torch.outer, (2,), (3,))
case("dot", torch.dot, ROW, ROW)
case("cross", torch.linalg.cross, (2, 3), (2, 3))
for p in (1, 2, 3):
    case(f"cdist_{p}", lambda a, b, p=p: torch.cdist(a, b, p), (2, 3), (3, 3))
case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (1, 2, 4), (2, 2, 3), (2,))
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (1, 1, 4, 4), (2, 1, 3, 3), (2,))
case("conv3d", lambda x, w, b: F.conv3d(x, w, b), (1, 1, 2, 3, 2), (1, 1, 2, 2, 1), (1,))
case("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), (1, 2, 3), (2, 1, 2))
case("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), (1, 1, 2, 3), (1, 2, 2, 2))


def attend(q, k, v):  # PyTorch's fused attention has no second derivative
    hidden = torch.ones(3, 3).triu(1).bool()
    return (q @ k.mT / math.sqrt(2)).masked_fill(hidden, -math.inf).softmax(-1) @ v


case("attention", attend, (1, 3, 2), (1, 3, 2), (1, 3, 2))
# Images.
case("max_pool1d", lambda x: F.max_pool1d(x, 2), (1, 2, 4))
case("max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1), IMAGE)
case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE)
case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), IMAGE)
case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), IMAGE)
case("global_avg_pool", lambda x: x.mean((2, 3)), IMAGE)
case("upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=2), (1, 1, 2, 3))
case("upsample_bilinear2d", lambda x: F.interpolate(x, (3, 5), mode="bilinear"), (1, 1, 2, 3))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 4, 2, 1))
case("unfold", lambda x: F.unfold(x, 2), (1, 1, 3, 3))
case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (1, 2, 3, 3), (1, 2, 1, 2), low=-0.9,
     high=0.9)
# Normalisation.
case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), FLAT, (4,), (4,))
case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 2), (4,), (4,))
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, 2, 3), (2,), (2,))
case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, eps=1e-6), FLAT, (4,))
case("batch_norm", lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b, True), (4, 3),
     (3,), (3,))
# Recurrent layers: the tape of the formulas, as PyTorch documents them.


def lstm(x, wi, wh, bi, bh):
    h, c, out = torch.zeros(1, 2).double(), torch.zeros(1, 2).double(), []
    for t in x:
        i, f, g, o = (t @ wi.T + bi + h @ wh.T + bh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out)


def gru(x, wi, wh, bi, bh):
    h, out = torch.zeros(1, 2).double(), []
    for t in x:
        ri, zi, ni = (t @ wi.T + bi).chunk(3, 1)
        rh, zh, nh = (h @ wh.T + bh).chunk(3, 1)
        n, z = (ni + (ri + rh).sigmoid() * nh).tanh(), (zi + zh).sigmoid()
        h = (1 - z) * n + z * h
        out.append(h)
    return torch.stack(out)


case("lstm", lstm, (2, 1, 2), (8, 2), (8, 2), (8,), (8,))
case("gru", gru, (2, 1, 2), (6, 2), (6, 2), (6,), (6,))
# Linear algebra and Fourier transforms.


def symmetric(x, diagonal):
    return (x + x.mT) / 2 + diagonal * torch.eye(3).double()


SQUARE = (1, 3, 3)
case("solve", torch.linalg.solve, SQUARE, (1, 3, 2))
case("inverse", torch.linalg.inv, SQUARE)
case("det", torch.linalg.det, SQUARE)
case("cholesky", lambda x: torch.linalg.cholesky(symmetric(x, 6)), SQUARE)
case("qr_q", lambda x: torch.linalg.qr(x).Q, (1, 4, 3))
case("qr_r", lambda x: torch.linalg.qr(x).R, (1, 4, 3))
case("svd_u", lambda x: torch.linalg.svd(x, False).U, (1, 4, 3))
case("svd_s", lambda x: torch.linalg.svd(x, False).S, (1, 4, 3))
case("svd_vh", lambda x: torch.linalg.svd(x, False).Vh, (1, 2, 3))
case("eigh_values", lambda x: torch.linalg.eigh(symmetric(x, 0)).eigenvalues, SQUARE)
case("eigh_vectors", lambda x: torch.linalg.eigh(symmetric(x, 0)).eigenvectors, SQUARE)
case("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x)), (2, 5))
case("irfft", lambda x: torch.fft.irfft(torch.view_as_complex(x)), (3, 2))


def second(name, function, shapes, low, high):
    draw = random.Random(name)
    count = sum(map(math.prod, shapes))
    x = torch.tensor([n / 500 for n in draw.sample(range(round(low * 500), round(high * 500)), count)],
                     dtype=torch.float64, requires_grad=True)
    parts = [part.reshape(shape) for part, shape in zip(x.split([math.prod(s) for s in shapes]), shapes)]
    y = function(*parts).reshape(-1)
    v = torch.tensor([0.5 + i * 7 % 11 / 10 for i in range(y.numel())], dtype=torch.float64)
    w = torch.tensor([1 - i * 5 % 13 / 8 for i in range(count)], dtype=torch.float64)
    (first,) = torch.autograd.grad((v * y * y).sum(), x, create_graph=True)
    return x.tolist(), torch.autograd.grad((w * first).sum(), x)[0].tolist()


print("#pragma once")
print(f"// Written by {pathlib.Path(__file__).name} with PyTorch {torch.__version__.split('+')[0]}.")
print("#include <map>\n#include <string_view>\n#include <vector>\n\nnamespace golden_second_orders {\n")
print("struct Numbers {\n  std::vector<double> x, second;\n};\ninline const std::map<std::string_view, Numbers> cases = {")
for name, rest in CASES.items():
    x, numbers = second(name, *rest)
    print(f'    {{"{name}",\n     {{{{' + ", ".join(f"{n:.3f}".rstrip("0").rstrip(".") for n in x) + "},")
    print("      {" + ", ".join(f"{n:.11g}" for n in numbers) + "}}},")
print("};\n\n}  // namespace golden_second_orders")
