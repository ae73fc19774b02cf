#!/usr/bin/env python3
"""Writes experts.hpp: what PyTorch computes for a mixture of experts and its gradients. usage: experts.py > experts.hpp"""

import math
import torch

torch.set_default_dtype(torch.float64)
TOKENS, FEATURES, EXPERTS, HIDDEN = 7, 3, 4, 2


def waves(key, *shape):
    count = math.prod(shape)
    return torch.sin(0.7 * torch.arange(count) + key).reshape(shape).requires_grad_()


def case(top_k, capacity, renormalize, balance, z_loss):
    x, router = waves(1, TOKENS, FEATURES), waves(2, EXPERTS, FEATURES)
    up, up_bias = waves(3, EXPERTS, HIDDEN, FEATURES), waves(4, EXPERTS, HIDDEN)
    down, down_bias = waves(5, EXPERTS, FEATURES, HIDDEN), waves(6, EXPERTS, FEATURES)
    logits = x @ router.T
    probabilities = torch.softmax(logits, 1)
    best, chosen = torch.topk(probabilities, top_k, 1)
    weights = best / best.sum(1, keepdim=True) if renormalize else best
    room = math.ceil(capacity * top_k * TOKENS / EXPERTS) if capacity > 0 else TOKENS
    taken, dropped, load = [0] * EXPERTS, 0, [0] * EXPERTS
    y = torch.zeros(TOKENS, FEATURES)
    for choice in range(top_k):
        for token in range(TOKENS):
            e = int(chosen[token, choice])
            load[e] += 1
            if taken[e] == room:
                dropped += 1
                continue
            taken[e] += 1
            hidden = torch.nn.functional.gelu(up[e] @ x[token] + up_bias[e])
            out = weights[token, choice] * (down[e] @ hidden + down_bias[e])
            y = y + torch.nn.functional.one_hot(torch.tensor(token), TOKENS)[:, None] * out
    share = torch.tensor(load) / (top_k * TOKENS)
    loss = balance * EXPERTS * (share * probabilities.mean(0)).sum() + z_loss * torch.logsumexp(logits, 1).square().mean()
    ((y * waves(7, TOKENS, FEATURES).detach()).sum() + loss).backward()
    numbers = [y, loss.reshape(1), x.grad, router.grad, up.grad, up_bias.grad, down.grad, down_bias.grad]
    text = ", ".join(f"{v:.15g}" for t in numbers for v in t.flatten().tolist())
    options = f".top_k = {top_k}, .hidden = {HIDDEN}, .capacity = {capacity}, .renormalize = {str(renormalize).lower()}, "
    options += f".balance_loss = {balance}, .z_loss = {z_loss}"
    return f"    {{{{.experts = {EXPERTS}, {options}}}, {dropped}, {{{text}}}}},"


print("#pragma once")
print("/// A mixture of experts in PyTorch, by experts.py: options, dropped choices; y, loss, then the gradients of")
print("/// sum(y * waves(7)) + loss by x, router, up, down.")
print()
print("#include <chorus/nn/mixture_of_experts.hpp>")
print("#include <vector>")
print()
print("namespace golden {")
print()
print("struct Experts {\n  chorus::nn::MixtureOfExpertsOptions options;\n  chorus::Index dropped;")
print("  std::vector<double> numbers;\n};")
print("inline std::vector<Experts> experts() {\n  // clang-format off\n  return {")
print(case(1, 0.75, False, 0.5, 0))
print(case(2, 0, True, 0.01, 0.1))
print(case(2, 0.8, True, 0.3, 0.2))
print("  };\n  // clang-format on\n}")
print()
print("}  // namespace golden")
