# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, for checkpoints with a byte-level BPE ``tokenizer.json``.

Encoding is done by the ``tokenizers`` library; decoding uses our own table of the bytes of every id, so that text
decoded at once and text streamed token by token (``lily.text.detokenizer``) come from the same bytes.

Not handled: SentencePiece and other models that are not byte-level; added tokens that stand only in
``tokenizer_config.json``; ``clean_up_tokenization_spaces``. The library writes a few lines to standard error before it
panics; they are kept off it while a tokenizer is loaded, not while text is encoded.
"""

from __future__ import annotations

import operator
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lily.checkpoint.library_errors import is_panic, pass_on_unless_of_library
from lily.checkpoint.strict_json import read_bytes, read_object
from lily.errors import CheckpointError, InvalidRequestError, show
from lily.text.segments import MARK, Segments, can_cut

# Prompts are encoded one at a time, so the library's worker threads would only idle, and it warns about them after
# every fork. Whoever has set the variable knows better.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

MAX_TOKENIZER_BYTES = 256 << 20
"""Bound for tokenizer.json; the 35B model's has 20 MB."""


def load_tokenizer_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """``tokenizer_config.json`` of the checkpoint folder ``path``; {} if there is none. Raises CheckpointError."""
    file = Path(path) / TOKENIZER_CONFIG_FILE
    return read_object(file) if os.path.lexists(file) else {}


def token_text(entry: object) -> str | None:
    """The spelling of a token entry of ``tokenizer_config.json``: a string, or an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


class Tokenizer:
    """The tokenizer of one checkpoint. It never changes after construction: any number of threads may use it.

    token_bytes: list[bytes] of length vocab_size; ids without a token (padding rows of the model) hold b"".
    num_tokens: number of real ids; they are 0 … num_tokens-1, the model's rows above are padding.
    added_ids: tokens that no merge of bytes makes. special_ids: those of them that ``skip_special_tokens`` drops;
    ``<think>``, ``<tool_call>`` and the like are not among them.
    eos_ids: the ``eos_token`` of ``tokenizer_config.json``; ``generation_config.json`` may name more.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, *, eos_tokens: Iterable[str] = ()) -> None:
        """Wraps ``backend``. vocab_size: rows of the model's embedding. Raises CheckpointError if they do not agree."""
        # A tokenizer.json saved by a training script may hold these; they would cut or pad prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # merges left out at random, for training: one text would have many encodings
        if type(backend.decoder) is not tokenizers.decoders.ByteLevel or backend.pre_tokenizer is None:
            raise CheckpointError(
                f"pre-tokenizer {type(backend.pre_tokenizer).__name__} and decoder {type(backend.decoder).__name__}; "
                "Lily runs byte-level BPE, whose decoder is ByteLevel"
            )
        self._backend = backend
        self.vocab_size = vocab_size
        self.num_tokens = backend.get_vocab_size(with_added_tokens=True)
        if self.num_tokens > vocab_size:
            raise CheckpointError(
                f"the tokenizer has {self.num_tokens:,} tokens but the model only {vocab_size:,} rows (vocab_size); "
                "the tokenizer belongs to another model"
            )
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.token_bytes = _bytes_of_every_id(backend, self.num_tokens, frozenset(added))
        self.token_bytes.extend([b""] * (vocab_size - self.num_tokens))
        self.eos_ids = tuple(self._id_of_eos(token) for token in eos_tokens)
        # One that is found in normalised text, or takes the space around it, is not found before everything else.
        plain = [t.content for t in added.values() if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
        whole = len(plain) == len(added) and can_cut(plain)
        self._segments = Segments(self._encode_all) if whole else None

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str], vocab_size: int) -> Tokenizer:
        """Reads ``tokenizer.json`` and ``tokenizer_config.json`` of the checkpoint folder ``path``.

        Raises CheckpointError if the tokenizer is missing, damaged, not byte-level, or larger than vocab_size.
        """
        file = Path(path) / TOKENIZER_FILE
        data = read_bytes(file, MAX_TOKENIZER_BYTES)
        eos = load_tokenizer_config(path).get("eos_token")
        spelled = [token_text(entry) for entry in (eos if isinstance(eos, list) else [eos])]
        try:
            with _quiet_panics():
                backend = tokenizers.Tokenizer.from_buffer(data)
                return cls(backend, vocab_size, eos_tokens=[token for token in spelled if token is not None])
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        except BaseException as error:
            pass_on_unless_of_library(error)
            raise CheckpointError(f"{file}: not a valid tokenizer: {str(error)[:200]}; download it again") from None

    def encode(self, text: str, *, add_special_tokens: bool = False, plain: bool = False) -> list[int]:
        """Token ids of ``text``; "" gives [].

        Added tokens spelled in the text (``<|im_start|>``, ``<think>`` …) become their ids, as templated prompts need.
        plain: they are ordinary text instead, for text that must not be able to write control tokens.
        add_special_tokens: also what the tokenizer's post-processor adds around a text (nothing for Qwen).
        Raises InvalidRequestError for text that has no UTF-8 form (lone surrogates), or on which the library fails.
        """
        _require_utf8(text)
        try:
            if plain:
                return self._encode_plain(text)
            if self._segments is not None and not add_special_tokens and MARK in text:
                return self._segments.encode(text)
            [ids] = self._encode_all([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            pass_on_unless_of_library(error)
            raise InvalidRequestError(
                f"this checkpoint's tokenizer fails on a text of {len(text)} characters: {str(error)[:200]}; "
                "give another text, or download the checkpoint again"
            ) from None
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``. Byte sequences that are not UTF-8 become U+FFFD; padding ids have no text.

        Raises InvalidRequestError for an id outside of 0 … vocab_size-1.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        if not isinstance(ids, Iterable):
            raise InvalidRequestError(f"the token ids are {show(ids)}; allowed: a list of whole numbers")
        parts = [self.token_bytes[id] for id in map(self._checked, ids) if id not in skip]
        return b"".join(parts).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """Id of the token spelled ``token`` (base tokens in the byte-level alphabet: ``Ġthe``), or None."""
        id: int | None = self._backend.token_to_id(token)
        return id

    def _encode_all(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        # Of the library's encoders this one releases the GIL and skips offsets that nobody reads.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _encode_plain(self, text: str) -> list[int]:
        # The library has a switch for this (encode_special_tokens), but it changes the shared object, and it leaves
        # out added tokens with special=false such as <think>. Its stages know nothing of added tokens.
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        model = backend.model
        return [token.id for piece in pieces for token in model.tokenize(piece)]

    def _checked(self, id: int) -> int:
        try:
            index = operator.index(id)
        except TypeError:
            raise InvalidRequestError(f"a token id is {show(id)}; allowed: a whole number") from None
        if not 0 <= index < self.vocab_size:
            raise InvalidRequestError(
                f"token id {show(index)} is outside of the vocabulary (0 … {self.vocab_size - 1})"
            )
        return index

    def _id_of_eos(self, token: str) -> int:
        id = self.id_of(token)
        if id is None:
            raise CheckpointError(f"no token {show(token)}, which {TOKENIZER_CONFIG_FILE} names as eos_token")
        return id


@contextmanager
def _quiet_panics() -> Iterator[None]:
    """Keeps what the library writes to standard error while it panics off it; everything else is written at the end.

    The library writes to the descriptor itself, which belongs to the whole process. So nothing is done where other
    threads run: what they write meanwhile, and the processes they start, would get the wrong one.
    """
    if threading.active_count() > 1:
        yield
        return
    try:
        kept, sink = os.dup(2), tempfile.TemporaryFile()  # noqa: SIM115 (closed below, after the descriptor is back)
    except OSError:  # standard error is closed
        yield
        return
    panicked = False
    try:
        os.dup2(sink.fileno(), 2)
        yield
    except BaseException as error:
        panicked = is_panic(error)
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        with sink:
            sink.seek(0)
            if not panicked and (said := sink.read()):
                os.write(2, said)


def _require_utf8(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text to encode must be a string, seen {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is not valid Unicode; remove it"
        ) from error


def byte_level_alphabet() -> list[str]:
    """The character that stands for each byte 0 … 255 in a byte-level vocabulary.

    Source: GPT-2's vocabulary. Bytes that print in Latin-1 stand for themselves; the others, in order, for U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + unprintable.index(byte)) for byte in range(256)]


def _bytes_of_every_id(backend: tokenizers.Tokenizer, num_tokens: int, added: frozenset[int]) -> list[bytes]:
    """Bytes of the ids 0 … num_tokens-1, all at once: 248,077 ids take about 0.25 s, most of it in the library."""
    spellings: list[str | None] = list(map(backend.id_to_token, range(num_tokens)))
    if None in spellings:
        raise CheckpointError(
            f"id {spellings.index(None)} has no token although there are {num_tokens:,}; ids must have no gaps"
        )
    base = ["" if id in added else spelling for id, spelling in enumerate(spellings) if spelling is not None]
    alphabet = byte_level_alphabet()
    byte_of = np.full(ord(max(alphabet)) + 2, 256, dtype=np.uint16)  # 256: not in the alphabet
    byte_of[[ord(char) for char in alphabet]] = np.arange(256)

    code_points = np.frombuffer("".join(base).encode("utf-32-le"), dtype="<u4")
    values = byte_of[np.minimum(code_points, len(byte_of) - 1)]
    ends = np.cumsum(np.fromiter(map(len, base), dtype=np.int64, count=num_tokens))
    foreign = np.flatnonzero(values == 256)
    if foreign.size:
        id = int(np.searchsorted(ends, foreign[0], side="right"))
        raise CheckpointError(
            f"token {id} ({show(base[id])}) has characters outside of the byte-level alphabet; Lily runs byte-level BPE"
        )
    joined = values.astype(np.uint8).tobytes()
    bounds = [0, *ends.tolist()]
    table = [joined[start:end] for start, end in pairwise(bounds)]
    for id in added:
        table[id] = (spellings[id] or "").encode("utf-8")
    return table
