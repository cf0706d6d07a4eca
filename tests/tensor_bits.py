"""Tensors of every dtype, and what their memory holds."""

from __future__ import annotations

import torch

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
KEPT_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTISED, key=str)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of ``shape`` with bytes of all kinds (booleans are 0 or 1)."""
    width = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, width), dtype=torch.uint8, generator=generator)
    return raw.flatten().view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    if not tensor.numel():
        return b""
    whole = tensor.detach().resolve_conj().resolve_neg()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(whole.element_size())
    whole = whole if width is None else whole.view(width)
    return whole.contiguous().flatten().view(torch.uint8).numpy().tobytes()
