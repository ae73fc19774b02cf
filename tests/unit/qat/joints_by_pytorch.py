"""The numbers of quantized_joints_test.cpp, as PyTorch computes them: four steps of a model with a sum and a
concatenation, fake-quantised by its modules. Prints losses, then the ranges of the sites."""
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver


def numbers(shape, key):
    count = torch.Size(shape).numel()
    i = torch.arange(count, dtype=torch.int64)
    return (((i * 7919 + key * 104729) % 2001).double() / 1000 - 1).float().reshape(shape)


def activation():
    return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8,
                        qscheme=torch.per_tensor_affine, averaging_constant=0.01)


def weight():
    return FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=-127, quant_max=127, dtype=torch.qint8,
                        qscheme=torch.per_channel_symmetric, averaging_constant=1, ch_axis=0)


class Linear(nn.Module):
    def __init__(self, inputs, outputs, key):
        super().__init__()
        self.weight = nn.Parameter(numbers((outputs, inputs), key) * 0.2)
        self.bias = nn.Parameter(numbers((outputs,), key + 1) * 0.2)
        self.round = weight()

    def forward(self, x):
        return nn.functional.linear(x, self.round(self.weight), self.bias)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = Linear(48, 12, 10), Linear(12, 12, 20), Linear(24, 3, 30)
        self.input, self.output1, self.output2, self.sum, self.concatenation, self.output3 = (
            activation() for _ in range(6))

    def forward(self, x):
        h = self.output1(torch.relu(self.fc1(self.input(x))))
        s = self.sum(torch.relu(self.output2(self.fc2(h)) + h))
        return self.output3(self.fc3(self.concatenation(torch.cat([s, h], 1))))


def train(model, inputs, sites):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs(step)), torch.arange(6) % 3)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.7f}")
    for site in sites(model):
        observer = site.activation_post_process
        print(f"{observer.min_val.item():.7f}, {observer.max_val.item():.7f}")


torch.set_num_threads(1)
print("sum and concatenation")
train(Joined(), lambda step: numbers((6, 48), step), lambda m: [m.output1, m.output2, m.sum, m.concatenation, m.output3])
