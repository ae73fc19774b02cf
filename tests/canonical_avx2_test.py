"""Runs canonical_avx2, which is compiled for AVX2, if the processor supports it.

canonical_avx2_test.py PROGRAM
"""

import subprocess
import sys


def main():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    # The features of x86-64-v3 that compilers do not assume by default.
    missing = [name for name in ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe") if name not in flags]
    if missing:
        print(f"skipped: this processor lacks {', '.join(missing)}, which canonical_avx2 is compiled for: canonical "
              "shares were not tried as AVX2 computes them")
        return 77
    return subprocess.run([sys.argv[1]], check=False, timeout=240).returncode


sys.exit(main())
