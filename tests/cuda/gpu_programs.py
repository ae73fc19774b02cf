"""The programs that tests/gpu.sh runs: where they lie, which of CUDA's libraries they lack, and how they are packed to be
carried."""
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

PROGRAMS = ["unit_cuda", "golden_cuda", "golden_cuda_bf16", "train_step_cuda", "train_step_large_cuda"]
LIMIT = 60 << 20  # bytes of a packed folder
# What may be missing: then a library of the same name stands in, each of whose functions fails, and no test calls one.
OPTIONAL = {"libcudnn.so.9": "cudnn", "libnccl.so.2": "nccl"}


def library_folders():
    """Where CUDA's libraries may lie beside the loader's places: the toolkit, and Python's packages."""
    folders = ["/usr/local/cuda/lib64", "/usr/local/cuda/lib"]
    for place in os.environ.get("PYTHONPATH", "").split(":") + python_path():
        if place:
            folders += sorted(glob.glob(f"{place}/nvidia/*/lib"))
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def python_path():
    """Of the Python that has PyTorch: it may be another one than this."""
    run = subprocess.run(["python3", "-c", "import sys; print('\\n'.join(sys.path))"], capture_output=True, text=True)
    return run.stdout.splitlines()


class Programs:
    """Programs of a folder, or of a build's folder with `benchmarks` in it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.there = {}
        for name in PROGRAMS:
            for path in (self.folder / name, self.folder / "benchmarks" / name):
                if os.access(path, os.X_OK):
                    self.there[name] = path
                    break
        self.environment = dict(os.environ, CHORUS_REQUIRE_GPU="1")  # no test may pass because it found no GPU
        self.missing = set()
        if self.lacking():
            self.search(library_folders())
        self.missing = self.lacking()
        for library in self.missing & OPTIONAL.keys():
            self.search([str(folder) for folder in [self.folder / "stand_in" / OPTIONAL[library]] if folder.is_dir()])
        self.unloadable = self.lacking()

    def search(self, folders):
        before = self.environment.get("LD_LIBRARY_PATH", "")
        self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [before, *folders]))

    def put_first(self, folder):
        """The loader looks there before anywhere else."""
        self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [folder, self.environment.get("LD_LIBRARY_PATH", "")]))

    def cuda_version(self):
        """The CUDA whose runtime the programs load; None where they name none."""
        for path in self.there.values():
            run = subprocess.run(["ldd", path], capture_output=True, text=True, env=self.environment)
            if found := re.search(r"libcudart\.so\.(\d+)", run.stdout):
                return int(found[1])
        return None

    def lacking(self, names=None):
        """Libraries that the loader does not find for these programs."""
        found = set()
        for name in names or self.there:
            run = subprocess.run(["ldd", self.there[name]], capture_output=True, text=True, env=self.environment)
            found |= set(re.findall(r"(\S+) => not found", run.stdout))
        return found


def imported(program, prefix):
    """Functions that the program takes from libraries and whose names begin so."""
    run = subprocess.run(["nm", "-D", "--undefined-only", program], capture_output=True, text=True, check=True)
    return set(re.findall(rf"\bU ({prefix}\w+)", run.stdout))


def stand_in(library, prefix, functions, folder):
    folder.mkdir(parents=True, exist_ok=True)
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(functions))
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / library, f"-Wl,-soname,{library}"],
                   input=source, text=True, check=True)
    subprocess.run(["strip", "-s", folder / library], check=True)


def pack(built, folder):
    """Copies the programs of a build, stripped, with what stands in for libraries that may be missing; says their sizes,
    and ends with 1 where they take more than LIMIT together."""
    programs = Programs(built)
    if not programs.there:
        raise OSError(f"{built} has none of the programs {', '.join(PROGRAMS)}")
    if folder.exists() and any(folder.iterdir()) and not (folder / "packed.json").exists():
        raise OSError(f"{folder} is not empty")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, path in programs.there.items():
        subprocess.run(["strip", "-s", "-o", folder / name, path], check=True)
    for library, prefix in OPTIONAL.items():
        functions = set().union(*(imported(path, prefix) for path in programs.there.values()))
        if functions:
            stand_in(library, prefix, functions, folder / "stand_in" / prefix)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "packed.json").write_text(json.dumps({"bytes": sizes}, indent=1) + "\n")
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB {name}")
    for name in PROGRAMS:
        if name not in programs.there:
            print(f"   left out: {name}, which is not built")
    total = sum(sizes.values())
    print(f"{total / 2**20:6.1f} MiB in all, of {LIMIT >> 20}")
    if total > LIMIT:
        print("tests/gpu.sh: that is too much to be carried", file=sys.stderr)
        sys.exit(1)
