#!/usr/bin/env python3
"""Makes small random GPT-2s with Hugging Face's transformers, and says what it answers for them.

    pip install torch transformers; generate.py       writes model/ and expected.json here
    generate.py make FORM FOLDER                      FORM: plain, sharded (several files), untied, old (other names)
    generate.py answer FOLDER PROMPT                  prints tokens, scores, the least gap between the two best scores"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "tokenizer" / "small.json"


def make(form, folder):
    folder = pathlib.Path(folder)
    torch.manual_seed(11)
    sizes = dict(n_embd=16, n_layer=2, n_head=2) if form == "golden" else dict(n_embd=48, n_layer=3, n_head=4, n_inner=80)
    config = GPT2Config(vocab_size=352, n_positions=128, initializer_range=0.3, bos_token_id=0, eos_token_id=None,
                        tie_word_embeddings=form != "untied", **sizes)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and norms that are not 0 and 1
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="40KB" if form == "sharded" else "1GB")
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    if form == "old":  # without the prefix, with the masks that older versions kept
        from safetensors.torch import load_file, save_file
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        for i in range(config.n_layer):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def answer(folder, prompt):
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = PreTrainedTokenizerFast(tokenizer_file=str(pathlib.Path(folder) / "tokenizer.json"))(prompt)["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0, -1]
        written = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), max_new_tokens=100,
                                 do_sample=False, pad_token_id=0)[0]
        best = model(written[None]).logits[0, len(tokens) - 1:-1].topk(2).values
    assert len(written) == len(tokens) + 100 and len(set(written.tolist())) > 8, written
    return {"prompt": tokens, "logits": [float(f"{x:.8g}") for x in scores.tolist()], "tokens": written.tolist(), "gap": (best[:, 0] - best[:, 1]).min().item()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(*sys.argv[2:])
    elif sys.argv[1:2] == ["answer"]:
        print(json.dumps(answer(*sys.argv[2:])))
    else:
        make("golden", HERE / "model")
        (HERE / "model" / "generation_config.json").unlink(missing_ok=True)
        (HERE / "expected.json").write_text(json.dumps(answer(HERE / "model", "the cat's house"), separators=(",", ":")) + "\n")
