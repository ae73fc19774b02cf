"""The phase `bench` of tests/gpu.sh: training steps beside PyTorch's, in one call, each case judged. The logs have the
algorithms of products and convolutions, too."""
import re
import subprocess

CASES = {  # of each program
    "train_step_cuda": ["toy_b16", "toy_b128", "mlp_b64", "resnet18_b32", "gpt_b16", "resnet18_b256_bf16"],
    "train_step_large_cuda": ["gpt2_124m_b8_bf16", "resnet50_b128_bf16", "gpt2_124m_b64_bf16"],
}
# What graphs are for: of small models PyTorch's eager step is mostly launches.
QUARTER = {"toy_b16", "mlp_b64", "gpt_b16"}


def bench(run):
    cases = [case for wanted in CASES.values() for case in wanted]
    if "cudnn" in run.missing:
        for case in cases:
            if not case.startswith(("mlp", "gpt")):
                run.note(case, "skipped", "it needs libcudnn.so.9")
        cases = [case for case in cases if case.startswith(("mlp", "gpt"))]
    own = []
    for program in CASES:
        if run.has(program, program):
            wanted = [case for case in CASES[program] if case in cases]
            keep(run, "chorus", run.check(program, 150, [run.programs.there[program], *wanted], CHORUS_CUDA_PLANS="1"))
            own += wanted
    if not run.torch.exists():
        return run.note("pytorch", "skipped", f"there is no {run.torch}")
    if subprocess.run(["python3", "-c", "import torch"], capture_output=True).returncode:
        return run.note("pytorch", "skipped", "there is no PyTorch: `python3 -c 'import torch'` fails")
    # Eager of all comes first, then what costs minutes to compile: its time may end there.
    for mode, wanted, limit in (("eager", cases, 90), ("graphs", [c for c in cases if c in QUARTER], 90),
                                ("compile", cases, 200)):
        text = run.check(f"torch_{mode}", limit, ["python3", run.torch, "--device", "cuda", "--mode", mode, *wanted])
        keep(run, "torch", text)
    for case in own:
        judge(run, case)


def keep(run, program, text):
    """Notes the times of what a program has printed."""
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S+)", line))
        if {"mode", "median_ms", "samples_per_s"} <= facts.keys():
            run.times.append({"program": program, "case": line.split()[0], "mode": facts["mode"],
                              "median_ms": float(facts["median_ms"]), "samples_per_s": float(facts["samples_per_s"]),
                              "peak_gpu_mib": float(facts["peak_gpu_mib"]) if "peak_gpu_mib" in facts else None})


def judge(run, case):
    """A step as a graph takes at most the time of the best of PyTorch's modes that gave one; for the small models at
    most a quarter of its eager time."""
    own = {t["mode"]: t["median_ms"] for t in run.times if t["case"] == case and t["program"] == "chorus"}
    peer = {t["mode"]: t["median_ms"] for t in run.times if t["case"] == case and t["program"] == "torch"}
    said = "; PyTorch ".join(", ".join(f"{mode} {ms:.3f} ms" for mode, ms in times.items()) or "gave no time"
                             for times in (own, peer))
    passed = "graphs" in own and all(own["graphs"] <= ms for ms in peer.values())
    if case in QUARTER:
        passed = passed and "eager" in peer and own["graphs"] <= peer["eager"] / 4
    run.note(f"faster_{case}", "passed" if passed else "failed", f"chorus {said}")
