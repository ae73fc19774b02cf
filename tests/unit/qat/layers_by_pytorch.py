"""The expected numbers of quantized_joints_test.cpp and quantized_layers_test.cpp, computed by PyTorch: four steps of
models fake-quantised by its modules. Prints the losses, then the ranges of the sites."""
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


class Tokens(nn.Module):
    """An embedding, whose rows are rounded one by one like torch.ao.nn.qat.Embedding's, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.table, self.round = nn.Parameter(numbers((10, 8), 40) * 0.2), weight()
        self.fc, self.input, self.output = Linear(24, 3, 50), activation(), activation()

    def forward(self, tokens):
        rows = nn.functional.embedding(tokens, self.round(self.table))
        return self.output(self.fc(self.input(rows.flatten(1))))


class Attention(nn.Module):
    """Two heads of four features, whose products take rounded numbers."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(numbers((24, 8), 60) * 0.2)
        self.in_proj_bias = nn.Parameter(numbers((24,), 61) * 0.2)
        self.round = weight()
        self.out_proj = Linear(8, 8, 70)
        self.input, self.query, self.key, self.value, self.attention, self.joined = (activation() for _ in range(6))

    def forward(self, x):
        x = self.input(x)
        parts = nn.functional.linear(x, self.round(self.in_proj_weight), self.in_proj_bias).chunk(3, -1)
        q, k, v = (site(part.reshape(*part.shape[:2], 2, 4).transpose(1, 2))
                   for site, part in zip((self.query, self.key, self.value), parts))
        scores = (q * 0.5) @ k.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = self.attention(torch.softmax(scores.masked_fill(later, float("-inf")), -1))
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.out_proj(self.joined(y)).mean(1)


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
print("embedding")
train(Tokens(), lambda step: (torch.arange(18).reshape(6, 3) * 7 + step) % 10, lambda m: [m.input, m.output])
print("attention")
train(Attention(), lambda step: numbers((6, 5, 8), step),
      lambda m: [m.input, m.query, m.key, m.value, m.attention, m.joined])
