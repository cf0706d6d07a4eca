"""Tensors of any device, layout and dtype as host memory in the dtype in which they are stored.

Guarantees: what is in the memory is the tensor's elements in row-major order, complete when the function returns. What
is more than its elements is refused (`WireError`), never cut down to them.

Costs: nothing for a contiguous tensor on the host. Otherwise one copy: rows of a list are written side by side into
one buffer. From a CUDA device they are copied into pinned memory, all of them under way at once, and waited for once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.dtypes import storage_dtype
from policies.errors import WireError

if TYPE_CHECKING:
    import torch


def host_array(tensor: torch.Tensor) -> tuple[str, NDArray[Any]]:
    """(dtype name, contiguous host array of its storage dtype, of the tensor's shape). A view where it can be."""
    name = _dtype_of(tensor)
    (stored,) = _as_stored([tensor], name)
    if stored.device.type == "cpu":
        return name, stored.contiguous().numpy().view(storage_dtype(name))
    shape = tuple(stored.shape)
    return name, _copied([stored], storage_dtype(name), stored.numel()).reshape(shape)


def joined_on_host(tensors: Sequence[torch.Tensor]) -> tuple[str, NDArray[Any], list[tuple[int, ...]]]:
    """(dtype name, the elements of all tensors row after row in one flat array of the storage dtype, their shapes).

    Raises `WireError` with the number of the row that is of another dtype than the first.
    """
    name, dtype = _dtype_of(tensors[0], 0), tensors[0].dtype
    for row, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise WireError(f"the rows of a field must have one dtype, these have {name} and {_name(tensor)}", row=row)
        _require_whole(tensor, row)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    stored = _as_stored(tensors, name)
    return name, _copied(stored, storage_dtype(name), sum(map(math.prod, shapes))), shapes


def _copied(tensors: Sequence[torch.Tensor], dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The elements of the tensors, row after row, in fresh host memory."""
    import torch

    if not all(tensor.is_cpu for tensor in tensors):
        return _fetched(tensors, count).numpy().view(dtype)
    array = np.empty(count, dtype)
    with torch.no_grad():
        flat_rows = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        torch.cat(flat_rows, out=torch.from_numpy(array).view(tensors[0].dtype))
    return array


def _fetched(tensors: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The same for tensors that are not all on the host. All copies are complete on return."""
    import torch

    flat = _pinned(count, tensors[0].dtype)
    begin = 0
    with torch.no_grad():
        for tensor in tensors:
            end = begin + tensor.numel()
            flat[begin:end].view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
            begin = end
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return flat


def _pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory to which a device copies directly; ordinary memory where the system grants no more of that."""
    import torch

    if torch.cuda.is_available():
        with suppress(RuntimeError):
            return torch.empty(count, dtype=dtype, pin_memory=True)
    return torch.empty(count, dtype=dtype)


def _as_stored(tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The tensors on their own device; of a dtype that numpy lacks, their bits as integers, which torch copies as fast
    as any of its dtypes (and unsigned ones of two bytes or more four times slower)."""
    import torch

    stored = storage_dtype(name)
    with torch.no_grad():
        whole = [t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t.detach() for t in tensors]
        if stored.name == name:
            return whole
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.itemsize]
        return [tensor.view(bits) for tensor in whole]


def _dtype_of(tensor: torch.Tensor, row: int | None = None) -> str:
    name = _name(tensor)
    _require_whole(tensor, row)
    storage_dtype(name)
    return name


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_whole(tensor: torch.Tensor, row: int | None) -> None:
    """Refuse a tensor that is more than its dtype, shape and elements, or has no elements to give."""
    import torch

    if type(tensor) is not torch.Tensor and not _is_plain_subclass(tensor):
        raise WireError(f"a {type(tensor).__name__} is more than its elements; give a plain tensor", row=row)
    if tensor.__dict__ and (named := [name for name in vars(tensor) if not name.startswith("_")]):
        raise WireError(f"the tensor carries attributes that would be lost: {', '.join(named)}", row=row)
    if tensor.is_quantized:
        raise WireError(
            "a quantised tensor would lose its scale and zero point; give x.dequantize(), or x.int_repr() and the "
            "scales as fields of their own",
            row=row,
        )
    if tensor.is_nested:
        raise WireError("a row is a nested tensor; give its components as rows", row=row)
    if tensor.layout != torch.strided:
        raise WireError(f"a tensor of layout {tensor.layout} is not kept; give x.to_dense()", row=row)
    if tensor.is_meta:
        raise WireError("a tensor on the meta device has no elements", row=row)


def _is_plain_subclass(tensor: torch.Tensor) -> bool:
    """A parameter, or a tensor whose memory is a file's: by what it holds, a tensor like any other."""
    import torch

    tensordict = sys.modules.get("tensordict")
    plain = (torch.nn.Parameter, getattr(tensordict, "MemoryMappedTensor", None))
    return type(tensor) in plain
