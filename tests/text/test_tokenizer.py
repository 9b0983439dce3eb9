# SPDX-License-Identifier: Apache-2.0
"""The tokenizer against golden encodings, against the tokenizers library's own decoder, and against damaged files."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from needs import REAL_DATA, real_tokenizer
from paths import EMBEDDED, ROOT

from lily.errors import CheckpointError, InvalidRequestError
from lily.text.detokenizer import Detokenizer
from lily.text.tokenizer import Tokenizer, byte_level_alphabet

EMBEDDED_VOCAB = 4096
REAL = real_tokenizer()
REAL_VOCAB = 248_320

needs_real = pytest.mark.skipif(REAL is None, reason=REAL_DATA)


@cache
def embedded() -> Tokenizer:
    return Tokenizer.from_dir(EMBEDDED, EMBEDDED_VOCAB)


@cache
def real() -> Tokenizer:
    assert REAL is not None
    return Tokenizer.from_dir(REAL, REAL_VOCAB)


@cache
def golden() -> dict[str, Any]:
    assert REAL is not None
    return json.loads((REAL / "golden.json").read_text(encoding="utf-8"))


def small_tokenizer() -> dict[str, Any]:
    """A tokenizer.json with the 256 bytes, two merges, and one special and one ordinary added token."""
    vocab = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    vocab.update({"Ġa": 256, "Ġab": 257})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 258, "content": "<|end|>", "special": True, **flags},
            {"id": 259, "content": "<é k>", "special": False, **flags},
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ġ", "a"], ["Ġa", "b"]]},
    }


def save(folder: Path, tokenizer: object, config: object = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# The real tokenizer.


@needs_real
def test_real_tokenizer_gives_the_golden_encodings() -> None:
    entries = golden()["encode"]
    assert len(entries) == 25
    for entry in entries:
        assert real().encode(entry["text"]) == entry["ids"], entry["text"]
        assert real().decode(entry["ids"]) == entry["decoded"], entry["text"]


@needs_real
def test_real_tokenizer_streams_the_golden_texts_token_by_token() -> None:
    for entry in golden()["encode"]:
        detokenizer = Detokenizer(real().token_bytes)
        shown = "".join(map(detokenizer.push, entry["ids"])) + detokenizer.flush()
        assert shown == entry["decoded"], entry["text"]


@needs_real
def test_real_tokenizer_knows_which_ids_are_real() -> None:
    tokenizer = real()
    assert (tokenizer.num_tokens, tokenizer.vocab_size, len(tokenizer.token_bytes)) == (248_077, REAL_VOCAB, REAL_VOCAB)
    assert tokenizer.token_bytes[248_076] == b"<|audio_pad|>"
    assert not any(tokenizer.token_bytes[248_077:])
    assert all(tokenizer.token_bytes[:248_077])
    assert tokenizer.eos_ids == (248_046,)


@needs_real
def test_real_special_ids_are_those_of_the_model_card() -> None:
    kept = range(248_058, 248_070)  # tool_call … </think> have special=false
    assert real().special_ids == set(range(248_044, 248_077)) - set(kept)
    ids = real().encode("<|im_start|>a<think>b</think><tool_call><|im_end|>")
    assert real().decode(ids, skip_special_tokens=True) == "a<think>b</think><tool_call>"


@needs_real
def test_real_token_bytes_decode_as_the_library_decodes_them() -> None:
    assert REAL is not None
    library = tokenizers.Tokenizer.from_file(str(REAL / "tokenizer.json"))
    for id in [*range(0, 248_044, 97), *range(248_044, 248_077)]:
        expected = library.decode([id], skip_special_tokens=False)
        assert real().token_bytes[id].decode("utf-8", "replace") == expected, id


@needs_real
@pytest.mark.parametrize("text", ["<|im_end|>", "a <think> b", "x<tool_call>y", "hi", "e\u0301 <|im_start|>user\n"])
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    ids = real().encode(text, plain=True)
    assert max(ids) < 248_044
    assert real().decode(ids) == unicodedata.normalize("NFC", text)


@needs_real
def test_plain_encoding_of_text_without_control_tokens_is_the_usual_one() -> None:
    for entry in golden()["encode"]:
        if max(entry["ids"], default=0) < 248_044:
            assert real().encode(entry["text"], plain=True) == entry["ids"], entry["text"]


# The embedded model's tokenizer.


@given(st.text(max_size=60))
@example("Příliš žluťoučký kůň 👩‍👩‍👧‍👦 你好 e\u0301 \x00\ufffd")
@settings(deadline=None)
def test_any_text_comes_back_from_its_ids_in_normal_form(text: str) -> None:
    ids = embedded().encode(text)
    expected = unicodedata.normalize("NFC", text)
    assert embedded().decode(ids) == expected
    detokenizer = Detokenizer(embedded().token_bytes)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == expected


@given(st.lists(st.integers(0, EMBEDDED_VOCAB - 1), max_size=30), st.booleans())
@settings(deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int], skip: bool) -> None:
    library = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    assert embedded().decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_embedded_tokenizer_agrees_with_its_generation_config() -> None:
    ids = json.loads((EMBEDDED / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert embedded().eos_ids == (ids[0],)
    assert [embedded().token_bytes[id] for id in ids] == [b"<|im_end|>", b"<|endoftext|>"]
    assert embedded().special_ids.issuperset(ids)
    mixed = [*ids, *embedded().encode("a"), ids[0]]
    assert embedded().decode(mixed) == "<|im_end|><|endoftext|>a<|im_end|>"
    assert embedded().decode(mixed, skip_special_tokens=True) == "a"


def test_control_tokens_in_a_templated_prompt_are_recognised() -> None:
    ids = embedded().encode("<|im_start|>user\nhi<|im_end|>\n<think>\n")
    for token in ("<|im_start|>", "<|im_end|>", "<think>"):
        assert embedded().id_of(token) in ids
    assert embedded().id_of("<|no such token|>") is None


def test_many_threads_get_the_ids_that_one_gets() -> None:
    texts = [f"Text number {number}: Příliš žluťoučký kůň <think> 👍" * 5 for number in range(64)]
    one = [embedded().encode(text, plain=number % 2 == 0) for number, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda item: embedded().encode(item[1], plain=item[0] % 2 == 0), enumerate(texts)))
    assert many == one


# Made tokenizers: values worked out by hand.


def test_bytes_of_ids_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, small_tokenizer()), 264)
    assert tokenizer.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes[256:] == [b" a", b" ab", b"<|end|>", "<é k>".encode(), b"", b"", b"", b""]
    assert (tokenizer.num_tokens, tokenizer.special_ids, tokenizer.eos_ids) == (260, {258}, ())
    assert tokenizer.encode(" ab<é k>") == [257, 259]
    assert tokenizer.encode(" ab<|end|>", plain=True) == [257, *b"<|end|>"]
    assert tokenizer.encode("") == tokenizer.encode("", plain=True) == []


def test_limits_saved_with_a_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    limited = small_tokenizer()
    limited["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    limited["padding"] = {**pad, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    assert Tokenizer.from_dir(save(tmp_path, limited), 264).encode("xyz") == list(b"xyz")


def test_dropout_saved_with_a_tokenizer_is_switched_off(tmp_path: Path) -> None:
    random_merges = small_tokenizer()
    random_merges["model"]["dropout"] = 0.5
    tokenizer = Tokenizer.from_dir(save(tmp_path, random_merges), 264)
    assert tokenizer.encode(" ab" * 50) == tokenizer.encode(" ab" * 50, plain=True) == [257] * 50


@pytest.mark.parametrize(
    ("entry", "ids"),
    [
        (None, ()),
        ("<|end|>", (258,)),
        ({"__type": "AddedToken", "content": "<|end|>", "special": True}, (258,)),
        (["<|end|>", "<é k>"], (258, 259)),
    ],
)
def test_eos_token_is_read_in_every_form(tmp_path: Path, entry: object, ids: tuple[int, ...]) -> None:
    save(tmp_path, small_tokenizer(), {"eos_token": entry})
    assert Tokenizer.from_dir(tmp_path, 264).eos_ids == ids


def test_decode_takes_numpy_ids_and_refuses_ids_outside_of_the_vocabulary() -> None:
    ids = np.array(embedded().encode("numpy"), dtype=np.int32)
    assert embedded().decode(ids) == "numpy"
    for bad in (-1, EMBEDDED_VOCAB):
        with pytest.raises(InvalidRequestError, match=rf"{bad} is outside of the vocabulary \(0 … 4095\)"):
            embedded().decode([bad])


@pytest.mark.parametrize("plain", [False, True])
def test_text_without_a_utf8_form_is_refused_with_its_place(plain: bool) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D\) at character 3"):
        embedded().encode("ab \ud83d", plain=plain)
    with pytest.raises(InvalidRequestError, match="must be a string, seen bytes"):
        embedded().encode(b"ab", plain=plain)  # type: ignore[arg-type]


# Damaged checkpoints.


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer has 4,090 tokens .* only 4,000 rows"):
        Tokenizer.from_dir(EMBEDDED, 4000)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing"):
        Tokenizer.from_dir(tmp_path, 264)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b"null", b'{"model": {"type": "BPE"}}', b"{" * 5000])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer.from_dir(tmp_path, 264)


def longer_than_its_parts(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"].append(["Ġab", "Ġab"])


def prefixed(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["continuing_subword_prefix"] = "####"


def test_standard_error_is_left_alone_where_other_threads_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    monkeypatch.setattr("lily.text.tokenizer.tempfile", None)  # nothing to write into
    bad = small_tokenizer()
    prefixed(bad)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer: range end index"):
        Tokenizer.from_dir(save(tmp_path, bad), 264)
    capfd.readouterr()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs, whatever earlier tests have left."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.parametrize("damage", [longer_than_its_parts, prefixed])
def test_a_tokenizer_on_which_the_library_panics_is_refused_quietly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], alone: None, damage: Callable[[dict[str, Any]], None]
) -> None:
    bad = small_tokenizer()
    damage(bad)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer: range end index"):
        Tokenizer.from_dir(save(tmp_path, bad), 264)
    os.write(2, b"the descriptor is back")
    assert capfd.readouterr().err == "the descriptor is back"


def test_what_else_is_written_while_a_tokenizer_loads_is_not_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        def __new__(cls, data: bytes) -> Any:
            os.write(2, b"a warning")
            return real_class.from_buffer(data)

    real_class = tokenizers.Tokenizer
    monkeypatch.setattr(tokenizers, "Tokenizer", type("Library", (), {"from_buffer": Backend}))
    assert Tokenizer.from_dir(save(tmp_path, small_tokenizer()), 264).num_tokens == 260
    assert capfd.readouterr().err == "a warning"


@pytest.mark.parametrize("plain", [False, True])
def test_text_on_which_the_library_panics_is_refused(tmp_path: Path, plain: bool) -> None:
    endless = {**small_tokenizer(), "normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$b"}, "content": "x"}}
    tokenizer = Tokenizer.from_dir(save(tmp_path, endless), 264)
    assert tokenizer.encode("ab", plain=plain) == [97, 98]
    with pytest.raises(InvalidRequestError, match=r"tokenizer fails on a text of 40 characters: .*retry-limit"):
        tokenizer.encode("a" * 40, plain=plain)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_text_is_encoded_is_passed_on(interrupt: type[BaseException]) -> None:
    class Interrupted:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise interrupt

    tokenizer = copy.copy(embedded())
    tokenizer._backend = Interrupted()
    with pytest.raises(interrupt):
        tokenizer.encode("text")


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {**small_tokenizer(), "decoder": None})
    with pytest.raises(CheckpointError, match="decoder NoneType; Lily runs byte-level BPE"):
        Tokenizer.from_dir(tmp_path, 264)


def test_a_token_outside_of_the_alphabet_is_named(tmp_path: Path) -> None:
    bad = small_tokenizer()
    bad["model"]["vocab"]["▁the"] = 257
    del bad["model"]["vocab"]["Ġab"]
    bad["model"]["merges"].pop()
    with pytest.raises(CheckpointError, match=r"token 257 .* outside of the byte-level alphabet"):
        Tokenizer.from_dir(save(tmp_path, bad), 264)


def test_a_gap_in_the_ids_is_named(tmp_path: Path) -> None:
    bad = small_tokenizer()
    bad["added_tokens"] = []
    bad["model"]["vocab"]["Ġab"] = 300
    with pytest.raises(CheckpointError, match="id 257 has no token"):
        Tokenizer.from_dir(save(tmp_path, bad), 400)


@pytest.mark.parametrize("config", [[], "text", {"eos_token": "<|other|>"}])
def test_a_tokenizer_config_that_does_not_fit_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(save(tmp_path, small_tokenizer(), config), 264)


def test_a_damaged_tokenizer_loads_or_is_refused_but_never_crashes(tmp_path: Path) -> None:
    original = json.dumps(small_tokenizer()).encode()
    rng = random.Random(7)
    refusals = []
    for _ in range(300):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.choice(b'"{}[]:,0123456789ax\xff')
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        (tmp_path / "tokenizer.json").write_bytes(data)
        try:
            Tokenizer.from_dir(tmp_path, 264)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert all(message.startswith(str(tmp_path / "tokenizer.json")) for message in refusals)


# The process around it.


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("true", "true")])
def test_the_library_stays_single_threaded_unless_the_user_says_otherwise(before: str | None, after: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    if before is not None:
        environment["TOKENIZERS_PARALLELISM"] = before
    code = "import lily.text.tokenizer, os; print(os.environ['TOKENIZERS_PARALLELISM'])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == (after, "")
