"""PyTorch's side of operators/compare.py --torch: the cases of models.cpp, by the same names and of the same numbers."""
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.fx.experimental.optimization import fuse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "operators"))
from torch_operators import CASES, answer_requests, checksum, fill_parameters, ints, rnd  # noqa: E402

CASES.clear()


def conv(inputs, outputs, kernel, stride=1, groups=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Block(nn.Module):
    expansion = 1

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        plain = inputs == width and stride == 1
        self.shortcut = None if plain else nn.Sequential(conv(inputs, width, 1, stride), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x) if self.shortcut else x
        return self.relu(y)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        plain = inputs == outputs and stride == 1
        self.shortcut = None if plain else nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += self.shortcut(x) if self.shortcut else x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, block, counts, small=False, classes=1000):
        super().__init__()
        self.small = small
        self.conv1 = conv(3, 64, 3) if small else conv(3, 64, 7, 2)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        inputs, layers = 64, []
        for stage, width in enumerate((64, 128, 256, 512)):
            for i in range(counts[stage]):
                layers.append(block(inputs, width, 2 if stage and i == 0 else 1))
                inputs = width * block.expansion
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, 1)
        return self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, times):
        super().__init__()
        inner = inputs * times
        if times != 1:
            self.expand, self.bn0 = conv(inputs, inner, 1), nn.BatchNorm2d(inner)
        self.depthwise, self.bn1 = conv(inner, inner, 3, stride, inner), nn.BatchNorm2d(inner)
        self.project, self.bn2 = conv(inner, outputs, 1), nn.BatchNorm2d(outputs)
        self.skip, self.times, self.relu6 = stride == 1 and inputs == outputs, times, nn.ReLU6(inplace=True)

    def forward(self, x):
        y = self.relu6(self.bn0(self.expand(x))) if self.times != 1 else x
        y = self.bn2(self.project(self.relu6(self.bn1(self.depthwise(y)))))
        return x + y if self.skip else y


class MobileNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = conv(3, 32, 3, 2), nn.BatchNorm2d(32)
        inputs, blocks = 32, []
        for times, channels, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
                                               (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
            for i in range(count):
                blocks.append(InvertedResidual(inputs, channels, stride if i == 0 else 1, times))
                inputs = channels
        self.blocks = nn.Sequential(*blocks)
        self.last, self.bn2, self.fc = conv(320, 1280, 1), nn.BatchNorm2d(1280), nn.Linear(1280, 1000)
        self.relu6 = nn.ReLU6(inplace=True)

    def forward(self, x):
        x = self.blocks(self.relu6(self.bn(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(self.relu6(self.bn2(self.last(x))), 1).flatten(1))


class TwoConvolutions(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(conv(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
                         conv(outputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        two, up = TwoConvolutions, nn.ConvTranspose2d
        self.d1, self.d2, self.d3, self.d4 = two(3, 32), two(32, 64), two(64, 128), two(128, 256)
        self.u3, self.u2, self.u1 = up(256, 128, 2, 2), up(128, 64, 2, 2), up(64, 32, 2, 2)
        self.e3, self.e2, self.e1, self.out = two(256, 128), two(128, 64), two(64, 32), nn.Conv2d(32, 5, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.max_pool2d(b, 2))
        d = self.d4(F.max_pool2d(c, 2))
        p = self.e3(torch.cat((c, self.u3(d)), 1))
        q = self.e2(torch.cat((b, self.u2(p)), 1))
        return self.out(self.e1(torch.cat((a, self.u1(q)), 1)))


class Bert(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(30522, 512), nn.Embedding(128, 512), nn.LayerNorm(512)
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(512, 8, 2048, dropout, "gelu", batch_first=True)
                                      for _ in range(4)])
        self.head = nn.Linear(512, 2)
        for layer in self.layers:
            layer.self_attn.dropout = 0.0  # on this side alone there is dropout of attention's weights

    def forward(self, text):
        x = self.norm(self.tokens(text) + self.places.weight[:text.size(1)])
        return self.head(self.layers(x).mean(1))


class LstmLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.lstm = nn.Embedding(10000, 256), nn.LSTM(256, 512, 2, batch_first=True)
        self.decoder = nn.Linear(512, 10000)

    def forward(self, text):
        return self.decoder(self.lstm(self.encoder(text))[0])


class GptBlock(nn.Module):
    def __init__(self, width, heads, gelu):
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.ln_1, self.c_attn, self.c_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln_2, self.c_fc, self.m_proj = (nn.LayerNorm(width), nn.Linear(width, 4 * width),
                                             nn.Linear(4 * width, width))

    def forward(self, x):
        n, t, w = x.shape
        q, k, v = (part.view(n, t, self.heads, w // self.heads).transpose(1, 2)
                   for part in self.c_attn(self.ln_1(x)).split(w, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(seen.transpose(1, 2).reshape(n, t, w))
        return x + self.m_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate=self.gelu))


class Gpt(nn.Module):
    def __init__(self, words, width, heads, length, bias, gelu):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*[GptBlock(width, heads, gelu) for _ in range(4)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=bias)

    def forward(self, text):
        return self.lm_head(self.ln_f(self.h(self.wte(text) + self.wpe.weight[:text.size(1)])))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        widths, layers = (512, 256, 128, 64), [nn.ConvTranspose2d(100, 512, 4, bias=False)]
        for i, width in enumerate(widths):
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                       nn.ConvTranspose2d(width, (widths + (3,))[i + 1], 4, 2, 1, bias=False)]
        self.layers = nn.Sequential(*layers, nn.Tanh())

    def forward(self, z):
        return self.layers(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for width in (64, 128, 256):
            layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width),
                       nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(512, 1, 4, bias=False))

    def forward(self, x):
        return self.layers(x).flatten()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def train(name, make, optimizer, images, labels, classes, words=None, clip=0):
    def case():
        net = make()
        fill_parameters(net)
        net.train()
        stepper = optimizer(net.parameters())
        x = ints(images, 1, words) if words else rnd(images, 1)
        t = ints(labels, 5, classes)

        def step():
            stepper.zero_grad()
            y = net(x)
            loss = F.cross_entropy(y.view(-1, classes) if y.dim() == 3 else y, t)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            stepper.step()
            return loss.item()
        return step, lambda: [[loss, loss, abs(loss)] for loss in (step() for _ in range(3))]
    CASES[name] = case


def dcgan():
    g, d = Generator(), Discriminator()
    fill_parameters(g)
    fill_parameters(d)
    of_g, of_d = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (g, d))
    z, real = rnd((16, 100, 1, 1), 1, 1.7), rnd((16, 3, 64, 64), 2)
    ones, zeros, bce = torch.ones(16), torch.zeros(16), F.binary_cross_entropy_with_logits

    def step():
        of_d.zero_grad()
        fake = g(z)
        l1 = bce(d(real), ones)
        l1.backward()
        l2 = bce(d(fake.detach()), zeros)
        l2.backward()
        of_d.step()
        of_g.zero_grad()
        l3 = bce(d(fake), ones)
        l3.backward()
        of_g.step()
        return l1.item() + l2.item(), l3.item()
    return step, lambda: [[a, b, a + b] for a, b in (step() for _ in range(3))]


def folded(net):
    """Batch norms in the convolutions in front of them, by PyTorch's own pass."""
    return fuse(net)


def infer(name, make, images):
    def case(after):
        net = make()
        fill_parameters(net)
        net = after(net.eval())
        x = rnd(images, 1)

        def step():
            with torch.inference_mode():
                return net(x)
        return step, lambda: [checksum(step())]
    CASES[name] = lambda: case(lambda net: net)
    CASES[name + "_folded"] = lambda: case(folded)


def sgd(lr, momentum=0.0):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def adamw(lr):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


def resnet18():
    return ResNet(Block, (2, 2, 2, 2))


def resnet50():
    return ResNet(Bottleneck, (3, 4, 6, 3))


def resnet18_of_32():
    return ResNet(Block, (2, 2, 2, 2), small=True, classes=10)


train("resnet50_b4_224", resnet50, sgd(0.001, 0.9), (4, 3, 224, 224), (4,), 1000)
train("resnet18_b4_224", resnet18, sgd(0.001, 0.9), (4, 3, 224, 224), (4,), 1000)
train("mobilenetv2_b4_224", MobileNetV2, sgd(0.001, 0.9), (4, 3, 224, 224), (4,), 1000)
train("unet_b4_128", UNet, lambda p: torch.optim.Adam(p, lr=1e-4), (4, 3, 128, 128), (4, 128, 128), 5)
CASES["dcgan_b16_64"] = dcgan
train("toy_b16", Toy, sgd(0.01, 0.9), (16, 3, 32, 32), (16,), 10)
train("resnet18_b32_32", resnet18_of_32, sgd(0.01, 0.9), (32, 3, 32, 32), (32,), 10)
train("bert_d512_l4_t128_b8", lambda: Bert(0.0), adamw(1e-4), (8, 128), (8,), 2, words=30522)
train("bert_dropout_d512_l4_t128_b8", lambda: Bert(0.1), adamw(1e-4), (8, 128), (8,), 2, words=30522)
train("lstm_lm_v10k_h512_b20_t35", LstmLanguageModel, sgd(0.1), (20, 35), (700,), 10000, words=10000, clip=0.25)
train("gpt2_d768_l4_t256_b2", lambda: Gpt(50257, 768, 12, 256, False, "tanh"), adamw(1e-4), (2, 256), (512,), 50257,
      words=50257)
train("gpt_small_b16", lambda: Gpt(65, 128, 4, 128, True, "none"), adamw(1e-3), (16, 128), (2048,), 65, words=65)
infer("infer_toy_b1", Toy, (1, 3, 32, 32))
infer("infer_resnet18_b1_32", resnet18_of_32, (1, 3, 32, 32))
infer("infer_resnet18_b1_224", resnet18, (1, 3, 224, 224))
infer("infer_resnet50_b1_224", resnet50, (1, 3, 224, 224))
infer("infer_mobilenetv2_b1_224", MobileNetV2, (1, 3, 224, 224))

if __name__ == "__main__":
    answer_requests()
