#!/bin/sh
# conan.sh FOLDER: makes the Conan package in an empty home below FOLDER, with the system's Eigen and nlohmann/json, and
# builds and runs a program with it. Ends with 77 where Conan can't be installed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'conan>=2,<3' || exit 77
export CONAN_HOME="$folder/home"
rm -rf "$CONAN_HOME"
"$folder/venv/bin/conan" profile detect >/dev/null
cat >>"$CONAN_HOME/profiles/default" <<'PROFILE'
[platform_requires]
eigen/3.4.0
nlohmann_json/3.11.2
PROFILE
rm -rf "$folder/test_package"
cp -r "$here/conan/test_package" "$folder"  # it is built where it lies
"$folder/venv/bin/conan" create "$here/conan" --test-folder "$folder/test_package" --no-remote -s compiler.cppstd=20 -s build_type=Release
