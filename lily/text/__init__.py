# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: tokenizer, chat template, detokenizer of streamed tokens, stop strings."""
