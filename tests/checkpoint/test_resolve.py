# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from: embedded, a folder, the Hugging Face cache; and what is said when it is not there."""

from __future__ import annotations

import json
import pwd
import socket
from pathlib import Path

import pytest
from checkpoints import INDEX
from paths import DATA

from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.resolve import hub_cache, parse_hub_model, resolve_model
from lily.cli import run
from lily.errors import CheckpointError

COMMIT = "38740b847e4cb78f352aba30aa41c76e08e6eb46"
OTHER = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache and current folder, and no network."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def no_network(*_: object) -> None:
        raise AssertionError("resolve_model opened a socket")

    monkeypatch.setattr(socket, "socket", no_network)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the table of users."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("spec", ["org/name", "~/model"])
def test_a_user_without_a_home_is_told_what_to_set(spec: str) -> None:
    with pytest.raises(CheckpointError, match="has no home folder; set HOME, or set HF_HOME or HF_HUB_CACHE"):
        resolve_model(spec)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_may_name_the_cache(cache: Path) -> None:
    assert resolve_model(str(cache.parent)).path == cache.parent
    assert resolve_model(None).embedded
    add_snapshot(cache)
    assert resolve_model("org/Model-1.5").revision == COMMIT


@pytest.mark.usefixtures("homeless")
def test_info_goes_on_for_a_user_without_a_home(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["hub_cache"], report["model"]["name"]) == (None, "lily-tiny")
    assert run(["info", "--device", "cpu", "-m", "org/name"]) == 1
    out, err = capsys.readouterr()
    assert "models are looked up in no folder: set HF_HOME or HF_HUB_CACHE" in out
    assert "this user has no home folder" in err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_snapshot(cache: Path, repo: str = "org/Model-1.5", commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Laid out as huggingface_hub does: links from the snapshot into blobs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for number, name in enumerate((*FILES, INDEX)):
        weight_map = {f"tensor{i}": shard for i, shard in enumerate(FILES[2:])}
        content = json.dumps({"weight_map": weight_map}) if name == INDEX else "{}"
        (root / "blobs" / f"blob{number}").write_text(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", f"blob{number}"))
    if ref is not None:
        path = root / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def refusal(spec: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(spec)
    return str(caught.value)


def test_nothing_asked_for_means_the_embedded_model() -> None:
    model = resolve_model(None)
    assert (model.name, model.revision, model.embedded) == ("lily-tiny", None, True)
    Checkpoint.open(model.path).close()


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    model = resolve_model(str(DATA / "random-tiny"))
    assert (model.path, model.name, model.embedded) == (DATA / "random-tiny", "random-tiny", False)
    Path("org/name").mkdir(parents=True)
    assert resolve_model("org/name").path == Path("org/name")
    (tmp_path / "home" / "models").mkdir(parents=True)
    assert resolve_model("~/models").path == tmp_path / "home" / "models"


def test_a_cached_model_is_found_by_branch_tag_and_commit(cache: Path) -> None:
    snapshot = add_snapshot(cache)
    older = add_snapshot(cache, commit=OTHER, ref="refs/pr/1")
    for spec, path, commit in (
        ("org/Model-1.5", snapshot, COMMIT),
        ("org/Model-1.5@main", snapshot, COMMIT),
        (f"org/Model-1.5@{COMMIT}", snapshot, COMMIT),
        ("org/Model-1.5@refs/pr/1", older, OTHER),
        (f"org/Model-1.5@{OTHER}", older, OTHER),
    ):
        model = resolve_model(spec)
        assert (model.path, model.name, model.revision) == (path, "org/Model-1.5", commit)
        assert not model.embedded


def test_a_model_that_is_not_cached_gives_the_line_to_run(cache: Path) -> None:
    assert refusal("org/name").splitlines()[-1] == "lily pull org/name"
    assert refusal("org/name@v1.0").splitlines()[-1] == "lily pull org/name@v1.0"
    assert str(cache) in refusal("org/name")


def test_another_cached_revision_is_mentioned_but_not_taken(cache: Path) -> None:
    add_snapshot(cache, ref=None)
    message = refusal("org/Model-1.5")
    assert COMMIT in message
    assert message.splitlines()[-1] == "lily pull org/Model-1.5"
    assert refusal(f"org/Model-1.5@{OTHER}").splitlines()[-1] == f"lily pull org/Model-1.5@{OTHER}"


@pytest.mark.parametrize("name", [*FILES, INDEX])
@pytest.mark.parametrize("dangling", [False, True])
def test_incomplete_snapshots_are_named_file_by_file(cache: Path, name: str, dangling: bool) -> None:
    path = add_snapshot(cache) / name
    (path.resolve() if dangling else path).unlink()
    lines = refusal("org/Model-1.5").splitlines()
    assert [line.strip() for line in lines if line.startswith("  ")] == [name]
    assert lines[-1] == "lily pull org/Model-1.5"


def test_all_missing_files_are_listed(cache: Path) -> None:
    snapshot = add_snapshot(cache)
    for name in FILES:
        (snapshot / name).unlink()
    listed = [line.strip() for line in refusal("org/Model-1.5").splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(FILES)


def test_a_snapshot_of_a_single_file_needs_no_index(cache: Path) -> None:
    snapshot = add_snapshot(cache)
    for name in (*FILES[2:], INDEX):
        (snapshot / name).unlink()
    assert "model.safetensors" in refusal("org/Model-1.5")
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert resolve_model("org/Model-1.5").path == snapshot


def test_a_damaged_reference_is_named(cache: Path) -> None:
    add_snapshot(cache)
    reference = cache / "models--org--Model-1.5" / "refs" / "main"
    for content in (b"", b"../../../etc", b"\xff", COMMIT[:39].encode()):
        reference.write_bytes(content)
        assert str(reference) in refusal("org/Model-1.5")


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "model",
        "a/b/c",
        "org/",
        "/name",
        "org/name@",
        "org/name@a..b",
        "org/name@a b",
        "org/name@/etc",
        "org//name",
        "../name",
        "./org/name",
        "/nowhere/model",
        "~user/model",
        "org/name.git",
        "org/..",
        "org/na--me",
        "-org/name",
        "org\\name",
        "org/name\n",
        "org/na\0me",
        "org/naïve",
        "https://example.org/org/name",
        "x" * 300 + "/name",
    ],
)
def test_other_forms_are_refused(spec: str) -> None:
    message = refusal(spec)
    assert "lily pull" not in message
    assert "no such folder" in message or "no revision" in message
    assert message.isprintable()
    with pytest.raises(CheckpointError):
        parse_hub_model(spec)


def test_a_file_is_refused() -> None:
    assert "is a file" in refusal(str(DATA / "random-tiny" / "config.json"))


def test_the_cache_is_found_as_huggingface_hub_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hub_cache() == tmp_path / "home" / ".cache" / "huggingface" / "hub"
    for variable, value, expected in (
        ("XDG_CACHE_HOME", "/xdg", "/xdg/huggingface/hub"),
        ("HF_HOME", "~/hf", str(tmp_path / "home" / "hf" / "hub")),
        ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
        ("HF_HUB_CACHE", "$HF_HOME/c", str(tmp_path / "home" / "hf" / "c")),
    ):
        monkeypatch.setenv(variable, value)
        assert hub_cache() == Path(expected)


def test_two_models_of_one_name_have_different_keys(cache, tmp_path):
    folders = [tmp_path / parent / "4bit" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    first, second = (resolve_model(str(folder)) for folder in folders)
    assert first.name == second.name
    assert first.key != second.key
    assert resolve_model(str(tmp_path / "b" / ".." / "a" / "4bit")).key == first.key
    assert resolve_model(None).key == "lily-tiny"
    add_snapshot(cache)
    assert resolve_model("org/Model-1.5").key == f"org/Model-1.5@{COMMIT}"
