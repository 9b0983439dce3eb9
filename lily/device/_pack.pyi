# SPDX-License-Identifier: Apache-2.0
def pack_rows16(
    out: int, words: int, scales: int, biases: int, rows: int, groups: int, words_per_group: int
) -> None: ...
