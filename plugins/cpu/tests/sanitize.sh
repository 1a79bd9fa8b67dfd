#!/bin/sh
# The plugin's tests with the native module built under AddressSanitizer and UndefinedBehaviorSanitizer:
#
#     plugins/cpu/tests/sanitize.sh BUILD_FOLDER [arguments of pytest]
#
# Needs g++, cmake, ninja, nanobind and an environment in which the tests run as they are. Leaks are not looked for, as the
# interpreter keeps what it has.
set -eu
build=${1:?where to build}
shift
plugin=$(cd "$(dirname "$0")/.." && pwd)
cmake -G Ninja -S "$plugin" -B "$build" -DOCTAVO_SANITIZE=ON -DPython_EXECUTABLE="$(command -v python)"
cmake --build "$build"
site="$build/site/octavo_cpu"
mkdir -p "$site"
cp "$plugin"/src/octavo_cpu/*.py "$build"/_native*.so "$site"
[ $# -gt 0 ] || set -- "$plugin/tests"
export PYTHONPATH="$build/site${PYTHONPATH:+:$PYTHONPATH}"
export LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
exec python -m pytest -x -q "$@"
