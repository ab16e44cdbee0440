"""The padding copies on the GPU: every element of tensors of any strides, in large and small tensors, and no other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn import compiler
from cute_attn.host import padding
from cute_attn.traits import PADDED_TENSORS, Traits, aligned_head_dim
from tests.padded_rows import copy_rows

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ROWS = {
    "d59": ("bf16", (2, 1000, 6, 59)),
    "d123-packed": ("bf16", (1777, 3, 123)),
    "d33": ("fp16", (3, 501, 5, 33)),
    "d3-packed": ("fp16", (5001, 2, 3)),
    "d201": ("fp32", (2, 130, 3, 201)),
    "d575": ("bf16", (1, 70, 2, 575)),
}
LAYOUTS = ("contiguous", "shifted", "heads_first", "packed", "spread")


def place(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random numbers, which are NaN between its elements."""
    *outer, heads, dim = shape
    if layout == "shifted":
        storage = torch.full((torch.Size(shape).numel() + 16,), torch.nan, device="cuda", dtype=dtype)
        x = storage[3 : 3 + torch.Size(shape).numel()].view(shape)
    elif layout == "heads_first":
        storage = torch.full((*outer[:-1], heads, outer[-1], dim), torch.nan, device="cuda", dtype=dtype)
        x = storage.transpose(-2, -3)
    elif layout == "packed":
        storage = torch.full((*outer, 3, heads, dim), torch.nan, device="cuda", dtype=dtype)
        x = storage.select(-3, 1)
    else:
        step = 2 if layout == "spread" else 1
        storage = torch.full((*shape, step), torch.nan, device="cuda", dtype=dtype)
        x = storage[..., 0]
    return x.copy_(torch.randn(shape, device="cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", PADDED_TENSORS)
def test_copies(op: str, rows: str, layout: str) -> None:
    """All tensors, and the second one alone; for packed queries, O's rows between two lengths."""
    name, shape = ROWS[rows]
    traits = Traits(op, "sm80", name, shape[-1], varlen=len(shape) == 3)
    count, dtype = len(PADDED_TENSORS[op]), DTYPES[name]
    wide = (*shape[:-1], aligned_head_dim(name, shape[-1]))
    compiled = compiler.compile(traits, None, compiler.default_target("sm80"))
    bounded = traits.varlen and op == "forward_unpad"
    cu_seqlens = torch.tensor([5, 70, shape[0] - 9], device="cuda", dtype=torch.int32) if bounded else None
    for which in sorted({(1 << count) - 1, 1 << (count // 2)}):
        any_rows: Any = [place(shape, layout, dtype) for _ in range(count)]
        padded: Any = [torch.full(wide, torch.nan, device="cuda", dtype=dtype) for _ in range(count)]
        if op.endswith("_unpad"):
            for x in padded:
                x.copy_(torch.randn(wide, device="cuda"))
        sources, targets = (any_rows, padded) if op.endswith("_pad") else (padded, any_rows)
        wanted = [base(x).clone() for x in targets]
        views = [
            x.as_strided(y.shape, y.stride(), y.storage_offset())
            for x, y in zip(wanted, targets, strict=True)
        ]
        copies = {"which": which, "mCuSeqlens": cu_seqlens, "mSource": tuple(sources)}
        copy_rows(traits, SimpleNamespace(**copies, mTarget=views))
        function, *arguments = compiled.bind(**copies, mTarget=tuple(targets))
        function(*arguments)
        for found, right in zip(targets, wanted, strict=True):
            assert torch.equal(bits(base(found)), bits(right))


def base(x: torch.Tensor) -> torch.Tensor:
    """The whole storage."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaNs are equal."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def test_tensors_of_different_lengths_in_one_launch() -> None:
    """Keys are fewer than queries, or more; each tensor uses as many blocks as it needs."""
    for lengths in ((2000, 7), (3, 1500)):
        q, k, v = (torch.randn(2, n, 4, 59, device="cuda").bfloat16() for n in (*lengths, lengths[1]))
        traits = Traits("forward_pad", "sm80", "bf16", 59)
        kernel = compiler.compile(traits, None, compiler.default_target("sm80"))
        for x, own in zip((q, k, v), padding.pad(kernel, (q, k, v), (True,) * 3), strict=True):
            assert torch.equal(own[..., :59], x) and not own[..., 59:].any()


def needed_kernels(params: dict[str, Any], target: str) -> Any:
    """Kernels of :func:`test_copies`."""
    if "rows" in params:
        name, shape = ROWS[params["rows"]]
        yield Traits(params["op"], "sm80", name, shape[-1], varlen=len(shape) == 3), None, target
