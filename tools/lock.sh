#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes requirements/base.txt (to build and run Lily), requirements/dev.txt (to test it, too) and requirements/router.txt
# (several servers behind a router; the tests of that are left out without it) from pyproject.toml:
# versions and hashes for Linux and macOS and for every supported Python.  `sh tools/lock.sh --upgrade` takes the newest.
# Usage, from the root of the checkout: sh tools/lock.sh [option of `uv pip compile`]...   PYTHON chooses the interpreter.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet uv

"$work/venv/bin/python" - >"$work/build.in" <<'PYTHON'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
PYTHON

lock() {
    output=$1
    shift
    "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 \
        --generate-hashes --no-header --no-annotate --output-file "$output" "$@"
    {
        echo "# SPDX-License-Identifier: Apache-2.0"
        echo "# Written by tools/lock.sh from pyproject.toml; do not edit."
        cat "$output"
    } >"$work/headed"
    cat "$work/headed" >"$output"
}

lock requirements/dev.txt --extra dev pyproject.toml "$work/build.in" "$@"
lock requirements/base.txt --constraints requirements/dev.txt pyproject.toml "$work/build.in"
lock requirements/router.txt --constraints requirements/dev.txt --group pyproject.toml:router
