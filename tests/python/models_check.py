#!/usr/bin/env python3
"""Compares the library's BERT with Hugging Face's, and its ResNets with PyTorch's layers, on random weights.

usage: models_check.py TOOL"""

import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

FOLDER = tempfile.TemporaryDirectory()
torch.manual_seed(3)


def chorus(name, weights, **inputs):
    path = pathlib.Path(FOLDER.name)
    numpy.savez(path / "in.npz", **inputs)
    done = subprocess.run([sys.argv[1], name, str(weights), str(path / "in.npz"), str(path / "out.npy")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.from_numpy(numpy.load(path / "out.npy"))


def compare(name, own, theirs, tolerance):
    worst = (own - theirs).abs().max().item()
    print(f"models_check: {name}: within {worst:.1e} of {theirs.abs().max().item():.2g}")
    assert own.shape == theirs.shape and worst < tolerance, worst


def bert():
    config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
                        max_position_embeddings=16, initializer_range=0.3)
    tokens, types = torch.randint(50, (3, 11)), torch.randint(2, (3, 11))
    mask = torch.arange(11) < torch.tensor([[11], [7], [4]])
    inputs = dict(tokens=tokens.numpy(), types=types.numpy(), mask=mask.numpy())
    for name, model in (("bert", BertModel(config)), ("bert_masked_lm", BertForMaskedLM(config))):
        model.eval()
        for suffix, save in ((".safetensors", lambda s, p: save_file(s, p)), (".pt", torch.save)):
            path = pathlib.Path(FOLDER.name) / (name + suffix)
            state = {k: v.clone() for k, v in model.state_dict().items() if "position_ids" not in k}
            save(state, path)
            with torch.no_grad():
                out = model(input_ids=tokens, token_type_ids=types, attention_mask=mask.long())[0]
            compare(name + suffix, chorus(name, path, **inputs)[mask], out[mask], 2e-5)


class Block(torch.nn.Module):
    def __init__(self, kind, inputs, width, stride):
        super().__init__()
        conv, norm = (lambda i, o, k, s=1: torch.nn.Conv2d(i, o, k, s, k // 2, bias=False)), torch.nn.BatchNorm2d
        if kind == 18:
            self.conv1, self.bn1, self.conv2, self.bn2, out = conv(inputs, width, 3, stride), norm(width), conv(width, width, 3), norm(width), width
        else:
            self.conv1, self.bn1, self.conv2, self.bn2 = conv(inputs, width, 1), norm(width), conv(width, width, 3, stride), norm(width)
            self.conv3, self.bn3, out = conv(width, 4 * width, 1), norm(4 * width), 4 * width
        self.downsample = None if inputs == out and stride == 1 else torch.nn.Sequential(conv(inputs, out, 1, stride), norm(out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if hasattr(self, "conv3"):
            y = self.bn3(self.conv3(torch.relu(y)))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(torch.nn.Module):
    """torchvision's."""

    def __init__(self, kind, counts):
        super().__init__()
        self.conv1, self.bn1, inputs, times = torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), 64, 1 if kind == 18 else 4
        for stage, count in enumerate(counts):
            blocks = []
            for i in range(count):
                blocks.append(Block(kind, inputs, 64 << stage, 2 if stage and i == 0 else 1))
                inputs = (64 << stage) * times
            setattr(self, f"layer{stage + 1}", torch.nn.Sequential(*blocks))
        self.fc = torch.nn.Linear(inputs, 1000)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


def resnet():
    images = torch.randn(2, 3, 96, 80)
    for kind, counts in ((18, (2, 2, 2, 2)), (50, (3, 4, 6, 3))):
        model = ResNet(kind, counts)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(4, 3, 96, 80))
            model.eval()
            path = pathlib.Path(FOLDER.name) / f"resnet{kind}.pt"
            torch.save(model.state_dict(), path)
            compare(f"resnet{kind}.pt", chorus(f"resnet{kind}", path, images=images.numpy()), model(images), 1e-5)


bert()
resnet()
