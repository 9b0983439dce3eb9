# SPDX-License-Identifier: Apache-2.0
"""The distribution: what the sdist and the wheel hold, and that the installed wheel needs nothing else.

The wheel is built from the sdist, installed into an empty virtual environment, and run without network, compiler and
checkout.  Dependencies are copied from the environment that runs the tests, so nothing is downloaded.
Not handled: compiling for other machines (test_cross_compile.py).
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from needs import UNSHARE
from package_contents import cython_modules, sdist_files, wheel_files
from packaging.requirements import Requirement

import lily

RUNTIME_DEPENDENCIES = {"click", "jinja2", "numpy", "safetensors", "tokenizers"}
MAXIMUM_WHEEL_BYTES = 35_000_000
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIBRARY_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
GENERATE = ["generate", "--prompt", "Once upon a time", "--seed", "1", "--max-tokens", "12", "--show-reasoning"]


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path

    def wheel_names(self) -> set[str]:
        return set(zipfile.ZipFile(self.wheel).namelist())

    def wheel_metadata(self, file: str = "METADATA") -> email.message.Message:
        (name,) = (name for name in self.wheel_names() if name.endswith(f".dist-info/{file}"))
        return email.message_from_bytes(zipfile.ZipFile(self.wheel).read(name))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Distributions:
    output = tmp_path_factory.mktemp("dist")
    # The build tool unpacks the sdist elsewhere and builds the wheel from that copy.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(repository)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    return Distributions(sdist, wheel)


def dependency_closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that an installation with these requirements has, itself excluded."""
    pending = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            for text in metadata.requires(requirement.name) or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)
    return {name for name, _ in seen}


def copy_distribution(name: str, site_packages: Path) -> None:
    for file in metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site_packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, distributions: Distributions) -> Path:
    """The ``bin`` folder of a virtual environment that holds the wheel, its run-time dependencies and nothing else."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    site_packages = Path(subprocess.check_output(where, text=True).strip())
    declared = distributions.wheel_metadata().get_all("Requires-Dist")
    needed = [text for text in declared if "extra ==" not in text]
    for name in sorted(dependency_closure(needed)):
        copy_distribution(name, site_packages)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(distributions.wheel)], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return venv / "bin"


def run_installed(bin_folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(bin_folder), "HOME": str(bin_folder.parent), "LANG": "C.UTF-8"}
    return subprocess.run(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture(scope="module")
def isolation(repository: Path) -> list[str]:
    """A command prefix: its command sees no network and, in the checkout's place, an empty folder."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip(UNSHARE)
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    hide = f'{shutil.which("mount")} -t tmpfs none "$1" && shift && exec "$@"'
    prefix = [unshare, *user, "--net", "--mount", "/bin/sh", "-c", hide, "sh", str(repository)]
    tried = subprocess.run([*prefix, "/bin/ls", "-A", str(repository)], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(UNSHARE)
    assert tried.stdout == "", "the checkout is still visible"
    interfaces = subprocess.check_output([*prefix, "/bin/cat", "/proc/net/dev"], text=True).splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"], "the network is still there"
    return prefix


def test_installed_command_runs_from_the_root_folder(installed: Path) -> None:
    done = run_installed(installed, [str(installed / "lily"), "--version"])
    assert done.returncode == 0, done.stderr
    assert lily.__version__ in done.stdout
    assert shutil.which("cc", path=str(installed)) is None


def test_installed_package_names_model_and_device_without_network_and_checkout(
    installed: Path, isolation: list[str]
) -> None:
    done = run_installed(installed, [*isolation, str(installed / "lily"), "info"])
    assert done.returncode == 0, done.stderr
    assert "lily-tiny" in done.stdout
    assert re.search(r"\bcpu\b", done.stdout)


def test_installed_package_writes_the_checkouts_text_without_network_and_checkout(
    installed: Path, isolation: list[str], repository: Path
) -> None:
    here = [sys.executable, "-m", "lily", *GENERATE]
    expected = subprocess.run(here, cwd=repository, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert expected.returncode == 0, expected.stderr
    done = run_installed(installed, [*isolation, str(installed / "lily"), *GENERATE])
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.stdout
    assert len(done.stdout.split()) >= 5


def test_every_cython_module_has_a_stub(repository: Path) -> None:
    modules = cython_modules(repository)
    assert [module for module in modules if not (repository / f"{module}.pyi").exists()] == []


def test_the_wheel_holds_what_the_tree_says_and_nothing_else(distributions: Distributions, repository: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if FREE_THREADED else ".abi3.so"
    libraries = {f"lily/cpu/liblily_cpu{LIBRARY_SUFFIX}"}
    if sys.platform == "darwin":
        libraries.add(f"lily/metal/liblily_metal{LIBRARY_SUFFIX}")
    names = distributions.wheel_names()
    assert names == wheel_files(repository, suffix, libraries, f"lily_engine-{lily.__version__}.dist-info")


def test_wheel_is_small_enough_to_publish(distributions: Distributions) -> None:
    assert distributions.wheel.stat().st_size <= MAXIMUM_WHEEL_BYTES


@pytest.mark.skipif(FREE_THREADED, reason="free-threaded Python has no abi3")
def test_one_wheel_serves_every_supported_python(distributions: Distributions) -> None:
    assert "-cp311-abi3-" in distributions.wheel.name
    shared = {name for name in distributions.wheel_names() if name.endswith(".so") and "/cpu/" not in name}
    assert shared
    assert all(name.endswith(".abi3.so") for name in shared)


def test_metadata_states_name_version_licence_and_dependencies(distributions: Distributions) -> None:
    found = distributions.wheel_metadata()
    assert (found["Name"], found["Version"]) == ("lily-engine", lily.__version__)
    assert found["License-Expression"] == "Apache-2.0"
    assert set(found.get_all("License-File")) == {"LICENSE", "NOTICE"}
    assert found["Requires-Python"] == ">=3.11"
    requirements = [Requirement(text) for text in found.get_all("Requires-Dist")]
    assert {needed.name for needed in requirements if needed.marker is None} == RUNTIME_DEPENDENCIES
    assert set(found.get_all("Provides-Extra")) == {"hub", "json", "serve", "dev"}


def test_the_sdist_holds_every_source_and_nothing_built(distributions: Distributions, repository: Path) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert sdist_files(repository) - names == set()
    metadata = re.compile(r"PKG-INFO|setup\.cfg|lily_engine\.egg-info/.*")
    assert [name for name in names - sdist_files(repository) if not metadata.fullmatch(name)] == []


def test_every_source_file_names_its_licence(repository: Path) -> None:
    folders = ("lily", "objc_shim", "shaders", "tests", "bench", "docs", "tools")
    source = re.compile(r".*\.(py|pyi|pyx|pxd|c|h|m|metal|sh)")
    files = [path for folder in folders for path in (repository / folder).rglob("*") if source.fullmatch(path.name)]
    assert len(files) > 20
    unmarked = [
        str(path.relative_to(repository))
        for path in [*files, repository / "setup.py", repository / "pyproject.toml", repository / "Makefile"]
        if path.name != "kernel_params.h" and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert not unmarked
