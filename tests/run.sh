#!/bin/sh
# Installs what is missing, builds everything with warnings as errors, and runs every test that this machine can run.
#   tests/run.sh full    also compiles each header in a file of its own; then it runs the unit tests under the
#                        address and undefined behaviour sanitizers, those with threads under the thread sanitizer, and
#                        the fuzz targets for ten seconds each, looks for races in the CUDA kernels, builds the
#                        labs' solutions by three compilers, and asks whether tests notice known bugs in copies of the
#                        headers; on 2 cores that takes another two hours
set -eu
cd "$(dirname "$0")/.."

tests/install.sh g++ clang lld cmake ninja-build ccache pkg-config libeigen3-dev nlohmann-json3-dev catch2 libcli11-dev \
  zlib1g-dev libssl-dev libpng-dev libjpeg-dev python3-venv python3-dev libopenmpi-dev openmpi-bin libgloo-dev iproute2
# The browser that looks at chorus-page's pages. Ubuntu has no such package: there the test is skipped.
! apt-cache show chromium-headless-shell >/dev/null 2>&1 || tests/install.sh chromium-headless-shell
jobs=$(nproc)
# Tests wait for each other's ranks and for deadlines a quarter of their time: half as many again as there are cores.
export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}" CTEST_PARALLEL_LEVEL="$((jobs + (jobs + 1) / 2))"
started=$(date +%s)
say() { echo "== $(($(date +%s) - started)) s: $*"; }

say "optimized build"
cmake --preset dev
cmake --build --preset dev -j "$jobs"
if [ "${1:-}" = full ]; then cmake --build --preset dev -j "$jobs" --target each_header_alone; fi
say "tests"
ctest --preset dev
[ "${1:-}" = full ] || { say "everything passed (sanitizers: tests/run.sh full)"; exit 0; }

say "barriers of the CUDA kernels"
tests/cuda/barriers.py build/tests/unit_cuda_emulated
python3 -m venv build/races && build/races/bin/pip install --quiet --disable-pip-version-check sentryward==0.1.1 || true
PATH="$PWD/build/races/bin:$PATH" tests/cuda/races.py || [ $? = 77 ]

say "PyTorch and transformers"
status=0
tests/python/full.sh build || status=$?
[ "$status" = 0 ] || [ "$status" = 77 ] || exit "$status"

say "the Conan package"
status=0
tests/packaging/conan.sh build/conan || status=$?
[ "$status" = 0 ] || [ "$status" = 77 ] || exit "$status"

# sanitized NAME FLOORS: builds and runs the unit tests of these floors under the preset NAME.
sanitized() {
  preset=$1
  shift
  targets=
  for floor in "$@"; do
    targets="$targets unit_$floor"
  done
  say "$preset build"
  cmake --preset "$preset" -DCHORUS_BUILD_EXAMPLES=OFF >/dev/null
  cmake --build --preset "$preset" -j "$jobs" --target $targets programs
  say "$preset tests"
  ctest --preset "$preset" -R "^($(echo "$*" | tr ' ' '|'))\."
}
sanitized asan $(cd tests/unit && ls -d */ | tr -d /) cuda_emulated
sanitized tsan averaging checkpoint comm data ddp dp launch parallel tensor cuda_emulated

say "labs, by three compilers"
tests/labs_check_test.py . matrix

say "mutants"
tests/mutants/run.py --jobs "$jobs"

say "fuzz targets"
# Where clang's own package does not bring libFuzzer, as in Debian 12 and Ubuntu 24.04, this one does.
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' |
  clang++ -x c++ -fsanitize=fuzzer,address -o /dev/null - 2>/dev/null ||
  tests/install.sh "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev"
tests/fuzz/run.py

say "everything passed"
