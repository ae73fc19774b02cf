#!/usr/bin/env python3
"""Writes tests/edge/values.json: PyTorch's results for edge-case numbers, which tests/unit/edge expects of the library.

    python3 tests/edge_values.py        (needs torch 2.15; the same file for the same PyTorch)

Each operator is applied to zeros, tiny, subnormal, large and overflowing numbers, infinities, NaN, one element, and no
element, in float and double: the file has its value, the gradients for a fixed gradient of the value, and PyTorch's
errors. tests/unit/edge applies operators of the same names, with the same constants.
"""

import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F

inf, nan = math.inf, math.nan
torch.set_num_threads(1)

KINDS = {"f32": torch.float32, "f64": torch.float64}


def pool(kind):
    """The inputs by name."""
    single = kind == "f32"
    tiny, sub = (1e-30, 1e-40) if single else (1e-200, 1e-310)
    huge, most = (1e20, torch.finfo(torch.float32).max) if single else (1e200, sys.float_info.max)
    p = {}

    def put(name, shape, values):
        assert math.prod(shape) == len(values), name
        p[name] = (list(shape), [float(v) for v in values])

    signed = [tiny, sub, 1e-4, 0.25, 0.5, 1, 2, 3, 6, 12, 15, 20, 30, 88, 100, 800, 1e4, 1e10, huge, inf]
    put("specials", [43], [0.0, -0.0, nan] + signed + [-v for v in signed])
    put("one", [1], [0.75])
    put("a sign", [1], [1])
    put("none", [0], [])
    # All pairs of two lists.
    left = [0.0, tiny, -sub, 0.5, 1, -1, 3, -20, 1e4, -1e10, huge, -huge, inf, -inf, nan]
    right = [0.0, -tiny, sub, 0.5, 1, -1, 2, 30, -1e4, 1e10, huge, -huge, inf, -inf, nan]
    put("left", [225], [a for a in left for _ in right])
    put("right", [225], [b for _ in left for b in right])
    put("variances", [225], [abs(b) for _ in left for b in right])
    # For targets in [0, 1], and 1 and -1.
    put("logits", [60], [x for x in [0, tiny, 1, -1, 12, 15, -15, 20, -20, 100, -100, 1e4, huge, -huge, most, -most, inf,
                                     -inf, nan, -sub] for _ in range(3)])
    put("shares", [60], [0, 1, 0.25] * 20)
    put("signs", [60], [1, -1, 1] * 20)
    rows = [
        [0, 0, 0, 0],
        [1, 2, 3, -1],
        [tiny, -tiny, 2 * tiny, 0],
        [sub, -sub, 0, sub],
        [1e4, -1e4, 5e3, 1e4],
        [1e10, 2e10, 1e10, -3e10],
        [huge, 2 * huge, -huge, 0],
        [inf, 1, 2, 0],
        [-inf, 1, 2, 0],
        [inf, inf, 1, 0],
        [-inf] * 4,
        [inf] * 4,
        [inf, -inf, 0, 1],
        [nan, 1, 2, 3],
        [1, 2, nan, -inf],
        [most, most, -most, most],
        [100, 1, -100, 0],
        [1, 1, 1, 1],
        [-1e4, -1e4, -1e4, -2e4],
        [-800, 0, 1, 2],
    ]
    put("rows", [20, 4], sum(rows, []))
    put("columns", [4, 20], [rows[j][i] for i in range(4) for j in range(20)])
    put("others", [20, 4], [[1, -2, 3, 0.5][(i + j) % 4] for i in range(20) for j in range(4)])
    put("factors", [5, 4], [0, 1, 2, 3, 2, 0, 3, 4, nan, 1, 2, 3, inf, 1, 2, 3, tiny, -1, 0.5, -inf])
    put("one row", [1, 4], [1, 2, -3, 0.5])
    put("one number", [1, 1], [0.75])
    put("four rows", [4, 1], [0.75, inf, nan, huge])
    put("no rows", [0, 4], [])
    put("no columns", [3, 0], [])
    put("weight4", [4], [1, -2, 0.5, 3])
    put("bias4", [4], [0.5, 0, -1, 2])
    # The rows again as images [5, 1, 4, 4], and images that mix the numbers.
    put("images", [5, 1, 4, 4], sum(rows, []))
    mixed = [1, 2, inf, 0, -1, nan, 3, -inf, huge, -huge, tiny, sub, 1e4, 0.5, -2, 7] * 3
    put("mixed", [3, 1, 4, 4], mixed)
    quiet = [((7 * i) % 11 - 5) / 4 for i in range(3 * 2 * 6 * 6)]

    def dotted(places):
        values = list(quiet)
        for place, value in places.items():
            values[place] = value
        return values

    # Two channels of 6 x 6: a sample with an infinity, one with NaN, one with numbers whose square overflows.
    put("dotted", [3, 2, 6, 6], dotted({14: inf, 72 + 40: nan, 144 + 7: huge, 144 + 8: -huge}))
    put("plain", [3, 2, 6, 6], quiet)
    put("no images", [0, 2, 6, 6], [])
    put("kernel", [2, 2, 3, 3], [((5 * i) % 7 - 3) / 2 for i in range(36)])
    put("kernel1", [2, 2, 1, 1], [1, -0.5, 0.25, 2])
    put("kernel up", [2, 2, 2, 2], [((5 * i) % 7 - 3) / 2 for i in range(16)])
    put("bias2", [2], [0.5, -1])
    put("weight2", [2], [2, -1])
    put("sequence", [2, 2, 8], dotted({3: inf, 16 + 5: nan})[:32])
    put("kernel seq", [2, 2, 3], [1, -0.5, 0.25, 2, 0, 1, -1, 0.5, 0.75, 1, 1, -2])
    put("volume", [1, 2, 3, 4, 4], dotted({17: inf, 60: huge})[:96])
    put("kernel vol", [2, 2, 2, 2, 2], [((5 * i) % 7 - 3) / 2 for i in range(32)])
    put("points", [4, 3, 1, 1], [0.5 * i + 1 for i in range(12)])
    put("a point", [1, 3, 1, 1], [1, 2, 3])
    put("lines", [2, 3, 4], dotted({1: inf, 13: nan})[:24])
    put("equal lines", [2, 3, 2], [1, 1, 2, 2, huge, huge, 0, 0, tiny, tiny, 1e10, 1e10])
    # Matrices.
    put("a", [4, 3], [1, 0, -2, inf, 0, 1, nan, 1, 0, huge, huge, 1])
    put("b", [3, 2], [1, 0, 0, -1, 2, inf])
    put("b finite", [3, 2], [1, 0, 0, -1, 2, 3])
    put("no a", [0, 3], [])
    put("stack a", [2, 2, 3], [1, 0, -2, inf, 0, 1, nan, 1, 0, huge, huge, 1])
    put("stack b", [2, 3, 2], [1, 0, 0, -1, 2, 3, 1, 2, -1, 0, 0.5, 1])
    put("w", [2, 3], [1, 1, 0.5, 0, 2, 1])
    # Attention: [2, 1, 3, 2].
    put("q", [2, 1, 3, 2], [1, 0.5, -1, 2, 0.25, -0.5, 1, 1, 0, -2, 0.5, 3])
    put("k", [2, 1, 3, 2], [0.5, -1, 2, 1, -0.25, 1, 0, 1, 2, 0.5, -1, -1])
    put("v", [2, 1, 3, 2], [1, 2, 3, -1, 0.5, 0, -2, 1, 0, 1, 4, -3])
    put("q edge", [2, 1, 3, 2], [huge, 0, 1e10, 1e10, 0.25, -0.5, inf, 1, nan, -2, 0, 0])
    put("v edge", [2, 1, 3, 2], [1, inf, 3, -1, 0.5, 0, nan, 1, 0, 1, huge, -3])
    put("no q", [0, 1, 3, 2], [])
    put("no keys", [2, 1, 0, 2], [])
    put("scores", [5, 2, 4], dotted({9: -inf, 20: inf, 30: nan, 35: -1e4})[:40])
    put("a long score", [5, 2, 4], [-1e4 * (i % 4) for i in range(40)])
    # Recurrent layers: 2 samples, 3 steps, 2 features, 2 hidden.
    put("steps", [2, 3, 2], [1, -1, 100, -100, 0.5, 1e4, inf, 1, nan, 0, 1, 1])
    put("no steps", [0, 3, 2], [])
    put("ih4", [8, 2], [((5 * i) % 7 - 3) / 4 for i in range(16)])
    put("hh4", [8, 2], [((3 * i) % 7 - 3) / 4 for i in range(16)])
    put("ih3", [6, 2], [((5 * i) % 7 - 3) / 4 for i in range(12)])
    put("hh3", [6, 2], [((3 * i) % 7 - 3) / 4 for i in range(12)])
    put("b4", [8], [0.1 * i for i in range(8)])
    put("b3", [6], [0.1 * i for i in range(6)])
    put("four", [4], [0.5, inf, nan, -huge])
    put("spread", [20], [i - 3 for i in range(20)])
    put("classes", [4, 2, 3], dotted({2: inf, 9: -inf, 15: nan})[:24])
    return p


POOL = {kind: pool(kind) for kind in KINDS}


def number(value, kind):
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    digits = 8 if kind == "f32" else 13
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e6 else short


def exact(value):
    return number(value, "f64") if not math.isfinite(value) else value


def gradient_for(y, zero):
    """1, -0.5, 2, 0.25, repeated; or zeros."""
    if zero:
        return torch.zeros_like(y)
    pattern = torch.tensor([1, -0.5, 2, 0.25], dtype=y.dtype)
    return pattern[torch.arange(y.numel()) % 4].reshape(y.shape)


OUT, USED = {}, {}


def run(group, op, f, *cases, zero=False):
    """`f` of the inputs that each case names: a name, or several."""
    for kind, dtype in KINDS.items():
        for case in cases:
            names = [case] if isinstance(case, str) else list(case)
            inputs = []
            for name in names:
                shape, values = POOL[kind][name]
                USED.setdefault(kind, {})[name] = 1
                inputs.append(torch.tensor(values, dtype=dtype).reshape(shape).requires_grad_())
            entry = {"in": names}
            if zero:
                entry["zero"] = True
            try:
                y = f(*inputs)
                if y.requires_grad:
                    y.backward(gradient_for(y, zero))
                    entry["d"] = [[] if x.grad is None else [number(v, kind) for v in x.grad.flatten().tolist()]
                                  for x in inputs]
                entry["shape"] = list(y.shape)
                entry["y"] = [number(v, kind) for v in y.detach().flatten().to(torch.float64).tolist()]
                if zero:
                    entry["y"] = []
            except (RuntimeError, ValueError, IndexError) as error:
                entry = {"in": names, "raises": str(error).split("\n")[0][:60]}
            OUT.setdefault(group, {}).setdefault(op, {}).setdefault(kind, []).append(entry)


# Elementwise, of one input.
def unary(op, f):
    run("unary", op, f, "specials", "one", "none")
    run("unary", op, f, "specials", zero=True)


for name in ("abs square sqrt rsqrt reciprocal exp log log1p sin cos tanh erf relu sigmoid neg").split():
    unary(name, getattr(torch, name))
for name in "relu6 logsigmoid silu gelu mish hardsigmoid hardswish leaky_relu elu softplus hardtanh selu celu softsign tanhshrink hardshrink softshrink".split():
    unary({"logsigmoid": "log_sigmoid"}.get(name, name), getattr(F, name))
unary("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
unary("elu 0.5", lambda x: F.elu(x, 0.5))
unary("celu 2", lambda x: F.celu(x, 2.0))
unary("softplus 2 10", lambda x: F.softplus(x, 2, 10))
unary("softplus 1 100", lambda x: F.softplus(x, 1, 100))
unary("threshold", lambda x: F.threshold(x, 0.1, 20))
unary("clamp", lambda x: torch.clamp(x, -1, 2))
unary("clamp below", lambda x: torch.clamp(x, min=0.25))
unary("clamp above", lambda x: torch.clamp(x, max=0.25))
unary("add 1", lambda x: x + 1)
unary("sub 1", lambda x: x - 1)
unary("1 sub", lambda x: 1 - x)
unary("mul 3", lambda x: x * 3)
unary("mul 0", lambda x: x * 0)
unary("div 3", lambda x: x / 3)
unary("div 0", lambda x: x / 0)
unary("3 div", lambda x: 3 / x)
for exponent in (-1, -0.5, 0, 0.5, 1, 2, 3, 4, 2.5, -2, 1 / 3):
    unary(f"pow {exponent:.3g}", lambda x, e=exponent: torch.pow(x, e))
unary("dropout in evaluation", lambda x: F.dropout(x, 0.5, training=False))
unary("cumsum", lambda x: torch.cumsum(x, 0))

# Elementwise, of two.
PAIRS = (("left", "right"), ("one", "one"), ("none", "none"))


def binary(op, f, *cases):
    run("binary", op, f, *(cases or PAIRS))


for name in "add sub mul div maximum minimum pow".split():
    binary(name, getattr(torch, name))
binary("mse_loss_per_element", lambda x, t: F.mse_loss(x, t, reduction="none"))
binary("l1_loss_per_element", lambda x, t: F.l1_loss(x, t, reduction="none"))
binary("smooth_l1_loss_per_element", lambda x, t: F.smooth_l1_loss(x, t, reduction="none"))
binary("smooth_l1_loss_per_element 2", lambda x, t: F.smooth_l1_loss(x, t, reduction="none", beta=2))
binary("huber_loss_per_element", lambda x, t: F.huber_loss(x, t, reduction="none"))
binary("huber_loss_per_element 2", lambda x, t: F.huber_loss(x, t, reduction="none", delta=2))
binary("kl_div_per_element", lambda x, t: F.kl_div(x, t, reduction="none"))
binary("poisson_nll_loss_per_element", lambda x, t: F.poisson_nll_loss(x, t, reduction="none"))
binary("poisson_nll_loss_per_element rate", lambda x, t: F.poisson_nll_loss(x, t, log_input=False, reduction="none"))
binary("poisson_nll_loss_per_element full",
       lambda x, t: F.poisson_nll_loss(x, t.detach(), full=True, reduction="none"))
binary("where", lambda a, b: torch.where(torch.arange(a.numel()) % 2 == 0, a, b))
binary("prelu", lambda x, w: F.prelu(x.reshape(1, -1), w).reshape(-1), ("left", "right"), ("one", "one"))
binary("scale and shift", lambda x, y: torch.addcmul(y, x, y))
LOGITS = (("logits", "shares"), ("one", "one"), ("none", "none"))
binary("bce_with_logits_per_element", lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"), *LOGITS)
binary("bce_with_logits_per_element weighted",
       lambda x, t: F.binary_cross_entropy_with_logits(x, t, torch.tensor(0.5, dtype=x.dtype), reduction="none",
                                                       pos_weight=torch.tensor(3, dtype=x.dtype)), *LOGITS)
SIGNS = (("logits", "signs"), ("one", "a sign"), ("none", "none"))
binary("soft_margin_loss_per_element", lambda x, t: F.soft_margin_loss(x, t.detach(), reduction="none"), *SIGNS)
binary("hinge_embedding_loss_per_element",
       lambda x, t: F.hinge_embedding_loss(x, t.detach(), reduction="none"), *SIGNS)
binary("margin_ranking_loss_per_element",
       lambda x, t: F.margin_ranking_loss(x, torch.ones_like(x), t.detach(), 0.5, reduction="none"), *SIGNS)
VARIANCES = (("left", "variances"), ("one", "one"), ("none", "none"))
binary("gaussian_nll_loss_per_element",
       lambda x, v: F.gaussian_nll_loss(x, torch.ones_like(x), v, reduction="none"), *VARIANCES)
binary("gaussian_nll_loss_per_element full",
       lambda x, v: F.gaussian_nll_loss(x, torch.ones_like(x), v, full=True, reduction="none"), *VARIANCES)
binary("cosine_embedding_loss",
       lambda x, t: F.cosine_embedding_loss(x.reshape(-1, 1), torch.ones_like(x).reshape(-1, 1), t.detach(), 0.1,
                                            reduction="none"), ("logits", "signs"), ("one", "a sign"))
for reduction in ("mean", "sum"):
    binary(f"mse_loss {reduction}", lambda x, t: F.mse_loss(x, t, reduction=reduction), ("one", "one"), ("none", "none"),
           ("logits", "shares"))
    binary(f"l1_loss {reduction}", lambda x, t: F.l1_loss(x, t, reduction=reduction), ("one", "one"), ("none", "none"),
           ("logits", "shares"))
    binary(f"bce_with_logits {reduction}", lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction=reduction),
           ("one", "one"), ("none", "none"), ("logits", "shares"))
    binary(f"huber_loss {reduction}", lambda x, t: F.huber_loss(x, t, reduction=reduction), ("one", "one"),
           ("none", "none"))
    binary(f"smooth_l1_loss {reduction}", lambda x, t: F.smooth_l1_loss(x, t, reduction=reduction), ("one", "one"),
           ("none", "none"))
    binary(f"soft_margin_loss {reduction}", lambda x, t: F.soft_margin_loss(x, t.detach(), reduction=reduction),
           ("one", "a sign"), ("none", "none"))
    binary(f"poisson_nll_loss {reduction}", lambda x, t: F.poisson_nll_loss(x, t, reduction=reduction), ("one", "one"),
           ("none", "none"))
binary("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), ("rows", "others"), ("one row", "one row"),
       ("no rows", "no rows"))

# Along an axis.
LINES = ("rows", "one row", "one number", "four rows", "no rows", "no columns")


def lines(op, f, *cases):
    """`f(x, axis)` along rows, and along columns."""
    run("rows", op, lambda x: f(x, 1), *(cases or LINES))
    run("rows", op + " of columns", lambda x: f(x, 0), "columns", "no rows")


for name in "softmax log_softmax logsumexp sum mean amax amin argmax argmin cumsum".split():
    lines(name, getattr(torch, name))
# PyTorch's gradient divides the product by each factor, which underflows or overflows where ours does not.
run("rows", "cumprod", lambda x: torch.cumprod(x, 1), "others", "one row", "one number", "no rows", "no columns", "factors")
run("rows", "cumprod values", lambda x: torch.cumprod(x.detach(), 1), "rows", "four rows")
lines("var", lambda x, axis: torch.var(x, axis))
lines("var 0", lambda x, axis: torch.var(x, axis, correction=0))
lines("sort", lambda x, axis: torch.sort(x, dim=axis, stable=True)[0])
lines("sort down", lambda x, axis: torch.sort(x, dim=axis, descending=True, stable=True)[0])
lines("argsort", lambda x, axis: torch.sort(x, dim=axis, stable=True)[1])
lines("argsort down", lambda x, axis: torch.sort(x, dim=axis, descending=True, stable=True)[1])
# PyTorch does not specify which of equal numbers topk takes: gradients only for rows without ties.
run("rows", "topk values", lambda x: torch.topk(x.detach(), 2, 1)[0], "rows")
run("rows", "topk", lambda x: torch.topk(x, 2, 1)[0], "others", "one row", "factors", "one number", "no rows", "no columns")
run("rows", "topk smallest", lambda x: torch.topk(x, 2, 1, largest=False)[0], "others", "one row", "no rows")
for name in "sum mean amax amin logsumexp var".split():
    whole = getattr(torch, name)
    f = (lambda x, whole=whole: whole(x, (0, 1))) if name in ("logsumexp", "amax", "amin") else whole
    run("rows", name + " of all", f, "one row", "one number", "no rows", "four rows", "others")
run("rows", "sum of axes", lambda x: x.sum((1, 2, 3)), "images", "no images")
run("rows", "mean of axes", lambda x: x.mean((1, 2, 3)), "images", "no images")
run("rows", "amax of axes", lambda x: x.amax((1, 2, 3)), "images", "no images")
run("rows", "amin of axes", lambda x: x.amin((1, 2, 3)), "images", "no images")
run("rows", "var of axes", lambda x: x.var((1, 2, 3)), "images", "no images")
run("rows", "logsumexp of axes", lambda x: x.logsumexp((1, 2, 3)), "images", "no images")
lines("glu", lambda x, axis: F.glu(x, axis), "rows", "one row", "one number", "no rows")
run("distances", "layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), ("rows", "weight4", "bias4"),
    ("one row", "weight4", "bias4"), ("no rows", "weight4", "bias4"))
run("distances", "layer_norm plain", lambda x: F.layer_norm(x, x.shape[1:]), "rows", "one row", "four rows", "one number",
    "no rows", "no columns")
run("distances", "rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-6), ("rows", "weight4"), ("one row", "weight4"),
    ("no rows", "weight4"))
TWO_ROWS = (("rows", "others"), ("others", "rows"), ("rows", "rows"), ("one row", "one row"), ("no rows", "no rows"))
run("distances", "cosine_similarity", lambda a, b: F.cosine_similarity(a, b), *TWO_ROWS, ("no columns", "no columns"),
    ("four rows", "four rows"))
run("distances", "cosine_embedding_loss_per_sample",
    lambda a, b: F.cosine_embedding_loss(a, b, torch.where(torch.arange(len(a)) % 2 == 0, 1.0, -1.0).to(a.dtype), 0.1,
                                         reduction="none"), *TWO_ROWS)
run("distances", "triplet_margin_loss_per_sample",
    lambda a, b: F.triplet_margin_loss(a, b, a + 0.5, reduction="none"), *TWO_ROWS)
run("distances", "triplet_margin_loss swap",
    lambda a, b: F.triplet_margin_loss(a, b, a + 0.5, swap=True, reduction="none"), *TWO_ROWS)


def labels(x, classes=4):
    return torch.arange(x.shape[0]) % classes


CLASSES = ("rows", "one row", "no rows")
WEIGHTS = [1.0, 2.0, 0.0, 0.5]
for reduction in ("none", "mean", "sum"):
    cases = CLASSES if reduction == "none" else ("one row", "no rows", "others")
    run("classes", f"cross_entropy {reduction}", lambda x: F.cross_entropy(x, labels(x), reduction=reduction), *cases)
    run("classes", f"nll_loss {reduction}", lambda x: F.nll_loss(x, labels(x), reduction=reduction), *cases)
    run("classes", f"cross_entropy smooth {reduction}",
        lambda x: F.cross_entropy(x, labels(x), reduction=reduction, label_smoothing=0.25), *cases)
    run("classes", f"cross_entropy weighted {reduction}",
        lambda x: F.cross_entropy(x, labels(x), torch.tensor(WEIGHTS, dtype=x.dtype), reduction=reduction), *cases)
    run("classes", f"nll_loss weighted {reduction}",
        lambda x: F.nll_loss(x, labels(x), torch.tensor(WEIGHTS, dtype=x.dtype), reduction=reduction), *cases)
    run("classes", f"cross_entropy ignored {reduction}",
        lambda x: F.cross_entropy(x, labels(x), reduction=reduction, ignore_index=0), *cases)
    run("classes", f"cross_entropy all ignored {reduction}",
        lambda x: F.cross_entropy(x, torch.full((len(x),), -100), reduction=reduction), *cases)
    run("classes", f"cross_entropy probabilities {reduction}",
        lambda x, t: F.cross_entropy(x, t.detach().abs() / 6.5, reduction=reduction),
        *[("others" if case == "others" else case, "others" if case in ("rows", "others") else case)
          for case in cases])
    run("classes", f"cross_entropy of places {reduction}",
        lambda x: F.cross_entropy(x, (torch.arange(12) % 2).reshape(4, 3), reduction=reduction), "classes")
run("classes", "cross_entropy of one class", lambda x: F.cross_entropy(x, labels(x, 1), reduction="none"), "four rows",
    "one number")

# Layers.
IMAGES = ("images", "mixed", "dotted", "no images")
for name in ("max_pool2d", "avg_pool2d"):
    pool2d = getattr(F, name)
    run("images", name, lambda x: pool2d(x, 2), *IMAGES)
    run("images", name + " padded", lambda x: pool2d(x, 3, 2, 1), *IMAGES)
run("images", "avg_pool2d without padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), *IMAGES)
run("images", "max_pool2d dilated", lambda x: F.max_pool2d(x, 2, 1, 0, 2), *IMAGES)
run("images", "adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), *IMAGES)
run("images", "adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), *IMAGES)
run("images", "global_avg_pool", lambda x: x.flatten(2).mean(2), *IMAGES)
run("images", "upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=2), "mixed", "no images")
run("images", "upsample_bilinear2d", lambda x: F.interpolate(x, (5, 7), mode="bilinear"), "mixed", "no images")
run("images", "upsample_bilinear2d corners", lambda x: F.interpolate(x, (5, 7), mode="bilinear", align_corners=True),
    "mixed")
run("images", "upsample_bilinear2d same", lambda x: F.interpolate(x, tuple(x.shape[2:]), mode="bilinear"), "mixed")
run("images", "pad2d", lambda x: F.pad(x, (1, 2, 0, 1), value=-inf), "mixed", "no images")
for mode in ("reflect", "replicate", "circular"):
    run("images", "pad2d " + mode, lambda x: F.pad(x, (1, 2, 0, 1), mode), "mixed", "no images")
GROUPS = (("dotted", "weight2", "bias2"), ("plain", "weight2", "bias2"), ("no images", "weight2", "bias2"))
run("normalisations", "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), *GROUPS)
run("normalisations", "group_norm 1", lambda x, w, b: F.group_norm(x, 1, w, b), *GROUPS)
run("normalisations", "instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), *GROUPS)
run("normalisations", "group_norm of points", lambda x: F.group_norm(x, 3), "points", "a point")
run("normalisations", "group_norm of channels", lambda x: F.group_norm(x, 1), "points", "a point")
run("normalisations", "instance_norm of points", lambda x: F.instance_norm(x), "points", "a point")
run("normalisations", "instance_norm of lines", lambda x: F.instance_norm(x), "lines", "equal lines")
run("normalisations", "group_norm of rows", lambda x: F.group_norm(x, 4), "rows", "one row", "no rows")
run("normalisations", "batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), *GROUPS)
run("normalisations", "batch_norm in evaluation",
    lambda x, w, b: F.batch_norm(x, torch.zeros(2, dtype=x.dtype), torch.tensor([0.0, 4], dtype=x.dtype), w, b, False),
    *GROUPS)
run("normalisations", "batch_norm of points", lambda x: F.batch_norm(x, None, None, None, None, True), "points", "a point")
run("normalisations", "batch_norm_relu", lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)), *GROUPS)
KERNELS = (("dotted", "kernel", "bias2"), ("plain", "kernel", "bias2"), ("no images", "kernel", "bias2"))
run("convolutions", "conv2d", lambda x, w, b: F.conv2d(x, w, b), *KERNELS)
run("convolutions", "conv2d padded", lambda x, w, b: F.conv2d(x, w, b, padding=1), *KERNELS)
run("convolutions", "conv2d strided", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), *KERNELS)
run("convolutions", "conv2d 1x1", lambda x, w, b: F.conv2d(x, w, b), ("dotted", "kernel1", "bias2"),
    ("no images", "kernel1", "bias2"))
run("convolutions", "conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
    ("dotted", "kernel up", "bias2"), ("no images", "kernel up", "bias2"))
run("convolutions", "conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), ("sequence", "kernel seq", "bias2"))
run("convolutions", "conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2),
    ("sequence", "kernel seq", "bias2"))
run("convolutions", "conv3d", lambda x, w, b: F.conv3d(x, w, b), ("volume", "kernel vol", "bias2"))
for name, step in (("lstm", torch.lstm), ("gru", torch.gru)):
    gates = 4 if name == "lstm" else 3

    def recurrent(x, ih, hh, b1, b2, step=step, name=name):
        zero = torch.zeros(1, x.shape[0], 2, dtype=x.dtype)
        states = (zero, zero) if name == "lstm" else zero
        return step(x, states, [ih, hh, b1, b2], True, 1, 0.0, True, False, True)[0]

    run("convolutions", name, recurrent, ("steps", f"ih{gates}", f"hh{gates}", f"b{gates}", f"b{gates}"),
        ("no steps", f"ih{gates}", f"hh{gates}", f"b{gates}", f"b{gates}"))

# Products, indexing and shapes.
run("products", "matmul", torch.matmul, ("a", "b"), ("a", "b finite"), ("no a", "b"))
run("products", "matmul of stacks", torch.matmul, ("stack a", "stack b"))
run("products", "matmul by one", torch.matmul, ("stack a", "b"))
run("products", "linear", lambda x, w, b: F.linear(x, w, b), ("a", "w", "bias2"), ("no a", "w", "bias2"))
run("products", "einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), ("stack a", "stack b"))
run("products", "einsum sum", lambda a, b: torch.einsum("ij,jk->i", a, b), ("a", "b finite"), ("no a", "b"))
SOME = torch.tensor([2, 0, 2])
run("picking", "index_select", lambda x: torch.index_select(x, 1, SOME), "rows", "no rows")
run("picking", "embedding", lambda x: F.embedding(torch.tensor([[3, 6], [3, 13]]), x), "rows")
run("picking", "embedding with padding",
    lambda x: F.embedding(torch.tensor([[3, 6], [3, 13]]), x, padding_idx=3), "rows")
run("picking", "gather", lambda x: torch.gather(x, 1, (torch.arange(x.shape[0]) % 4).reshape(-1, 1).expand(-1, 2)),
    "rows", "no rows")
run("picking", "scatter", lambda x, s: torch.scatter(x, 1, (torch.arange(20) % 4).reshape(-1, 1), s.reshape(20, 1)),
    ("rows", "spread"))
run("picking", "scatter_add",
    lambda x, s: torch.scatter_add(x, 1, (torch.arange(20) % 4).reshape(-1, 1), s.reshape(20, 1)), ("rows", "spread"))
run("picking", "masked_fill", lambda x: x.masked_fill(torch.isnan(x) | torch.isinf(x), 0.5), "rows", "no rows")
run("picking", "masked_fill inf", lambda x: x.masked_fill((torch.arange(4) % 2 == 0), -inf), "rows", "no rows")
run("picking", "masked softmax", lambda x: torch.softmax(x.masked_fill((torch.arange(4) > 4), -inf), 1), "rows")
run("picking", "where", lambda a, b: torch.where((torch.arange(4) % 2 == 0), a, b), ("rows", "others"),
    ("no rows", "no rows"))
run("picking", "concat", lambda a, b: torch.cat([a, b], 1), ("rows", "others"), ("no rows", "no rows"))
run("picking", "concat of rows", lambda a, b: torch.cat([a, b], 0), ("rows", "no rows"), ("no rows", "no rows"))
run("picking", "stack", lambda a, b: torch.stack([a, b], 1), ("rows", "others"), ("no rows", "no rows"))
run("picking", "slice", lambda x: x[:, 1:3], "rows", "no rows")
run("picking", "slice nothing", lambda x: x[:, 1:1], "rows", "no rows")
run("shapes", "permute", lambda x: x.permute(1, 0), "rows", "no rows")
run("shapes", "transpose", lambda x: x.transpose(0, 1), "rows", "no rows")
run("shapes", "reshape", lambda x: x.reshape(-1), "rows", "no rows")
run("shapes", "flatten", lambda x: x.flatten(1), "mixed", "no images")
run("shapes", "expand", lambda x: x.unsqueeze(0).expand(2, *x.shape), "rows", "no rows", "one number")
run("shapes", "broadcast add", lambda a, b: a + b, ("rows", "weight4"), ("no rows", "weight4"))
run("shapes", "broadcast add of rows", lambda a, b: a + b, ("rows", "one row"), ("no rows", "one row"))
run("shapes", "broadcast mul", lambda a, b: a * b, ("rows", "weight4"), ("others", "four"), ("no rows", "weight4"))
run("shapes", "broadcast div", lambda a, b: a / b, ("rows", "weight4"), ("others", "four"), ("no rows", "weight4"))
run("shapes", "broadcast maximum", lambda a, b: torch.maximum(a, b), ("rows", "four"), ("no rows", "weight4"))
run("shapes", "to double and back", lambda x: x.to(torch.float64).to(x.dtype), "rows", "no rows")
run("shapes", "dropout of channels in evaluation", lambda x: F.dropout2d(x, 0.5, False), "mixed")
run("shapes", "alpha_dropout in evaluation", lambda x: F.alpha_dropout(x, 0.5, False), "rows")

# Attention.
QKV = (("q", "k", "v"), ("q edge", "k", "v"), ("q", "k", "v edge"), ("no q", "no q", "no q"), ("q", "no keys", "no keys"))
CAUSAL = torch.tensor([[j <= i for j in range(3)] for i in range(3)])
WINDOW = torch.tensor([[[[j in (i, i - 1) and not (b == 1 and j > 0) for j in range(3)] for i in range(3)]]
                       for b in range(2)])
NONE_SEEN = torch.zeros(3, 3, dtype=torch.bool)


def added(mask, q):
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -inf)


sdpa = F.scaled_dot_product_attention
run("attention", "attention", lambda q, k, v: sdpa(q, k, v), *QKV)
run("attention", "attention causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), *QKV[:4])
run("attention", "attention window and padding", lambda q, k, v: sdpa(q, k, v, WINDOW), *QKV[:3])
run("attention", "attention all masked", lambda q, k, v: sdpa(q, k, v, NONE_SEEN.expand(len(q), 1, 3, 3)), *QKV[:4])
run("attention", "attention window and padding added", lambda q, k, v: sdpa(q, k, v, added(WINDOW, q)), *QKV[:3])
run("attention", "attention all masked added", lambda q, k, v: sdpa(q, k, v, added(NONE_SEEN, q)), *QKV[:3])
run("attention", "attention causal and masked", lambda q, k, v: sdpa(q, k, v, WINDOW & CAUSAL & (torch.arange(3) > 0)),
    *QKV[:3])

# CTC: 5 steps, 2 samples, 4 classes; the second sample has fewer steps than labels.
for reduction in ("none", "mean", "sum"):
    for zero_infinity in (False, True):
        run("ctc", f"ctc_loss {reduction}{' zero' if zero_infinity else ''}",
            lambda x: F.ctc_loss(torch.log_softmax(x, 2), torch.tensor([[1, 2, 2], [3, 3, 1]]), torch.tensor([5, 3]),
                                 torch.tensor([2, 3]), reduction=reduction, zero_infinity=zero_infinity),
            "scores", "a long score")

inputs = {kind: {name: {"shape": POOL[kind][name][0], "v": [exact(v) for v in POOL[kind][name][1]]} for name in used}
          for kind, used in USED.items()}
text = json.dumps({"inputs": inputs, "cases": OUT}, separators=(",", ":"), allow_nan=False)
# A line for each operator and type, so that a diff shows which changed.
text = text.replace('"f64":[', '\n"f64":[').replace('"f32":[', '\n"f32":[')
path = pathlib.Path(__file__).parent / "edge" / "values.json"
path.parent.mkdir(exist_ok=True)
path.write_text(text + "\n")
count = sum(len(cases) for group in OUT.values() for op in group.values() for cases in op.values())
print(f"{sum(len(g) for g in OUT.values())} operators and forms, {count} cases, {path.stat().st_size / 1e3:.0f} kB")
