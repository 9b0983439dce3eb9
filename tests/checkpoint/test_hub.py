# SPDX-License-Identifier: Apache-2.0
"""``lily pull`` against a local server that answers as the Hugging Face Hub does; no other network is used."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX

from lily.checkpoint import hub
from lily.checkpoint.resolve import resolve_model
from lily.errors import LilyError

huggingface_hub = pytest.importorskip("huggingface_hub")

COMMIT = "38740b847e4cb78f352aba30aa41c76e08e6eb46"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
NEEDED = {*SHARDS, *SMALL, INDEX}


class Hub(http.server.ThreadingHTTPServer):
    """One repository org/model; ``requested`` lists the files whose content was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        weight_map = {f"tensor{i}": shard for i, shard in enumerate(SHARDS)}
        self.files: dict[str, bytes] = {name: name.encode() * 50 for name in (*SHARDS, *SMALL)}
        self.files[INDEX] = json.dumps({"weight_map": weight_map}).encode()
        self.files |= dict.fromkeys(
            ("README.md", "vocab.json", "model.gguf", "pytorch_model.bin", "x/config.json"), b"x"
        )
        self.refusal: tuple[int, str] | None = None
        self.broken: set[str] = set()
        self.requested: list[str] = []


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.server.refusal and "org/model" in path:
            status, code = self.server.refusal
            self.answer(status, b"{}", {"X-Error-Code": code})
        elif re.fullmatch(rf"/api/models/org/model(/revision/(main|v1|{COMMIT}))?", path):
            self.answer(200, json.dumps(self.repository()).encode())
        elif path.startswith("/api/models/org/model/revision/"):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/model/tree/"):
            tree = [
                {**file, "type": "file", "path": file["rfilename"], "oid": file["blobId"]} for file in self.entries()
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith("/org/model/resolve/"):
            self.file(path.split("/", 5)[5])
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET
    do_POST = do_GET

    def entries(self) -> list[dict[str, Any]]:
        files = self.server.files.items()
        return [{"rfilename": n, "size": len(d), "blobId": hashlib.sha1(d).hexdigest()} for n, d in files]

    def repository(self) -> dict[str, Any]:
        return {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": self.entries()}

    def file(self, name: str) -> None:
        data = self.server.files[name]
        if self.command == "GET":
            self.server.requested.append(name)
            if name in self.server.broken:
                self.answer(403, b"no")
                return
        self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        api = functools.partial(huggingface_hub.HfApi, endpoint=endpoint, token=False)
        monkeypatch.setattr(huggingface_hub, "HfApi", api)
        yield server
        server.shutdown()
        thread.join()


def refusal(spec: str = "org/model") -> str:
    with pytest.raises(LilyError) as caught:
        hub.pull(spec, progress=False)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_only_the_needed_files_are_downloaded_and_then_resolve(server: Hub) -> None:
    folder = hub.pull("org/model", progress=False)
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert all((folder / name).read_bytes() == server.files[name] for name in NEEDED)
    assert sorted(server.requested) == sorted(NEEDED)
    model = resolve_model("org/model")
    assert (model.path.resolve(), model.revision) == (folder.resolve(), COMMIT)


def test_a_revision_is_pulled_and_resolves_by_its_name(server: Hub) -> None:
    hub.pull("org/model@v1", progress=False)
    assert resolve_model("org/model@v1").revision == COMMIT
    with pytest.raises(LilyError, match=r"lily pull org/model$"):
        resolve_model("org/model")


def test_what_is_complete_is_not_downloaded_again(server: Hub) -> None:
    server.broken = {SHARDS[1]}
    assert "org/model: " in refusal()
    with pytest.raises(LilyError, match=SHARDS[1]):
        resolve_model("org/model")
    server.broken = set()
    server.requested.clear()
    hub.pull("org/model", progress=False)
    assert SHARDS[1] in server.requested
    assert INDEX not in server.requested
    server.requested.clear()
    hub.pull("org/model", progress=False)
    assert server.requested == []


def test_a_model_in_one_file_needs_no_index(server: Hub) -> None:
    for name in (INDEX, *SHARDS):
        del server.files[name]
    assert "the repository has no model.safetensors" in refusal()
    server.files["model.safetensors"] = b"x"
    folder = hub.pull("org/model", progress=False)
    assert {path.name for path in folder.iterdir()} == {*SMALL, "model.safetensors"}


def test_a_repository_without_a_needed_file_is_refused_before_the_download(server: Hub) -> None:
    del server.files["tokenizer.json"], server.files[SHARDS[0]]
    assert f"has no tokenizer.json, {SHARDS[0]}" in refusal()
    assert set(server.requested) <= {INDEX}


def test_a_full_disk_is_refused_before_the_download(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(len(server.files[name]) for name in NEEDED if name != INDEX)
    usage = shutil.disk_usage("/")
    for free, enough in ((needed + hub._SPARE_BYTES - 1, False), (needed + hub._SPARE_BYTES, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            hub.pull("org/model", progress=False)
        else:
            assert re.search(r"0\.0 MB to download, but .* has 67\.1 MB free.*HF_HOME", refusal())
            assert set(server.requested) == {INDEX}


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("the download failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "blob"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        wrapped(OSError(errno.ENOSPC, "x")),
        RuntimeError("Data processing error: No space left on device (os error 28)"),
    ],
    ids=["full", "quota", "wrapped", "as text"],
)
def test_a_disk_that_fills_up_during_the_download_has_its_remedy(
    server: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise error

    api: Any = huggingface_hub.HfApi  # a partial of the class, see ``server``
    monkeypatch.setattr(api.func, "snapshot_download", fill)
    message = refusal()
    assert message.startswith("org/model: the disk of ")
    assert "is full; free some space, or set HF_HOME to a folder on a larger disk" in message


@pytest.mark.parametrize(("nbytes", "words"), [(0, "0.0 MB"), (999_000_000, "999.0 MB"), (20_400_000_000, "20.4 GB")])
def test_small_sizes_are_given_in_megabytes(nbytes: int, words: str) -> None:
    assert hub._size(nbytes) == words


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ((404, "RepoNotFound"), "no such repository"),
        ((401, "RepoNotFound"), "no such repository"),
        ((403, "GatedRepo"), "access is restricted"),
        ((418, ""), "download failed"),
    ],
)
def test_refusals_of_the_server_are_one_line(server: Hub, refused: tuple[int, str], words: str) -> None:
    server.refusal = refused
    message = refusal()
    assert words in message
    assert message.startswith("org/model: ")


def test_an_unknown_revision_is_told_from_an_unknown_model(server: Hub) -> None:
    assert "no such revision" in refusal("org/model@v2")
    assert "no such repository" in refusal("org/other")


def test_no_connection_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Unreachable:
        def model_info(self, *_: object, **__: object) -> None:
            raise ConnectionError("[Errno 101] Network is unreachable\nsecond line")

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    assert "Network is unreachable" in refusal()


def test_progress_bars_are_left_as_they_were(server: Hub) -> None:
    before = huggingface_hub.utils.are_progress_bars_disabled()
    hub.pull("org/model", progress=False)
    assert huggingface_hub.utils.are_progress_bars_disabled() == before


def test_without_the_extra_the_command_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install '.[hub]'" in refusal()


@pytest.mark.parametrize("spec", ["", "model", "a/b/c", "../x", "org/name@"])
def test_other_forms_are_refused(spec: str) -> None:
    assert spec in refusal(spec)
