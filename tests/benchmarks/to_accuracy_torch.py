#!/usr/bin/env python3
"""Trains the model of `train_classifier --model toy` on MNIST's IDX files with PyTorch, in its options and its metrics file.
With --ranks N, DistributedDataParallel over gloo in N processes, which share each batch out; else one process.
It stops at the epoch whose test accuracy is --target."""

import argparse
import gzip
import json
import os
import pathlib
import socket
import time

import torch
import torch.distributed
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", required=True)
parser.add_argument("--metrics", required=True)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--target", type=float, default=1.1)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--ranks", type=int, default=1)
options = parser.parse_args()


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def read(name, header):
    """The numbers of an IDX file, plain or compressed, without its header."""
    path = pathlib.Path(options.data) / name
    data = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(name + ".gz").read_bytes())
    return torch.tensor(bytearray(data[header:]), dtype=torch.uint8)


def split(name):
    images = read(f"{name}-images-idx3-ubyte", 16).view(-1, 1, 28, 28).float() / 255
    return (images - 0.1307) / 0.3081, read(f"{name}-labels-idx1-ubyte", 8).long()


def train(rank, port):
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    net = LeNet()
    if options.ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.lr, momentum=options.momentum)
    (images, labels), (test_images, test_labels) = split("train"), split("t10k")
    mine = slice(rank, None, options.ranks)
    log = []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        for batch in torch.randperm(len(images)).split(options.batch):
            optimizer.zero_grad()
            F.cross_entropy(net(images[batch[mine]]), labels[batch[mine]]).backward()
            optimizer.step()
        with torch.no_grad():
            right = torch.tensor(0)
            for x, y in zip(test_images[mine].split(256), test_labels[mine].split(256)):
                right += (net(x).argmax(1) == y).sum()
        if options.ranks > 1:
            torch.distributed.all_reduce(right)
        accuracy = right.item() / len(test_labels)
        log.append({"event": "epoch", "epoch": epoch, "test_accuracy": accuracy, "seconds": time.perf_counter() - start})
        if accuracy >= options.target:
            break
    if rank == 0:
        pathlib.Path(options.metrics).write_text("".join(json.dumps(line) + "\n" for line in log))


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if options.ranks > 1:
        torch.multiprocessing.spawn(train, (port,), options.ranks)
    else:
        train(0, port)
