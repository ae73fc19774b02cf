#!/usr/bin/env python3
"""What this GPU reaches with PyTorch: bytes per second of a copy, and operations per second of products in float, TF32 and
bf16. What kernels and steps get is to be seen beside that."""
import torch


def seconds(call, times=20):
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def main():
    print(torch.cuda.get_device_name(), "with PyTorch", torch.__version__)
    for mib in (1, 16, 256, 2048):
        x = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        print(f"copy of {mib} MiB: {2 * x.numel() / seconds(lambda: y.copy_(x)) / 1e9:.0f} GB/s, read and written")
    for name, dtype, tf32 in (("float", torch.float32, False), ("TF32", torch.float32, True), ("bf16", torch.bfloat16, False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        n = 8192
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        print(f"product of {n} x {n} in {name}: {2 * n**3 / seconds(lambda: a @ b) / 1e12:.1f} TFLOP/s")


main()
