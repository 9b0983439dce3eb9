# SPDX-License-Identifier: Apache-2.0
"""Compiles the shaders ahead of time with Xcode's compiler: ``make metallib``, into lily/metal/.

It spares the Metal device the compilation of its source when it opens; nothing else changes.  Not handled: Macs without
Xcode, which do without; GPU code, which the device's cache of pipelines keeps.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lily.device.shader_library import FOLDER, STAMP, VARIANTS, Variant, stamp
from lily.msl.flatten import flatten

XCRUN = ("xcrun", "-sdk", "macosx", "metal")
NOT_NEEDED = "it is not needed: Lily compiles its shaders when it opens the GPU"


def missing() -> str | None:
    """What this machine lacks; None if it can compile shaders."""
    if not shutil.which(XCRUN[0]):
        return "xcrun is missing, which comes with Xcode on a Mac"
    said = subprocess.run([*XCRUN, "--version"], capture_output=True, text=True)
    if said.returncode == 0:
        return None
    if "MetalToolchain" in said.stderr:
        return "Xcode lacks its Metal toolchain (xcodebuild -downloadComponent MetalToolchain)"
    return "Xcode's Metal compiler is missing; the command-line tools alone do not have it"


def compile_variant(variant: Variant, source: Path, target: Path) -> str:
    """Writes ``target``; returns the compiler's words if it refuses."""
    said = subprocess.run([*XCRUN, *variant.flags, str(source), "-o", str(target)], capture_output=True, text=True)
    return "" if said.returncode == 0 else said.stderr.strip() or f"exit code {said.returncode}"


def clear(folder: Path) -> None:
    """Old libraries go first, the stamp before them: what is left halfway is not used."""
    (folder / STAMP).unlink(missing_ok=True)
    for old in folder.glob("*.metallib"):
        old.unlink()


def main(folder: Path = FOLDER) -> int:
    """Makes all libraries; the exit code."""
    lacking = missing()
    if lacking:
        print(f"make metallib: {lacking}; {NOT_NEEDED}.", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    text = flatten()
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "lily.metal")
        source.write_text(text, encoding="utf-8")
        for variant in VARIANTS:
            target = folder / f"{variant.name}.metallib"
            words = compile_variant(variant, source, target)
            if not words:
                print(target)
                continue
            target.unlink(missing_ok=True)
            if variant.language.startswith("3."):
                print(f"make metallib: {variant.name} does not compile; {NOT_NEEDED}.\n{words}", file=sys.stderr)
                return 1
            print(f"make metallib: no {variant.name}, this compiler refuses MSL {variant.language}: {words[:300]}")
    (folder / STAMP).write_text(stamp(text) + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(a).resolve() for a in sys.argv[1:2])))
