#!/usr/bin/env python3
"""Times one training step of the reference models with PyTorch, on the CPU or on a GPU: what train_step_cuda and
train_step_large_cuda stand beside.

    torch_train.py [--device cpu|cuda] [--threads N] [--mode eager|compile|graphs] [--tf32] [CASE...]

A step is zero_grad, forward, cross entropy, backward, optimizer step; a time is of one step and the wait for the GPU.
mode: eager; compile (torch.compile); graphs (torch.compile with mode="max-autotune", which makes CUDA graphs). The cases
in bf16, for a GPU alone, run under autocast, and those with images in channels_last. Prints a line a case; a case that
fails, for want of memory say, is named, the others run all the same, and the end is 1.
"""
import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--mode", default="eager", choices=["eager", "compile", "graphs"])
parser.add_argument("--tf32", action="store_true")
parser.add_argument("cases", nargs="*")
chosen = parser.parse_args()
device = torch.device(chosen.device)
gpu = device.type == "cuda"


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def conv_bn(ins, outs, kernel, stride=1):
    return nn.Sequential(nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outs))


class Block(nn.Module):
    """A residual block: basic with 3 x 3 convolutions, or a bottleneck that widens to four times its width."""

    def __init__(self, ins, width, stride, bottleneck):
        super().__init__()
        outs = 4 * width if bottleneck else width
        if bottleneck:
            self.first = nn.Sequential(conv_bn(ins, width, 1), nn.ReLU(), conv_bn(width, width, 3, stride), nn.ReLU(), conv_bn(width, outs, 1))
        else:
            self.first = nn.Sequential(conv_bn(ins, width, 3, stride), nn.ReLU(), conv_bn(width, outs, 3))
        self.shortcut = nn.Identity() if stride == 1 and ins == outs else conv_bn(ins, outs, 1, stride)

    def forward(self, x):
        return F.relu(self.first(x) + self.shortcut(x))


def resnet(stem, blocks, bottleneck, classes):
    layers, ins = list(stem), 64
    for width, count in zip((64, 128, 256, 512), blocks):
        for i in range(count):
            layers.append(Block(ins, width, 2 if i == 0 and width > 64 else 1, bottleneck))
            ins = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, classes))


def resnet18():
    return resnet([conv_bn(3, 64, 3), nn.ReLU()], (2, 2, 2, 2), False, 10)


def resnet50():
    return resnet([conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], (3, 4, 6, 3), True, 1000)


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if gpu:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
            later = torch.ones(context, context).tril() == 0
            seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, words=65, width=128, heads=4, blocks=4, context=128, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[GptBlock(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


def gpt2():
    return Gpt(50304, 768, 12, 12, 1024, tied=True)


def images(batch, size=32):
    return lambda: torch.randn(batch, 3, size, size)


def words(batch, context, count):
    return lambda: torch.randint(count, (batch, context))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-3)


def adam_w(rate):
    return lambda parameters: torch.optim.AdamW(parameters, rate, **({"fused": True} if gpu else {}))


# name: model, batch, labels, classes, optimizer, autocast to bf16
CASES = {
    "toy_b16": (Toy, images(16), 16, 10, sgd, False),
    "toy_b128": (Toy, images(128), 128, 10, sgd, False),
    "mlp_b64": (mlp, lambda: torch.randn(64, 784), 64, 10, adam, False),
    "resnet18_b32": (resnet18, images(32), 32, 10, sgd, False),
    "gpt_b16": (Gpt, words(16, 128, 65), 2048, 65, adam_w(1e-3), False),
}
if gpu:
    CASES |= {
        "resnet18_b256_bf16": (resnet18, images(256), 256, 10, sgd, True),
        "resnet50_b128_bf16": (resnet50, images(128, 224), 128, 1000, sgd, True),
        "gpt2_124m_b8_bf16": (gpt2, words(8, 1024, 50304), 8192, 50304, adam_w(1e-4), True),
        "gpt2_124m_b64_bf16": (gpt2, words(64, 1024, 50304), 65536, 50304, adam_w(1e-4), True),
    }


def run(name, make, batch, labels, classes, make_optimizer, narrow):
    net, x, y = make().to(device), batch().to(device), torch.randint(classes, (labels,), device=device)
    if narrow and x.is_floating_point():
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(net.parameters())
    forward = net
    if chosen.mode != "eager":
        forward = torch.compile(net, mode="max-autotune" if chosen.mode == "graphs" else None)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()

    for _ in range(10 if gpu else 3):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, begin = [], time.perf_counter()
    while len(times) < 300 and time.perf_counter() - begin < 4:
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    median = sorted(times)[len(times) // 2]
    memory = f" peak_gpu_mib={torch.cuda.max_memory_allocated() / 2**20:.0f}" if gpu else ""
    print(f"{name} threads={chosen.threads} device={chosen.device} mode={chosen.mode} torch={torch.__version__} "
          f"median_ms={median:.3f} samples_per_s={x.shape[0] / median * 1e3:.0f}{memory}", flush=True)


def main():
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = chosen.tf32
        torch.backends.cudnn.benchmark = True
    unknown = [name for name in chosen.cases if name not in CASES]
    if unknown:
        sys.exit(f"unknown case '{unknown[0]}'; known are: {' '.join(CASES)}")
    failed = 0
    for name, case in CASES.items():
        if chosen.cases and name not in chosen.cases:
            continue
        try:
            run(name, *case)
        except Exception as error:  # the others are timed all the same
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if gpu:
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


main()
