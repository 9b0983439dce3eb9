#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates a virtual environment and installs a lock file into it.  All that the machine lacks is named in one line, with
# one command that fixes it.  Usage, from the root of the checkout: sh tools/setup.sh VENV LOCK [PYTHON]
# PYTHON: the interpreter; without it the newest of python3.14 ... python3.11 and python3 that runs.
set -eu

venv=$1
lock=$2
python=${3:-}
problems= apt= other= mac= # what is missing, and what brings it: Debian's packages, others', commands on a Mac

# lacks PROBLEM APT-PACKAGES OTHER-PACKAGES COMMAND-ON-A-MAC
lacks() {
    problems="${problems:+$problems; }$1"
    apt="$apt $2"
    other="$other $3"
    case "$mac" in *"$4"*) ;; *) mac="${mac:+$mac, then }$4" ;; esac
}

# Ends with one line if anything is missing.
give_up_if_incomplete() {
    [ -n "$problems" ] || return 0
    if [ "$(uname)" = Darwin ]; then
        echo "lily: $problems; fix: $mac" >&2
    elif command -v apt-get >/dev/null; then
        echo "lily: $problems; fix: sudo apt-get install$apt" >&2
    elif command -v dnf >/dev/null; then
        echo "lily: $problems; fix: sudo dnf install$other" >&2
    else
        echo "lily: $problems; fix: install$other with your package manager" >&2
    fi
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

check_python() {
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" = 1 ] &&
        [ "$("$python" -c 'import platform; print(platform.machine())')" != arm64 ]; then
        lacks "$python runs as Intel code, under Rosetta" "" "" \
            "a terminal that is not under Rosetta, or make PYTHON=... with a Python for Apple silicon"
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || lacks "the venv module of $python is missing" \
        "python$version-venv" "python$version" "brew install python@$version"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || lacks "Python.h of $python is missing" \
        "python$version-dev" "python$version-devel" "brew install python@$version"
}

check_compiler() {
    compiler=${CC:-}
    for name in cc gcc clang; do
        [ -n "$compiler" ] || ! command -v "$name" >/dev/null || compiler=$name
    done
    if [ -z "$compiler" ]; then
        lacks "no C compiler found (cc, gcc, clang, \$CC)" "gcc libc6-dev" gcc "xcode-select --install"
        return
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo '#include <stdio.h>
int main(void) { return puts("") < 0; }' >"$work/a.c"
    # shellcheck disable=SC2086 # CC may hold options
    $compiler -o "$work/a" "$work/a.c" 2>/dev/null || lacks "$compiler compiles no program" "gcc libc6-dev" gcc \
        "xcode-select --install, and with Xcode: sudo xcodebuild -license accept"
}

if [ "$(uname)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1; then
    lacks "Apple's command-line tools are missing" "" "" "xcode-select --install"
    give_up_if_incomplete # without them every other program is a stub that asks for them
fi

if [ -n "$python" ]; then
    new_enough "$python" || {
        lacks "PYTHON=$python is not a working Python 3.11 or newer" "python3 python3-venv python3-dev" python3 \
            "brew install python3"
        python=
    }
else
    # A name on the path may be a shim of a version manager that does not run.
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        if new_enough "$name"; then
            python=$name
            break
        fi
    done
    [ -n "$python" ] || lacks "no Python 3.11 or newer found" "python3 python3-venv python3-dev" \
        "python3 python3-devel" "brew install python3"
fi
[ -z "$python" ] || check_python
check_compiler
give_up_if_incomplete

have=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ "$have" != "$version" ]; then
    echo "lily: creating $venv with Python $version"
    "$python" -m venv --clear "$venv"
fi
echo "lily: installing $lock"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock" || {
    echo "lily: pip could not install $lock (its messages are above); is there a network? fix: make setup" >&2
    exit 1
}
