# SPDX-License-Identifier: Apache-2.0
def route_group(
    step: int, ids: int, offsets: int, order: int, blocks: int, experts: int, active: int, tile_m: int, max_blocks: int
) -> None: ...
