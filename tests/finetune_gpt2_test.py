#!/usr/bin/env python3
"""Fine-tunes a small random GPT-2 in Hugging Face's form with examples/finetune_gpt2, and compares it with transformers.
usage: finetune_gpt2_test.py PROGRAM [PYTHON]

Without PYTHON, the folder tests/gpt2 is read, and the scores and tokens in it are transformers'. With it, a Python that
has torch and transformers, further models are made, and transformers opens what the program writes."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

PROGRAM, PYTHON = sys.argv[1], sys.argv[2:]
HERE = pathlib.Path(__file__).resolve().parent
PEER = HERE / "gpt2" / "generate.py"
temporary = tempfile.TemporaryDirectory(prefix="chorus_gpt2_")
FOLDER = pathlib.Path(temporary.name)
TEXT = FOLDER / "text"
TEXT.write_text("the cat sees a dog. it's a red house, and they're quiet. " * 60)
PROMPT = "the cat's house"


def run(folder, *options, fails=False):
    done = subprocess.run([PROGRAM, str(folder), *map(str, options)], capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, f"{options}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def answer(folder, *options):
    """The prompt's tokens, the scores after them, all tokens."""
    out = run(folder, "--prompt", PROMPT, "--logits", *options)
    lines = {line.split(" ", 1)[0]: json.loads(line.split(" ", 1)[1]) for line in out.splitlines()
             if line.startswith(("prompt ", "logits ", "tokens "))}
    return lines["prompt"], lines["logits"], lines["tokens"]


def check(folder, expected, *options, tolerance=1e-4):
    prompt, logits, tokens = answer(folder, *options)
    worst = max(abs(a - b) for a, b in zip(logits, expected["logits"], strict=True))
    print(f"{pathlib.Path(folder).name} {' '.join(map(str, options))}: scores within {worst:.1e}, least gap {expected['gap']:.4f}")
    assert prompt == expected["prompt"], (prompt, expected["prompt"])
    assert worst < tolerance and expected["gap"] > 5 * worst, (worst, expected["gap"])
    assert tokens == expected["tokens"], (tokens, expected["tokens"])


def transformers(folder, prompt=PROMPT):
    """What transformers answers for a folder."""
    return json.loads(subprocess.run([*PYTHON, str(PEER), "answer", str(folder), prompt], capture_output=True, text=True, check=True).stdout)


# 1. The scores and 100 tokens of transformers, under every policy.
golden = HERE / "gpt2" / "model"
expected = json.loads((HERE / "gpt2" / "expected.json").read_text())
for policy in ("single", "ddp", "fsdp"):
    check(golden, expected, "--policy", policy)

# 2. Training learns, equally under every policy; what is written reads back with the same answers.
def train(name, *options):
    path = FOLDER / "metrics.jsonl"
    out = run(golden, "--data", TEXT, "--window", "16", "--batch", "8", "--lr", "2e-3", "--dropout", "0", "--quiet", "--epochs", "9", "--steps", "12",
              "--metrics", path, "--save", FOLDER / name, "--prompt", PROMPT, "--logits", *options)
    losses = [event["loss"] for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "step"]
    assert len(losses) == 12, losses
    return losses, [json.loads(line[7:]) for line in out.splitlines() if line.startswith("logits ")][0]


for how in ((), ("--lora", "4", "--lr", "2e-2"), ("--lora", "4", "--lr", "2e-2", "--checkpoint")):
    single, scores = train("single", *how)
    assert single[-1] < single[0] - 0.15, single
    again = answer(FOLDER / "single")[1]
    assert max(abs(a - b) for a, b in zip(again, scores, strict=True)) < 1e-3, (again, scores)
    for policy in ("ddp", "fsdp"):
        other, _ = train(policy, "--policy", policy, *how)
        worst = max(abs(a - b) for a, b in zip(single, other, strict=True))
        print(f"{how} {policy}: losses {single[0]:.3f} ... {single[-1]:.3f} within {worst:.1e} of one device's")
        assert worst < 2e-3, (single, other)
        ends = answer(FOLDER / policy)[1]
        assert max(abs(a - b) for a, b in zip(ends, again, strict=True)) < 2e-2, (ends, again)
adapter = json.loads((FOLDER / "single" / "adapter" / "adapter_config.json").read_text())
assert adapter["r"] == 4 and adapter["lora_alpha"] == 16 and adapter["fan_in_fan_out"], adapter
config = json.loads((FOLDER / "single" / "config.json").read_text())
assert config["model_type"] == "gpt2" and "architectures" in config, config
assert (FOLDER / "single" / "tokenizer.json").read_bytes() == (golden / "tokenizer.json").read_bytes()

# 3. What does not fit is refused by name.
bad = FOLDER / "bad"
for change, message in (({"model_type": "llama"}, 'model_type: expected "gpt2", got "llama"'),
                        ({"activation_function": "relu"}, "activation_function: expected gelu_new, got relu"),
                        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: expected false, got true"),
                        ({"n_head": 5}, "n_head: expected a divisor of n_embd"), ({"n_layer": 3}, "missing: h.2."), ({"n_layer": 1}, "unexpected: transformer.h.1."),
                        ({"vocab_size": 300}, "tokens, config.json vocab_size 300"), ({"n_embd": "x"}, "n_embd: expected a value like"), (None, "model.safetensors")):
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(golden, bad)
    text = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(text | (change or {})))
    if change is None:
        (bad / "model.safetensors").unlink()
    out = run(bad, "--prompt", "x", fails=True)
    assert message in out, (change, out)
assert "expected at most 128 tokens" in run(golden, "--prompt", "x", "--tokens", "200", fails=True)
assert "expected text for at least one batch" in run(golden, "--data", TEXT, "--batch", "4096", "--window", "16", fails=True)

# 4. With transformers itself: other models, in one file and in several; and it opens what was written.
if PYTHON:
    for form in ("plain", "sharded", "untied", "old"):
        subprocess.run([*PYTHON, str(PEER), "make", form, str(FOLDER / form)], check=True, stdout=subprocess.DEVNULL)
        check(FOLDER / form, transformers(FOLDER / form))
    assert len(list((FOLDER / "sharded").glob("model-*.safetensors"))) > 1
    for name in ("single", "fsdp"):
        check(FOLDER / name, transformers(FOLDER / name))
    index = FOLDER / "sharded" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    assert "without a folder" in run(FOLDER / "sharded", "--prompt", "x", fails=True)
print("finetune_gpt2: as it should be")
