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
from packaging.requirements import Requirement

import lily

RUNTIME_DEPENDENCIES = {"click", "jinja2", "numpy", "tokenizers"}
MAXIMUM_WHEEL_BYTES = 35_000_000
LIBRARY_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
GENERATE = ["generate", "--prompt", "Once upon a time", "--seed", "1", "--max-tokens", "12"]


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
    """The `bin` folder of a virtual environment that holds the wheel, its run-time dependencies and nothing else."""
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
        pytest.skip("no unshare command on this system: cannot take the network away")
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    hide = f'{shutil.which("mount")} -t tmpfs none "$1" && shift && exec "$@"'
    prefix = [unshare, *user, "--net", "--mount", "/bin/sh", "-c", hide, "sh", str(repository)]
    tried = subprocess.run([*prefix, "/bin/ls", "-A", str(repository)], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"unshare is not permitted here: {tried.stderr.strip()}")
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


def test_wheel_holds_every_module_and_every_file_used_at_run_time(
    distributions: Distributions, repository: Path
) -> None:
    package = repository / "lily"
    expected = {path.relative_to(repository).as_posix() for path in package.rglob("*.py")}
    for folder in ("models/lily-tiny", "msl/include"):
        expected |= {f"lily/{folder}/{path.name}" for path in (package / folder).iterdir()}
    expected |= {f"lily/data/shaders/{path.name}" for path in (repository / "shaders").glob("*.metal")}
    expected |= {"lily/py.typed", "lily/data/objc_shim/lily_device.h", f"lily/cpu/liblily_cpu{LIBRARY_SUFFIX}"}
    cython = [path.relative_to(repository).with_suffix("").as_posix() for path in package.rglob("*.pyx")]
    assert cython, "no Cython module found"
    expected |= {f"{name}.pyi" for name in cython}
    names = distributions.wheel_names()
    assert not expected - names
    for name in cython:
        assert any(re.fullmatch(rf"{name}\.[\w.-]*so", other) for other in names), f"{name} is not compiled"


def test_wheel_holds_neither_tests_nor_sources_of_compiled_code(distributions: Distributions) -> None:
    names = distributions.wheel_names()
    strange = {name for name in names if not re.match(r"lily/|lily_engine-[^/]+\.dist-info/", name)}
    strange |= {name for name in names if re.search(r"(^|/)(tests?|bench|docs)/|\.(c|m|o|pyx|pxd|cmd|pyc|part)$", name)}
    # Headers belong to what is compiled at run time only.
    used = ("lily/data/", "lily/msl/include/")
    strange |= {name for name in names if name.endswith(".h") and not name.startswith(used)}
    assert not strange


def test_wheel_is_small_enough_to_publish(distributions: Distributions) -> None:
    assert distributions.wheel.stat().st_size <= MAXIMUM_WHEEL_BYTES


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="free-threaded Python has no abi3")
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
    assert {"hub", "serve"} <= set(found.get_all("Provides-Extra"))


def test_sdist_holds_sources_only(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", "objc_shim/lily_device.h"} <= set(names)
    assert not [name for name in names if re.search(r"\.(so|dylib|o|pyc)$|^(tests|build|dist)/|^lily/data/", name)]
    assert not [name for name in names if name.endswith("kernel_params.h")]


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
