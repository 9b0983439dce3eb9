# SPDX-License-Identifier: Apache-2.0
"""Who is let in: hosts, pages, keys, kinds and sizes of bodies."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import HI, JSON, Running, read_all, serving
from waiting import PATIENCE

from lily.engine import Engine
from lily.server.guards import host_name, is_loopback, normalised_hosts

BODY = {"messages": HI, "max_tokens": 1}
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def guarded(engine: Engine) -> Iterator[Running]:
    """A server with a key, a further name and a page that may use it."""
    with serving(
        engine, key="s3cret", hosts=normalised_hosts(["lily.lan"]), origins=frozenset({PAGE}), max_body=2000
    ) as running:
        yield running


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# ---- hosts
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.9.9.9:1", "[::1]:8080", "a.localhost"])
def test_names_of_this_machine_are_let_in(server: Running, host: str) -> None:
    assert server.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "192.168.1.9", "", "[::", "127.0.0.1.nip.io"]
)
def test_other_names_are_refused_before_anything_else(server: Running, host: str) -> None:
    for response in (
        server.get("/health", headers={"Host": host}),
        server.post("/v1/chat/completions", BODY, headers={"Host": host}),
    ):
        assert code(response) == (403, "host_not_allowed")
        assert "--allowed-hosts" in response.json()["error"]["message"]


def test_a_name_that_was_allowed_is_let_in(guarded: Running) -> None:
    assert guarded.get("/health", headers={"Host": "LILY.lan:8080"}).status_code == 200
    assert code(guarded.get("/health", headers={"Host": "other.lan"})) == (403, "host_not_allowed")


def test_host_names_are_read_from_headers_and_flags_alike() -> None:
    assert normalised_hosts(["A.lan", "fe80::1", "10.0.0.1"]) == {"a.lan", "fe80::1", "10.0.0.1"}
    assert [host_name(h) for h in ("A.lan:80", "a.lan.", "[FE80::1]:3", "user@a.lan", "[")] == [
        "a.lan", "a.lan", "fe80::1", "a.lan", "",
    ]  # fmt: skip
    assert [is_loopback(n) for n in ("::1", "127.1.2.3", "localhost", "0.0.0.0", "::", "10.0.0.1")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


# ---- pages
def test_no_page_is_let_in_and_no_header_invites_one_by_default(server: Running) -> None:
    assert "access-control-allow-origin" not in server.post("/v1/chat/completions", BODY).headers
    response = server.post("/v1/chat/completions", BODY, headers={"Origin": PAGE})
    assert code(response) == (403, "origin_not_allowed")
    assert "--allowed-origins" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers
    own = server.post("/v1/chat/completions", BODY, headers={"Origin": server.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


def test_a_page_that_was_allowed_may_ask_and_read(guarded: Running) -> None:
    asked = guarded.request("OPTIONS", "/v1/chat/completions", headers={"Origin": PAGE})  # it has no key yet
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    headers = {"Origin": PAGE, "Authorization": "Bearer s3cret"}
    for response in (
        guarded.post("/v1/chat/completions", BODY, headers=headers),
        guarded.post("/v1/chat/completions", {**BODY, "stream": True}, headers=headers),
    ):
        assert response.status_code == 200
        assert (response.headers["access-control-allow-origin"], response.headers["vary"]) == (PAGE, "Origin")
    refused = guarded.get("/v1/models", headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    other = guarded.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://evil.example"})
    assert code(other) == (403, "origin_not_allowed")


# ---- keys
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Basic s3cret"},
     {"X-Api-Key": "s3cre"}, {"Authorization": "Bearer s3cret2"}, {"Authorization": b"Bearer \xff"}],
    ids=str,
)  # fmt: skip
def test_without_the_key_only_health_answers(guarded: Running, headers: Any) -> None:
    for response in (guarded.get("/v1/models", headers=headers), guarded.post("/tokenize", {}, headers=headers),
                     guarded.get("/nothing", headers=headers)):  # fmt: skip
        assert code(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in response.text
    assert guarded.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer s3cret"}, {"authorization": "bearer  s3cret"},
                                     {"X-Api-Key": "s3cret"}], ids=str)  # fmt: skip
def test_the_key_is_taken_in_both_headers(guarded: Running, headers: dict[str, str]) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.post("/v1/chat/completions", BODY, headers=headers).status_code == 200


# ---- bodies
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_that_does_not_say_it_is_json_is_refused(server: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = server.post("/v1/chat/completions", content=json.dumps(BODY).encode(), headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_json_may_name_its_encoding(server: Running) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.post("/v1/chat/completions", content=json.dumps(BODY).encode(), headers=headers).status_code == 200


def test_a_body_is_refused_by_its_length_or_as_it_grows(guarded: Running) -> None:
    headers = {"Authorization": "Bearer s3cret", **JSON}
    body = json.dumps({"content": "a" * 3000}).encode()
    assert guarded.post("/tokenize", content=body, headers=headers).status_code == 413
    assert guarded.post("/tokenize", content=iter([body[:1500], body[1500:]]), headers=headers).status_code == 413
    small = json.dumps({"content": "a" * 1900}).encode()
    assert guarded.post("/tokenize", content=small, headers=headers).status_code == 200


def test_a_body_that_does_not_come_is_given_up(engine: Engine) -> None:
    with serving(engine, request_timeout=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert server.get("/health").status_code == 200


def test_a_websocket_is_not_spoken(server: Running) -> None:
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    assert server.get("/v1/chat/completions", headers=headers).status_code == 405


@pytest.mark.parametrize("origin", ["http://[", "null", "://", "http://localhost:1"])
def test_an_origin_that_is_none_of_its_own_is_refused_whatever_it_says(engine: Engine, origin: str) -> None:
    with serving(engine) as server:
        response = server.get("/v1/models", headers={"Origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        own = server.get("/v1/models", headers={"Origin": server.url})
        assert own.status_code == 200
