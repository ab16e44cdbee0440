"""Traces as text for exported programs, whose loaders have not traced the functions. Imports no compiler."""

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions.graph import Graph, Node, ordered
from cute_attn.epilogues.functions.trace import Trace


def text_of(traced: Trace) -> str:
    """A trace as ASCII letters, digits, "-", "_" and "="."""
    partial = None if traced.partial is None else _listed(traced.partial)
    content = [_listed(traced), partial, traced.unites]
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(content).encode())).decode()


def trace_of(text: str) -> Trace:
    """The trace of a :func:`text_of`, with meta tensors."""
    traced, partial, unites = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
    return replace(_trace(*traced), partial=None if partial is None else _trace(*partial), unites=unites)


def _listed(traced: Trace) -> list[Any]:
    nodes = ordered(traced.output)
    number = {node: i for i, node in enumerate(nodes)}
    rows = [[x.op, x.kind, [number[arg] for arg in x.args], x.value, x.depends_on, x.dtype] for x in nodes]
    tensors = [
        [str(x.dtype).removeprefix("torch."), x.dim(), x.dim() == 0 or x.stride(-1) == 1]
        for x in traced.tensors
    ]
    return [rows, tensors]


def _trace(rows: list[list[Any]], tensors: list[list[Any]]) -> Trace:
    graph, made = Graph(), list[Node]()
    for op, kind, args, value, depends_on, dtype in rows:
        value = tuple(value) if isinstance(value, list) else value
        made.append(graph.make(op, kind, [made[i] for i in args], value, depends_on, dtype))
    return Trace(graph, made[-1], tuple(_like(*one) for one in tensors))


def _like(dtype: str, dim: int, unit_stride: bool) -> Tensor:
    made = torch.empty((2,) * dim, dtype=getattr(torch, dtype), device="meta")
    return made if unit_stride else made.as_strided(made.shape, (*made.stride()[:-1], 2))
