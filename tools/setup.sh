#!/bin/sh
# Make .venv in the current folder and install bonsai and the named extras into it.
#
#     sh tools/setup.sh [EXTRA]        EXTRA: none, test (with MLX where there is one), oracles
#                                      or check
#
# Needs Python 3.10 or newer with venv and its C headers, and a C++ compiler; says which of them is
# missing and how to get it. CMake and Ninja come from Python packages where they are not installed.
# PYTHON chooses the interpreter, CXX the compiler.

set -u
extra=${1:-none}
python=${PYTHON:-python3}
log=.venv/setup.log

fail() {
    printf 'error: %s\n' "$1" >&2
    printf 'hint:  %s\n' "$2" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

have "$python" || fail "no Python: '$python' is not on PATH" \
    "install Python 3.10 or newer (Debian, Ubuntu: apt install python3; macOS: xcode-select --install), or set PYTHON"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version 2>&1) is too old, bonsai needs 3.10 or newer" \
        "install a newer Python and run: make PYTHON=python3.12"

"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$python cannot make virtual environments: its venv or ensurepip module is missing" \
        "Debian, Ubuntu: apt install python3-venv; elsewhere install Python from python.org"

"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "the C headers of $python are missing (Python.h)" \
        "Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel"

compiler=${CXX:-}
if [ -n "$compiler" ]; then
    have "${compiler%% *}" || fail "the C++ compiler '$compiler' (CXX) is not on PATH" \
        "unset CXX, or set it to a compiler that is installed"
else
    for name in c++ g++ clang++; do
        if have "$name"; then
            compiler=$name
            break
        fi
    done
    [ -n "$compiler" ] || fail "no C++ compiler: none of c++, g++, clang++ is on PATH" \
        "Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install"
fi

if ! [ -x .venv/bin/python ]; then
    rm -rf .venv
    "$python" -m venv .venv || {
        rm -rf .venv
        fail "$python could not make the environment .venv" "see the lines above"
    }
fi

install() { .venv/bin/python -m pip install --disable-pip-version-check --editable "$1" >"$log" 2>&1; }

target=.
[ "$extra" = none ] || target=".[$extra]"
echo "installing bonsai into .venv ($("$python" --version 2>&1), $compiler); log: $log"
if [ "$extra" = test ] && install ".[test,mlx]"; then
    : # MLX is not to be had everywhere; without it the tests of its backend are skipped
elif ! install "$target"; then
    echo "the last lines of $log:" >&2
    tail -n 30 "$log" >&2
    fail "bonsai could not be built or installed" "the reason is in the lines above, and in $log"
fi
.venv/bin/python -m bonsai --version || fail "bonsai was installed but does not start" "see $log"
