# SPDX-License-Identifier: Apache-2.0
"""Arguments of kernels as bytes: what does not fill its view is refused.

Not handled: the bytes themselves, which two devices agree on in the doctor's tests.
"""

from __future__ import annotations

import numpy as np
import pytest

from lily.checks.values import encoded
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, View
from lily.policy import policy_for


@pytest.mark.parametrize(("device", "width"), [("cpu", 4), ("metal", 2)])
def test_an_argument_of_another_size_than_its_view_is_refused(device: str, width: int) -> None:
    views = tuple(View(name, 0, 8 * width) for name in ("gate", "up", "y"))
    dispatch = Dispatch(KERNELS["swiglu"], "", (), views, (1, 8), (1, 1, 1), (32, 1, 1))
    inputs = {name: np.zeros(8, np.float32) for name in ("gate", "up", "y")}
    assert {name: len(raw) for name, raw in encoded(dispatch, inputs, policy_for(device)).items()} == {
        "gate": 8 * width, "up": 8 * width, "y": 8 * width,
    }  # fmt: skip
    for wrong in (7, 9):
        inputs["up"] = np.zeros(wrong, np.float32)
        with pytest.raises(ValueError, match=f"swiglu: up has {wrong * width} bytes, its view {8 * width}"):
            encoded(dispatch, inputs, policy_for(device))
