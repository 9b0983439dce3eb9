# SPDX-License-Identifier: Apache-2.0
"""``/metrics``, ``/props`` and ``/slots``: true, and nothing of a prompt in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import HI, Running, gated, open_tiny, read_until, serving

from lily.engine import Engine
from lily.server.app import DIALECTS

SECRET = "a very peculiar otter"


@pytest.fixture(scope="module")
def fresh() -> Iterator[Engine]:
    """An engine that nobody has asked yet."""
    with open_tiny(sequences=3) as engine:
        yield engine


def samples(server: Running) -> dict[tuple[str, ...], float]:
    """Each figure by its name and the values of its labels, in the order of their names."""
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_requests_and_tokens_are_counted(fresh: Engine) -> None:
    with serving(fresh) as server:
        ask = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "seed": 1, "ignore_eos": True}
        replies = [server.chat(ask).json() for _ in range(2)]
        server.chat(ask, temperature=-1)
        server.post("/v1/messages", {**ask, "max_tokens": 4000, "messages": [{"role": "user", "content": "w " * 3000}]})
        server.post("/v1/responses", {"input": []})  # refused before it is asked of the engine
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 3, "seed": 1, "ignore_eos": True})
        server.get("/v1/models")
        server.get("/nowhere")
        server.is_free()
        got = samples(server)
        text = server.get("/metrics").text
    usage = [reply["usage"] for reply in replies]
    prompt = len(fresh.tokenizer.encode("a"))  # one token, which is never there already
    assert got["lily_requests_total", "length", "/v1/chat/completions"] == 2
    assert got["lily_requests_total", "400", "/v1/chat/completions"] == 1
    assert got["lily_requests_total", "400", "/v1/messages"] == 1
    assert got["lily_requests_total", "400", "/v1/responses"] == 1
    assert got["lily_requests_total", "length", "/v1/completions"] == 3
    assert {path for name, *labels in got if name == "lily_requests_total" for path in labels[1:]} <= set(DIALECTS)
    assert got["lily_prompt_tokens_total",] == sum(u["prompt_tokens"] for u in usage) + 3 * prompt
    assert got["lily_cached_tokens_total",] == sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage) > 0
    assert got["lily_generated_tokens_total",] == 10 + 6
    assert got["lily_first_token_seconds_count",] == got["lily_between_tokens_seconds_count",] == 2 + 3
    assert got["lily_prompt_seconds_total",] == pytest.approx(got["lily_first_token_seconds_sum",])
    assert got["lily_requests_in_progress",] == 0
    assert got["lily_conversations_bytes",] > 0
    assert SECRET not in text


def test_a_client_that_goes_is_counted_and_one_that_waits_is_seen(fresh: Engine) -> None:
    with serving(fresh, keep_alive=0.01) as server, gated() as gate:
        with server.connect("/v1/chat/completions", messages=HI) as connection:
            read_until(connection, b"waiting")
            got = samples(server)
            assert (got["lily_requests_in_progress",], got["lily_requests_waiting",]) == (1, 1)
        gate.open()
        server.is_free()
        assert samples(server)["lily_requests_total", "gone", "/v1/chat/completions"] == 1


def test_a_request_that_has_begun_does_not_wait(fresh: Engine) -> None:
    """Whether it runs, or has ended and lies there for its reader."""
    with serving(fresh) as server:
        with server.connect("/v1/chat/completions", messages=HI, max_tokens=500, ignore_eos=True) as connection:
            read_until(connection, b'"role"')
            assert samples(server)["lily_requests_waiting",] == 0
        server.is_free()


def test_props_have_the_names_of_llama_server(fresh: Engine) -> None:
    with serving(fresh, model="otter") as server:
        got = server.get("/props").json()
    assert got["default_generation_settings"]["n_ctx"] == 1024
    assert (got["total_slots"], got["model_alias"], got["is_sleeping"]) == (3, "otter", False)
    assert got["chat_template"] == fresh.chat_template.source
    assert got["modalities"] == {"vision": False, "audio": False}
    assert str(fresh.model.path) not in str(got)


def test_slots_are_the_conversations_that_are_there(fresh: Engine) -> None:
    with serving(fresh, keep_alive=0.01) as server:
        server.chat({"messages": [{"role": "user", "content": SECRET * 40}]}, max_tokens=3, seed=1, ignore_eos=True)
        response = server.get("/slots")
        assert SECRET not in response.text
        slots = response.json()
        assert [slot["id"] for slot in slots] == list(range(len(slots)))
        assert {slot["is_processing"] for slot in slots} == {False}
        assert max(slot["n_tokens"] for slot in slots) > 200
        assert all(slot["n_ctx"] == 1024 and slot["bytes"] > 0 for slot in slots)


def test_a_key_guards_them(fresh: Engine) -> None:
    with serving(fresh, key="right") as server:
        for path in ("/metrics", "/props", "/slots"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"Authorization": "Bearer right"}).status_code == 200
