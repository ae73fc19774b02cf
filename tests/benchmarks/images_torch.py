#!/usr/bin/env python3
"""Images a second by torchvision, to compare with images.cpp.

usage: images_torch.py FOLDER [WORKERS]   (needs torch, torchvision, Pillow, NumPy)

Writes 200 JPEG files of 500 x 375 pixels (65 kB each, as ImageNet's) into FOLDER, if it is not there. Best of three passes.
"""

import io
import pathlib
import sys
import time

import numpy
import torch
from PIL import Image
from torchvision import datasets
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

FOLDER, WORKERS = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
torch.set_num_threads(1)


def write():
    random = numpy.random.default_rng(1)
    y, x = numpy.mgrid[0:375, 0:500]
    for k in range(200):
        waves = [numpy.sin(x / random.uniform(5, 60) + y / random.uniform(5, 60) + random.uniform(0, 6)) * 60 + 128 for _ in range(3)]
        pixels = numpy.clip(numpy.stack(waves, 2) + random.normal(0, 21, (375, 500, 3)), 0, 255).astype(numpy.uint8)
        path = FOLDER / f"class{k % 2}" / f"{k:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, "JPEG", quality=75)


def rate(work):
    best = 0
    for _ in range(3):
        start = time.perf_counter()
        count = work()
        best = max(best, count / (time.perf_counter() - start))
    return best


def decoded(paths, read):
    for path in paths:
        read(path.read_bytes())
    return len(paths)


def trained(loader):
    return sum(len(labels) for _, labels in loader)


if not FOLDER.exists():
    write()
paths = sorted(FOLDER.rglob("*.jpg"))
by_torchvision = lambda data: decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
by_pillow = lambda data: Image.open(io.BytesIO(data)).convert("RGB").load()
print(f"{sum(path.stat().st_size for path in paths) / len(paths) / 1000:.0f} kB a file")
print(f"decoded by torchvision    {rate(lambda: decoded(paths, by_torchvision)):7.0f} images/s")
print(f"decoded by Pillow         {rate(lambda: decoded(paths, by_pillow)):7.0f} images/s")
end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
for name, loader, first in (("tensors", lambda path: by_torchvision(pathlib.Path(path).read_bytes()), []),
                            ("Pillow", datasets.folder.default_loader, [v2.ToImage()])):
    crop = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    data = datasets.ImageFolder(FOLDER, v2.Compose(crop + first + end), loader=loader)
    batches = torch.utils.data.DataLoader(data, 32, shuffle=True, num_workers=WORKERS)
    print(f"for training, {name:<11} {rate(lambda: trained(batches)):7.0f} images/s")
