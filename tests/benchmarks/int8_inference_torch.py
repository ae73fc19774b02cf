#!/usr/bin/env python3
"""What int8_inference times, in PyTorch on one thread: ResNet-18 in float and in 8-bit integers of its x86 engine
(torch.ao.quantization, the default mapping: weights by channel), images of SIDE x SIDE, batches of 1 and 32, float and
integers by turns. The same model and lines of output; each is frozen, with batch norm folded into the convolutions, and
takes the layout of memory, of PyTorch's two, in which it is faster.

usage: int8_inference_torch.py [SIDE]"""

import statistics
import sys
import time
import warnings

import torch
import torch.nn as nn

warnings.filterwarnings("ignore")  # torch.ao.quantization says that it moves to torchao
from torch.ao.quantization import get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: E402

SIDE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def conv(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = None
        if inputs != width or stride != 1:
            self.downsample = nn.Sequential(conv(inputs, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet18():
    small = SIDE <= 64  # the form for CIFAR's images
    layers = [conv(3, 64, 3) if small else nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    if not small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width in (64, 128, 256, 512):
        layers += [Block(inputs, width, 1 if width == 64 else 2), Block(width, width, 1)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).eval()


def images(batch):
    return (torch.arange(batch * 3 * SIDE * SIDE) * 7919 % 1000 / 400 - 1.2).view(batch, 3, SIDE, SIDE)


def frozen(model, layout):
    traced = torch.jit.trace(model.to(memory_format=layout), images(1).contiguous(memory_format=layout))
    return torch.jit.optimize_for_inference(torch.jit.freeze(traced))


def milliseconds(model, x):
    start = time.perf_counter()
    model(x)
    return 1e3 * (time.perf_counter() - start)


def main():
    torch.set_num_threads(1)
    torch.backends.quantized.engine = "x86"
    model = resnet18()
    observed = prepare_fx(resnet18(), get_default_qconfig_mapping("x86"), (images(4),))
    observed(images(4))  # ranges
    integers = convert_fx(observed)
    print(f"ResNet-18, PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for batch in (1, 32):
        # In each layout, float and integers.
        ways = []
        for layout in LAYOUTS:
            x = images(batch).contiguous(memory_format=layout)
            ways += [(frozen(model, layout), x), (frozen(integers, layout), x)]
        for way in ways * 3:
            milliseconds(*way)  # the first calls compile
        times = [[milliseconds(*way) for way in ways] for _ in range(41 if batch == 1 else 11)]
        medians = [statistics.median(column) for column in zip(*times)]
        f, i = min(0, 2, key=medians.__getitem__), min(1, 3, key=medians.__getitem__)
        ratio = statistics.median(line[f] / line[i] for line in times)
        print(f"batch {batch:2}: float {medians[f]:8.2f} ms, int8 {medians[i]:8.2f} ms, {ratio:.2f} times as fast",
              flush=True)


with torch.no_grad():
    main()
