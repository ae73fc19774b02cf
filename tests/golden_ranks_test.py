#!/usr/bin/env python3
"""Golden cases of other ranks and types, made from the project's: with an axis of size 1 in front of all tensors, with
all axes but the last joined, and as doubles. The expected values stay those of PyTorch.

    golden_ranks_test.py GOLDEN DIRECTORY...
"""
import array
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

GOLDEN, *DIRECTORIES = sys.argv[1:]

# Operators whose result does not change with an axis in front of all these inputs and outputs.
ALONE = """abs celu clamp cos elu erf exp gelu gelu_tanh hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan
    leaky_relu log log1p log_sigmoid mish nan_to_num neg reciprocal relu relu6 rsqrt selu sigmoid silu sin softplus
    softshrink softsign sqrt square tanh tanhshrink threshold
    hinge_embedding_loss margin_ranking_loss soft_margin_loss poisson_nll_loss huber_loss l1_loss mse_loss smooth_l1_loss
    gaussian_nll_loss fake_quantize_per_tensor quantize_per_tensor one_hot pad2d tril triu""".split()
INPUTS = {  # with the tensors that get the axis
    **{op: "in.x in.y out. gout. grad.x grad.y" for op in "add sub mul div maximum minimum eq ne lt le gt ge".split()},
    **{op: "in. out. gout. grad." for op in ALONE},
    **{f"linalg.{op}": "in. out. gout. grad." for op in "cholesky det eigh inverse qr solve svd".split()},
    **{f"fft.{op}": "in. out. gout. grad." for op in "fft ifft rfft irfft fft2 ifft2 rfft2 irfft2".split()},
    **{op: "in.x out. gout. grad.x" for op in ("linear", "layer_norm", "rms_norm")},
    "logaddexp": "in. out. gout. grad.", "where": "in. out. gout. grad.",
    "masked_fill": "in.x out. gout. grad.x", "scaled_dot_product_attention": "in.q in.k in.v out. gout. grad.",
    "bmm": "in. out. gout. grad.", "cdist": "in. out. gout. grad.", "searchsorted": "in.values out.",
    "quantized_linear": "in.x out.", "bce_with_logits": "in.x in.target in.weight out. gout. grad.",
}
# Operators with an axis attribute, which moves by one unless it is negative.
ALONG = {op: "in. out. gout. grad." for op in """softmax log_softmax cumsum cumprod sort topk glu cosine_similarity cross
    roll slice concat gather scatter scatter_add any all amax amin mean sum var logsumexp argmax argmin flip""".split()}
ALONG |= {"index_select": "in.x out. gout. grad.x", "quantize_per_channel": "in.x out.",
          "fake_quantize_per_channel": "in.x out. gout. grad.x"}
# Reductions that give one number for all samples.
REDUCED = ("mean", "sum")


def read(path):
    text = path.read_bytes()
    length = struct.unpack("<Q", text[:8])[0]
    head = json.loads(text[8:8 + length])
    meta = head.pop("__metadata__")
    tensors = {name: [t["dtype"], t["shape"], text[8 + length:][slice(*t["data_offsets"])]] for name, t in head.items()}
    return meta["op"], json.loads(meta["attrs"]), tensors


def write(path, op, attrs, tensors):
    head, data = {"__metadata__": {"op": op, "attrs": json.dumps(attrs)}}, b""
    for name, (dtype, shape, numbers) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def with_axis(op, attrs, tensors):
    """The case with an axis in front; None if the operator has no such form, or too many axes."""
    wanted = INPUTS.get(op) or ALONG.get(op)
    if wanted is None or any(len(shape) >= 5 for _, shape, _ in tensors.values()):
        return None
    attrs = dict(attrs)
    scalar = attrs.get("reduction") in REDUCED or (op in ("mse_loss", "l1_loss") and "reduction" not in attrs)
    if op in ALONG:
        for key in ("axis", "axes"):
            value = attrs.get(key)
            if value is None and key == "axis" and "axes" not in attrs:
                scalar = True
            if isinstance(value, list):
                attrs[key] = [a + 1 if a >= 0 else a for a in value]
            elif value is not None:
                attrs[key] = value + 1 if value >= 0 else value
    if attrs.get("reduction") == "batchmean":
        return None
    out = {}
    for name, (dtype, shape, numbers) in tensors.items():
        gets = any(name.startswith(prefix) for prefix in wanted.split())
        if scalar and name.startswith(("out.", "gout.")):
            gets = False
        out[name] = [dtype, [1, *shape] if gets else shape, numbers]
    return attrs, out


def joined(op, attrs, tensors):
    """All axes joined into one, for elementwise functions."""
    if op not in ALONE or op in ("pad2d", "tril", "triu", "one_hot") or "reduction" in attrs:
        return None
    out = {}
    for name, (dtype, shape, numbers) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        out[name] = [dtype, [count] if len(shape) > 0 else shape, numbers]
    return attrs, out


def doubles(op, attrs, tensors):
    """The same numbers as doubles, and integers as 32 bits."""
    out = {}
    for name, (dtype, shape, numbers) in tensors.items():
        if dtype == "F32":
            dtype, numbers = "F64", array.array("d", array.array("f", numbers)).tobytes()
        elif dtype == "I64":
            longs = array.array("q", numbers)
            if all(-2**31 <= n < 2**31 for n in longs):
                dtype, numbers = "I32", array.array("i", longs).tobytes()
        out[name] = [dtype, shape, numbers]
    return attrs, out


with tempfile.TemporaryDirectory() as folder:
    made = {}
    for directory in DIRECTORIES:
        for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
            case = read(path)
            if case[0].startswith("train."):
                continue
            for form in (with_axis, joined, doubles):
                if form is doubles and len(path.stem) % 3 != 0:
                    continue
                changed = form(*case)
                if changed is None:
                    continue
                write(pathlib.Path(folder) / f"{path.stem}.{form.__name__}.safetensors", case[0], *changed)
                made[form.__name__] = made.get(form.__name__, 0) + 1
                if form is with_axis and (again := with_axis(case[0], *changed)) is not None:
                    write(pathlib.Path(folder) / f"{path.stem}.two_axes.safetensors", case[0], *again)
    assert made["with_axis"] > 100 and made["joined"] > 20 and made["doubles"] > 50, made
    done = subprocess.run([GOLDEN, folder], capture_output=True, text=True)
    print(done.stdout, made)
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stderr
