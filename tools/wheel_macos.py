# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel for macOS on Apple silicon on any machine: ``make wheel-macos``.

Everything is as in setup.py, but the compiler is zig's clang, and what stands for Apple's SDK is made from metal-cpp
and from the few symbols that the shim links (tests/metal/).  Python's headers are those of the running Python; the
modules use its limited API.  Not handled: Macs themselves (``make wheel``), Intel, a precompiled metallib.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel-macos"
PLATFORM = "macosx_15_0_arm64"

# What Python's headers ask of a system with 64-bit pointers, in place of the pyconfig.h of the machine that builds.
PYCONFIG = "".join(
    f"#define {name} {value}\n"
    for name, value in {
        "SIZEOF_VOID_P": 8, "SIZEOF_SIZE_T": 8, "SIZEOF_LONG": 8, "SIZEOF_INT": 4, "SIZEOF_WCHAR_T": 4,
        "SIZEOF_PID_T": 4, "ALIGNOF_MAX_ALIGN_T": 8, "HAVE_STDARG_PROTOTYPES": 1, "HAVE_PROTOTYPES": 1,
        "WITH_THREAD": 1,
    }.items()
)  # fmt: skip


def load(path: Path, name: str) -> ModuleType:
    """A module by its path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def python_headers() -> Path:
    """Python's headers with a pyconfig.h for macOS."""
    target = WORK / "python"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(sysconfig.get_path("include"), target)
    (target / "pyconfig.h").write_text(PYCONFIG)
    return target


def run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        sys.exit(f"wheel_macos.py: {' '.join(command[:4])} … failed; its messages are above.")


def build_ext_for(rules: ModuleType, sdk: ModuleType) -> type:
    """setup.py's build_ext with another compiler."""
    stubs = ("-isystem", str(sdk.headers()), "-isystem", str(sdk.HERE / "sdk"))
    stubs += ("-F", str(sdk.HERE / "sdk" / "frameworks"), "-L", str(sdk.HERE / "sdk" / "lib"))
    flags = ("-target", sdk.TARGET, "-g0", "-Wl,-S", "-Wno-unused-command-line-argument", *stubs)
    toolchain = rules.Toolchain(sdk.zig(), machine="arm64", system="Darwin", flags=flags)
    headers = python_headers()

    class CrossBuildExt(rules.BuildExt):
        def get_ext_filename(self, fullname: str) -> str:
            base = os.path.join(*fullname.split("."))
            return base + (".dylib" if isinstance(self.ext_map.get(fullname), rules.DeviceLibrary) else ".abi3.so")

        def build_extension(self, ext: Extension) -> None:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(ext, rules.DeviceLibrary):
                shutil.copyfile(ext.build(toolchain, WORK / ext.name), target)
            else:
                self._build_module(ext, target)

        def _build_module(self, ext: Extension, target: Path) -> None:
            code = WORK / f"{ext.name}.c"
            run([sys.executable, "-m", "cython", "-3", ext.sources[0], "-o", str(code)])
            command = [*sdk.zig(), "-target", sdk.TARGET, *ext.extra_compile_args, "-fPIC", "-shared"]
            command += [f"-D{name}={value}" for name, value in ext.define_macros]
            rules.generated_headers()
            command += ["-I", str(headers), *(f"-I{folder}" for folder in ext.include_dirs), str(code)]
            command += ["-Wl,-undefined,dynamic_lookup", f"-Wl,-install_name,@rpath/{target.name}"]
            run([*command, "-o", str(target)])

    return CrossBuildExt


def main(target: Path = ROOT / "dist") -> None:
    """Writes the wheel into ``target``."""
    os.chdir(ROOT)
    rules = load(ROOT / "setup.py", "lily_setup")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    sdk = load(ROOT / "tests" / "metal" / "toolchain.py", "lily_macos_sdk")
    shutil.rmtree(WORK / "lib", ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        build_ext = build_ext_for(rules, sdk)
    except sdk.Missing as problem:
        sys.exit(f"wheel_macos.py: {problem}")
    build = ["build", "--build-base", str(WORK), "--build-lib", str(WORK / "lib")]
    wheel = ["bdist_wheel", "--plat-name", PLATFORM, "--bdist-dir", str(WORK / "wheel"), "--dist-dir", str(target)]
    warnings.simplefilter("ignore")  # setuptools prefers to be called by a build tool, which cannot cross-compile
    setup(
        script_name="setup.py",
        script_args=["--quiet", *build, *wheel],
        ext_modules=[*rules.device_libraries("Darwin"), *rules.cython_modules()],
        cmdclass={"build_ext": build_ext, "build_py": rules.BuildPy},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
    for name in sorted(p.name for p in target.glob(f"*{PLATFORM}.whl")):
        print(f"dist/{name}" if target == ROOT / "dist" else target / name)


if __name__ == "__main__":
    main(*(Path(a).resolve() for a in sys.argv[1:2]))
