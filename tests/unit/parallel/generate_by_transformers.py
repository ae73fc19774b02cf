#!/usr/bin/env python3
"""Prints what transformers generates by a table of logits: the numbers of generate_test.cpp. Needs torch, transformers."""

import torch
from transformers import GenerationConfig, GenerationMixin, GPT2Config, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.modeling_outputs import CausalLMOutput

TOKENS = 12


def table():
    state, numbers = 1, []
    for _ in range(2 * TOKENS * TOKENS):
        state = (1103515245 * state + 12345) % 2**31
        numbers.append((state >> 8) % 1000 / 150)
    return torch.tensor(numbers, dtype=torch.float64).reshape(2, TOKENS, TOKENS)


class Table(PreTrainedModel, GenerationMixin):
    config_class = GPT2Config

    def __init__(self):
        super().__init__(GPT2Config(vocab_size=TOKENS, n_positions=64, n_embd=4, n_layer=1, n_head=1,
                                    bos_token_id=None, eos_token_id=None))
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.logits = table()

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.logits[torch.arange(input_ids.shape[1]) % 2, input_ids])

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}


prompt = torch.tensor([[1, 2, 3], [4, 5, 0], [7, 7, 7]])
model = Table()
for beams, penalty, eos, more in ((1, 1.0, [], 10), (1, 1.0, [5, 3], 10), (2, 1.0, [], 8), (3, 1.0, [5], 12),
                                  (4, 2.0, [5, 3], 12), (3, 0.0, [5, 3], 12), (2, -1.0, [8], 9), (5, 1.0, [1], 6)):
    config = GenerationConfig(max_new_tokens=more, num_beams=beams, length_penalty=penalty, eos_token_id=eos or None,
                              pad_token_id=eos[0] if eos else 0, do_sample=False, use_cache=False, bos_token_id=None)
    with torch.no_grad():
        out = model.generate(prompt, generation_config=config)
    rows = ", ".join(str(token) for token in out.flatten().tolist())
    print(f"{{{beams}, {penalty:g}, {{{', '.join(map(str, eos))}}}, {more}, {{{rows}}}}},")

scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0, 0.5, 2.0, 2.5]], dtype=torch.float64)
for temperature, top_k, top_p in ((0.5, 0, 1.0), (1.0, 4, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.5), (1.0, 0, 0.05),
                                  (2.0, 3, 0.6), (0.7, 6, 0.8)):
    kept = TemperatureLogitsWarper(temperature)(None, scores)
    kept = TopKLogitsWarper(top_k)(None, kept) if top_k else kept
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    print(f"{{{temperature:g}, {top_k}, {top_p:g}, {{{', '.join(f'{p:.9g}' for p in kept.softmax(-1)[0].tolist())}}}}},")
