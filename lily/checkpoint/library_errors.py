# SPDX-License-Identifier: Apache-2.0
"""What the libraries raise that are written in Rust: safetensors and tokenizers."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a panic of Rust code. It is no Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def pass_on_unless_of_library(error: BaseException) -> None:
    """Raises ``error`` again unless a library is to blame: Ctrl-C and the like are nobody's fault."""
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
