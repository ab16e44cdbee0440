"""How the operators divide DTensors among GPUs: by sequences, by heads, or not at all.

Importing this module loads ``torch.distributed.tensor``, so :func:`cute_attn.host.call.define` waits for that import.
On each dimension of a mesh a call is replicated, or each device has some of its sequences, or some of its heads. Of
these, torch chooses the one with the least communication. A gradient of what all devices read whole, such as a bias
of one sequence or the only key head, is a partial sum.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

from cute_attn.epilogues.functions.graph import ordered
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.dispatch import DIFFERENTIABLE

_ROWS = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out", "grad_out"), -4)
_LENGTHS = ("seqused_q", "seqused_k", "cache_seqlens", "rotary_seqlens", "cache_leftpad")
_DIMS: Mapping[str, Mapping[str, int]] = {
    "batch": {
        **_ROWS, **dict.fromkeys(("lse", "grad_lse"), -3), "bias": -4, "softmax": -4, "alibi_slopes": -2,
        **dict.fromkeys(_LENGTHS, -1),
    },
    "head": {
        **dict.fromkeys((*_ROWS, "lse", "grad_lse"), -2), "bias": -3, "softmax": -3, "alibi_slopes": -1, "sinks": -1,
    },
}  # fmt: skip
"""The dimension of sequences and of heads of each tensor that has one, counted from the last."""
_UNDIVIDED = {
    "batch": (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "page_table",
        "cache_batch_idx",
        "tree_mask",
    ),
    "head": (),
}
"""Tensors with which a call cannot be divided so: they number rows or entries of all sequences."""
OPERATORS = ("forward", "backward", "attention_with_kvcache")


def register(name: str) -> None:
    """Register the strategy of the operator ``name``, if it has one."""
    if name not in OPERATORS:
        return
    op = getattr(torch.ops.cute_attn, name).default
    # All arguments decide: also which tensors are absent, and which gradients are needed.
    known = RuntimeSchemaInfo(0, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, _strategy, known)


def _strategy(schema: OpSchema) -> OpStrategy:
    """All ways to divide a call."""
    call = _Call(schema)
    mesh, found = schema.get_mesh_from_args(), []
    for division in itertools.product(("", "batch", "head"), repeat=mesh.ndim):
        if not call.allows(division, mesh.shape):
            continue
        own, costs = [], []
        for name, strategy in call.tensors:
            given = strategy.strategies[0].output_spec
            own.append(DTensorSpec(mesh, call.placements(name, given.shape, division), given.tensor_meta))
            costs.append(generate_redistribute_costs(strategy, own[-1]))
        if call.keeps_caches(own):
            found.append(OpSpec(_specs(mesh, call.outputs(division)), own, costs))
    if not found:
        raise ValueError(
            "k_cache or v_cache is divided otherwise than the call can be, and would be written in a copy; accepted: "
            "replicated caches, or ones divided by heads or, without a page_table, by sequences"
        )
    return OpStrategy(found)


def _specs(mesh: Any, outputs: Any) -> Any:
    """The specs of outputs, to which torch adds what it knows of tensors, except of those in lists."""
    return tuple(
        tuple(DTensorSpec(mesh, own, TensorMeta(like.shape, like.stride(), like.dtype)) for own, like in x)
        if isinstance(x, list)
        else DTensorSpec(mesh, x)
        for x in outputs
    )


def _read_by(epilogue: str) -> set[str]:
    """Which of the sequence's and the head's index an epilogue may read. Its tensors are not divided."""
    one = user_epilogue(epilogue)
    if isinstance(one, type) or one.lists_blocks:
        return {"batch", "head"}
    return {x.op for x in ordered(one.output)}


class _Call:
    """A call as torch describes it.

    Attributes:
        given: the arguments by name.
        tensors: the tensors with their names, those of lists in turn.
    """

    def __init__(self, schema: OpSchema) -> None:
        names = [x.name for x in schema.op._schema.arguments]
        self.op = schema.op
        self.given: dict[str, Any] = dict(zip(names, schema.args_schema, strict=False))
        children = ((name, one) for name, x in self.given.items() for one in getattr(x, "children", (x,)))
        self.tensors = [(name, one) for name, one in children if isinstance(one, OpStrategy)]
        self._rows = self.given["q"].shape
        self._heads = self._rows[-2], (self.given.get("k_cache") or self.given["k"]).shape[-2]

    def allows(self, division: tuple[str, ...], sizes: tuple[int, ...]) -> bool:
        """True if the call gives the same results when it is divided so among the mesh's dimensions, of ``sizes``."""
        used = set(division) - {""}
        if self.given.get("dropout") and used:  # the mask numbers sequences and heads
            return False
        if any(used & _read_by(one.partition(":")[0]) for one in self.given["epilogues"]):
            return False
        if any(self.given.get(x) is not None for one in used for x in _UNDIVIDED[one]):
            return False
        devices = math.prod(size for one, size in zip(division, sizes, strict=True) if one == "head")
        nheads, nheads_kv = self._heads
        return nheads % devices == 0 and (nheads_kv == 1 or nheads_kv % devices == 0)

    def placements(
        self, name: str, shape: Any, division: tuple[str, ...], shared: type[Placement] = Replicate
    ) -> tuple[Placement, ...]:
        """A tensor's placements; shared: the kind for all devices together."""
        return tuple(self._placement(name, shape, one, shared) for one in division)

    def _placement(self, name: str, shape: Any, one: str, shared: type[Placement]) -> Placement:
        dim = _DIMS[one].get(name) if one else None
        if dim is not None and -dim <= len(shape):
            whole = self._rows[0] if one == "batch" else self._rows[-2]
            if shape[dim] != 1 or whole == 1:
                return Shard(dim % len(shape))
        return shared() if one else Replicate()

    def outputs(self, division: tuple[str, ...]) -> list[Any]:
        """The outputs' placements; for a list of tensors a list of pairs, with tensors like them."""
        replicated = self.placements("", (), division)
        if self.op is torch.ops.cute_attn.backward.default:
            return self._gradients(division, replicated)
        out = self.placements("out", self._rows, division)
        lse = self.placements("lse", (*self._rows[:-3], self._rows[-2], self._rows[-3]), division)
        softmax = self.placements("softmax", (self._rows[0], self._rows[-2], 0, 0), division)
        return [out, lse, {"softmax": softmax, "max_scores": lse}.get(self.given["aux"], replicated)]

    def _gradients(self, division: tuple[str, ...], replicated: tuple[Placement, ...]) -> list[Any]:
        needed = [*self.given["needed"], *itertools.repeat(False, len(self.tensors))]
        metas: Any = (
            x.strategies[0].output_spec.tensor_meta for name, x in self.tensors if name == "epilogue_tensors"
        )
        named = [
            self.placements(name, self.given[name].shape, division, Partial) if wanted else replicated
            for name, wanted in zip(DIFFERENTIABLE, needed, strict=False)
        ]
        captured = [
            (
                self.placements("", (), division, Partial) if wanted else replicated,
                torch.empty(x.shape if wanted else 0, dtype=x.dtype, device="meta"),
            )
            for x, wanted in zip(metas, needed[len(DIFFERENTIABLE) :], strict=False)
        ]
        return [*named, captured]

    def keeps_caches(self, own: list[DTensorSpec]) -> bool:
        """False if an append would write to copies of the caches."""
        if self.given.get("k_cache") is None or self.given["k"] is None:
            return True
        pairs = zip(self.tensors, own, strict=True)
        return all(
            spec.placements == strategy.strategies[0].output_spec.placements
            for (name, strategy), spec in pairs
            if name in ("k_cache", "v_cache")
        )
