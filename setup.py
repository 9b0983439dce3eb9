# SPDX-License-Identifier: Apache-2.0
"""Builds what pyproject.toml cannot say: device libraries, Cython modules, and the shaders inside the wheel.

``python setup.py build_ext --inplace`` (``make build``) recompiles only what is older than its sources.
Device libraries are plain C that ctypes loads, not Python extensions; nothing in them depends on the CPU that builds
them: every file for one instruction set is compiled with that set's flags and chosen when the library runs.

Not handled: Windows; several architectures in one macOS library.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

CODE_FLAGS = ["-O3", "-std=c11", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
C_FLAGS = [*CODE_FLAGS, "-Wall", "-Wextra", "-Werror=implicit-function-declaration"]

# lily/cpu/paths/isa_NAME*.c: the machines it is compiled for and its extra flags; the longest matching prefix counts.
X86 = ("x86_64", "amd64")
ARM = ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ISA_FLAGS = {
    "isa_portable": (X86 + ARM, []),
    "isa_avx2": (X86, AVX2),
    "isa_avx512": (X86, AVX512),
    "isa_avx512bf16": (X86, [*AVX512, "-mavx512bf16"]),
    "isa_amx": (X86, [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]),
    "isa_neon": (ARM, []),
}

# The oldest macOS that has Metal 3.2's coherent device memory, on which the Metal device relies.
MACOS_FLOOR = "15.0"
METAL_FLAGS = ("-std=gnu11", "-fblocks", "-fno-objc-arc")
METAL_LINK_FLAGS = (
    "-framework", "Metal", "-framework", "Foundation", "-framework", "CoreFoundation", "-lobjc",
    # Nothing calls it, but Metal has no default GPU in a command-line program without it.
    "-Wl,-needed_framework,CoreGraphics",
)  # fmt: skip

# What the device libraries are made of besides their own folders.
DEVICE_COMMON = [ROOT / "objc_shim" / f"device_{name}.c" for name in ("common", "unified")]

# Headers that the build writes itself; ``make clean`` removes them with everything else in build/.
GENERATED = ROOT / "build" / "include"

# The folder of the checkout that the package reads at run time, as lily/data/shaders.
SHADERS = ROOT / "shaders"
SHADER_PATTERNS = ("*.metal", "*.h")

# A free-threaded Python has no limited API; its wheel is then for that one version.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def library_sources(folder: Path) -> list[Path]:
    """C and Objective-C sources of the device library whose own files are under ``folder``."""
    return sorted({*folder.rglob("*.[cm]"), *DEVICE_COMMON})


def machine_sources(folder: Path, machine: str) -> list[tuple[Path, list[str]]]:
    """C and Objective-C sources under ``folder`` for a library on ``machine``, each with its own flags."""
    chosen = []
    for source in library_sources(folder):
        if not source.name.startswith("isa_"):
            chosen.append((source, []))
            continue
        prefix = max((name for name in ISA_FLAGS if source.name.startswith(name)), key=len, default=None)
        if prefix is None:
            sys.exit(f"setup.py: {source.name} is for no known instruction set; add its prefix to ISA_FLAGS.")
        machines, flags = ISA_FLAGS[prefix]
        if machine.lower() in machines:
            chosen.append((source, flags))
    return chosen


def find_compiler() -> list[str]:
    """$CC, or the first C compiler on the path."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    fix = "xcode-select --install" if sys.platform == "darwin" else "apt-get install gcc libc6-dev"
    sys.exit(f"setup.py: no C compiler found (cc, gcc, clang, $CC); install one: {fix}")


def generated_headers() -> Path:
    """The folder with kernel_params.h, the C side of the kernel table, which is up to date afterwards.

    An unchanged file keeps its time, so that nothing is recompiled.
    """
    spec = importlib.util.spec_from_file_location("_lily_kernels", ROOT / "lily" / "kernels.py")
    kernels = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = kernels
    spec.loader.exec_module(kernels)
    target, text = GENERATED / "kernel_params.h", kernels.c_header()
    if not target.exists() or target.read_text() != text:
        GENERATED.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        partial.write_text(text)
        partial.replace(target)
    return GENERATED


@dataclass
class Toolchain:
    """A C compiler and the machine and system that its output is for."""

    command: list[str]
    machine: str = platform.machine()
    system: str = platform.system()
    flags: tuple[str, ...] = ()

    @property
    def library_suffix(self) -> str:
        return ".dylib" if self.system == "Darwin" else ".so"

    def compile(self, source: Path, flags: list[str], target: Path, newest_header: float) -> None:
        command = [*self.command, *C_FLAGS, *self._system_flags(), *flags, *self.flags]
        command += ["-I", str(ROOT / "objc_shim"), "-I", str(GENERATED), "-c", str(source)]
        self._run(command, target, max(source.stat().st_mtime, newest_header))

    def link(self, objects: list[Path], target: Path, libraries: tuple[str, ...] = ()) -> None:
        if self.system == "Darwin":
            how = ["-dynamiclib", f"-Wl,-install_name,@rpath/{target.name}"]
        else:
            # All device libraries export the same names; each must call its own.
            how = ["-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic"]
        command = [*self.command, *self._system_flags(), *self.flags, *how, *map(str, objects), "-pthread", "-lm"]
        command += libraries
        self._run(command, target, max(path.stat().st_mtime for path in objects))

    def _system_flags(self) -> list[str]:
        # Cross compilers name the system in their target instead.
        native = self.system == "Darwin" and sys.platform == "darwin"
        return [f"-mmacosx-version-min={MACOS_FLOOR}"] if native else []

    def _run(self, command: list[str], target: Path, newest_input: float) -> None:
        """Runs unless ``target`` is newer than its inputs and came from the same command; replace it in one step."""
        record = target.with_name(target.name + ".cmd")
        line = shlex.join(command)
        current = target.exists() and target.stat().st_mtime > newest_input
        if current and record.exists() and record.read_text() == line:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        if subprocess.run([*command, "-o", str(partial)]).returncode:
            without = " LILY_BUILD_METAL=0 builds Lily without Metal." if "metal" in target.name else ""
            sys.exit(f"setup.py: {command[0]} failed on {target.name}; the compiler's messages are above.{without}")
        partial.replace(target)
        record.write_text(line)


class DeviceLibrary(Extension):
    """A shared library that implements objc_shim/lily_device.h: the files under one folder, and DEVICE_COMMON."""

    def __init__(self, name: str, folder: str, flags: tuple[str, ...] = (), link_flags: tuple[str, ...] = ()) -> None:
        super().__init__(name, [path.relative_to(ROOT).as_posix() for path in library_sources(ROOT / folder)])
        self.folder, self.flags, self.link_flags = ROOT / folder, flags, link_flags

    def build(self, toolchain: Toolchain, work: Path) -> Path:
        """Compiles and link in ``work``, where a later build finds what is still current; returns the library."""
        folders = (self.folder, ROOT / "objc_shim", generated_headers())
        headers = [path for folder in folders for path in folder.rglob("*.h")]
        newest_header = max(path.stat().st_mtime for path in headers)
        sources = machine_sources(self.folder, toolchain.machine)
        outputs = [work / f"{source.stem}.o" for source, _ in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(toolchain.compile, source, [*self.flags, *own], output, newest_header)
                for (source, own), output in zip(sources, outputs, strict=True)
            ]
        for job in jobs:
            job.result()
        library = work / (self.name.rpartition(".")[2] + toolchain.library_suffix)
        toolchain.link(outputs, library, self.link_flags)
        return library


def device_libraries(system: str = platform.system()) -> list[DeviceLibrary]:
    libraries = [DeviceLibrary("lily.cpu.liblily_cpu", "lily/cpu")]
    if system == "Darwin":
        libraries.append(DeviceLibrary("lily.metal.liblily_metal", "objc_shim", METAL_FLAGS, METAL_LINK_FLAGS))
    return libraries


def default_libraries() -> list[DeviceLibrary]:
    """What a build on this machine makes; LILY_BUILD_METAL=0 leaves the Metal library out."""
    left_out = os.environ.get("LILY_BUILD_METAL") == "0"
    return [library for library in device_libraries() if not (left_out and "metal" in library.name)]


def cython_modules() -> list[Extension]:
    """Every _NAME.pyx of the package, as the module that its place in the package says."""
    macros = [("Py_LIMITED_API", "0x030b0000"), ("CYTHON_LIMITED_API", "1")] if LIMITED_API else []
    sources = [path.relative_to(ROOT) for path in sorted((ROOT / "lily").rglob("_*.pyx"))]
    return [
        Extension(
            ".".join(source.with_suffix("").parts),
            [source.as_posix()],
            include_dirs=["objc_shim", GENERATED.relative_to(ROOT).as_posix()],
            define_macros=macros,
            extra_compile_args=["-O2", "-g0", "-Wno-unused-const-variable"],
            py_limited_api=LIMITED_API,
        )
        for source in sources
    ]


class BuildExt(build_ext):
    """Compiles device libraries and Cython modules, beside the sources or into the wheel's tree."""

    def run(self) -> None:
        # Python may remember a compiler that this machine does not have.
        os.environ.setdefault("CC", shlex.join(find_compiler()))
        if self.inplace or self.editable_mode:
            link_shaders()
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        if isinstance(self.ext_map.get(fullname), DeviceLibrary):
            return os.path.join(*fullname.split(".")) + Toolchain([]).library_suffix
        return super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        if isinstance(ext, DeviceLibrary):
            library = ext.build(Toolchain(find_compiler()), Path(self.build_temp, ext.name))
            target = Path(self.get_ext_fullpath(ext.name))
            self.mkpath(str(target.parent))
            self.copy_file(str(library), str(target))
            return
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            fix = f"apt-get install python{sysconfig.get_python_version()}-dev"
            sys.exit(f"setup.py: Python.h of {sys.executable} is missing; install it: {fix}")
        from Cython.Build import cythonize

        translated = cythonize([ext], build_dir="build/cython", language_level=3, quiet=True)
        ext.sources = translated[0].sources
        # Not known to the sdist, which would take the generated header along.
        ext.depends = [str(ROOT / "objc_shim" / "lily_device.h"), str(generated_headers() / "kernel_params.h")]
        super().build_extension(ext)


class BuildPy(build_py):
    """Adds the shaders to a wheel; a checkout has a link to them instead."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._shaders():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copies = [] if self.editable_mode else [str(target) for _, target in self._shaders()]
        return super().get_outputs(include_bytecode) + copies

    def _shaders(self) -> list[tuple[Path, Path]]:
        data = Path(self.build_lib, "lily", "data")
        sources = [source for pattern in SHADER_PATTERNS for source in sorted(SHADERS.rglob(pattern))]
        return [(source, data / source.relative_to(ROOT)) for source in sources]


def link_shaders() -> None:
    data = ROOT / "lily" / "data"
    data.mkdir(exist_ok=True)
    if not (data / SHADERS.name).is_symlink():
        (data / SHADERS.name).symlink_to(Path("..", "..", SHADERS.name))


def wheel_options() -> dict[str, str]:
    options = {"py_limited_api": "cp311"} if LIMITED_API else {}
    if sys.platform == "darwin":
        # The device libraries are for one architecture even where Python itself holds two.
        options["plat_name"] = f"macosx_{MACOS_FLOOR.replace('.', '_')}_{platform.machine()}"
    return options


if __name__ == "__main__":
    setup(
        ext_modules=[*default_libraries(), *cython_modules()],
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
        options={"bdist_wheel": wheel_options()},
    )
