"""A linear layer whose weight is packed once for tiles of a fixed number of rows.

On a CPU the weight is reordered into the blocked layout oneDNN wants for that many rows (the operators are those
torch.compile emits for frozen weights). Measured at 8 rows and one AVX-512 core: about half the time of
``F.linear``, which packs the weight anew in every call. At a fixed number of rows each row of the result was bitwise
the same whatever the other rows held and wherever it stood, with one thread and with two; the engine's tests check
it. Where torch has no oneDNN, and on other devices, it is ``F.linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TileLinear:
    """``x @ weight.T`` for float32 ``x`` (n, in) and ``weight`` (out, in); fastest at n = ``rows``."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return product
