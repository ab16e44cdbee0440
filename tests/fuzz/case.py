"""A case: what one call computes, as a line that can be pasted; how it is drawn, and its tensors and functions."""

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.grammar import DRAWN, FORMS, Choices, draw_body

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "heads_first", "fused", "padded", "expanded", "odd", "last_dim")
SIGNATURES = {"score": "score, b, h, q_idx, kv_idx", "mask": "b, h, q_idx, kv_idx"}


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        lengths: (queries, keys) of packed sequences; else of ``batch`` equal ones of seqlen_q and seqlen_k.
        used: keys in use of each sequence.
        bias: a dtype or "bool"; bias_broadcast: which of "b", "h", "q" and "k" have size 1.
        score, mask: bodies of functions; form: where these have what they capture.
        grads: what requires a gradient: q, k, v, bias, sinks, alibi, and names of captured tensors.
        change: captured name whose value changes between two calls, or ""; replace: by another one instead
            of in place.
        extra: what only some doors read.
        room: sequences, heads and rows that captured tensors have at least, where fewer are drawn.
    """

    door: str = "attention"
    dtype: str = "fp64"
    batch: int = 2
    seqlen_q: int = 5
    seqlen_k: int = 7
    nheads: int = 2
    nheads_kv: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    lengths: tuple[tuple[int, int], ...] = ()
    used: tuple[int, ...] = ()
    causal: bool | str = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    bias: str = ""
    bias_broadcast: str = ""
    bias_layout: str = "contiguous"
    sinks: str = ""
    layout: str = "contiguous"
    score: str = ""
    mask: str = ""
    form: str = "closure"
    grads: tuple[str, ...] = ()
    change: str = ""
    replace: bool = False
    extra: int = 0
    room: tuple[int, int, int] = (1, 1, 1)
    seed: int = 0

    def __repr__(self) -> str:
        own = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{name}={value!r}' for name, value in own)})"

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence."""
        return self.lengths or ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def longest(self) -> tuple[int, int]:
        """The maximum queries and keys of a sequence; for an empty batch, the ones that a sequence would have."""
        given = self.sequences or ((self.seqlen_q, self.seqlen_k),)
        return max(m for m, _ in given), max(n for _, n in given)

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of what the functions capture."""
        words = re.findall(r"\w+", f"{self.score}\n{self.mask}")
        return tuple(name for name in SOURCES if name in words)


# ---- drawing ----


def draw_case(choices: Choices, doors: dict[str, Any], faults: Sequence[str] = DRAWN) -> Case:
    """A random case of one of the doors, with features that the door supports."""
    pick, door = choices.of, choices.of(tuple(doors))
    takes = doors[door].takes
    own: dict[str, Any] = {"door": door, "dtype": pick(doors[door].dtypes), "batch": pick((2, 1, 3, 0, 2, 2))}
    own |= {"seqlen_q": pick((5, 1, 4, 9, 17, 0, 12)), "seqlen_k": pick((7, 1, 4, 9, 21, 0, 12))}
    own["nheads_kv"] = pick((2, 1, 3))
    own["nheads"] = own["nheads_kv"] * (pick((1, 2, 3)) if "gqa" in takes else 1)
    own["head_dim"] = own["head_dim_v"] = pick((8, 16, 40, 64, 104, 7, 33, 256))
    if "nonempty" in takes or ("mostly_nonempty" in takes and choices.number(4)):
        own |= {name: max(1, own[name]) for name in ("batch", "seqlen_q", "seqlen_k")}
    if "aligned" in takes:
        own["head_dim"] = own["head_dim_v"] = own["head_dim"] & ~7 or 8
    if "head_dim_v" in takes and choices.one_in(3):
        own["head_dim_v"] = pick((8, 24, 128, 128 if "aligned" in takes else 65))
    if "lengths" in takes:
        own["lengths"] = tuple((pick((3, 0, 1, 8)), pick((4, 0, 1, 9))) for _ in range(1 + own["batch"]))
    if "used" in takes and choices.one_in(4):
        counts = own.get("lengths") or ((own["seqlen_q"], own["seqlen_k"]),) * own["batch"]
        own["used"] = tuple(choices.number(n + 1) for _, n in counts)
    if "causal" in takes:
        own["causal"] = pick((False, False, True, "top_left") if "top_left" in takes else (False, True))
    if "causal_as_pytorch" in takes:
        own["causal"] = pick((False, "top_left"))
    if "window" in takes and choices.one_in(4):
        behind = ((2, 0), (0, None), (None, 0), (3, 0))
        own["window"] = pick(behind if own["causal"] else ((2, 1), (0, 0), (None, 3)))
    if "scale" in takes and choices.one_in(3):
        own["scale"] = pick((0.5, 1.0, 0.0, -0.25))
    if "softcap" in takes and choices.one_in(4):
        own["softcap"] = pick((2.0, 30.0))
    if "alibi" in takes and choices.one_in(4):
        own["alibi"] = pick(("heads", "batches"))
    if "bias" in takes and choices.one_in(3):
        any_dtype = ("fp32", "same", "bool", "bf16")
        own["bias"] = pick(any_dtype if "any_bias" in takes else ("same", "same", "same", "bool"))
        own["bias_broadcast"] = "".join(x for x in "bhqk" if choices.one_in(3))
        own["bias_layout"] = pick(("contiguous", "padded", "last_dim", "expanded"))
    if "sinks" in takes and choices.one_in(4):
        own["sinks"] = pick(("fp32", "bf16", "fp16"))
    if "layout" in takes:
        own["layout"] = pick(("contiguous", *LAYOUTS))
    for kind in ("score", "mask"):
        if kind in takes and (f"only_{kind}" in takes or choices.number(3)):
            own[kind] = draw_body(choices, kind[0].replace("s", "f"), faults, "arguments" in takes)
    if own.get("score") and own.get("bias") == "bool":
        own["bias"] = "same"  # a function may make -inf finite
    if own.get("score") or own.get("mask"):
        own["form"] = pick(FORMS)
    case = Case(**own, extra=choices.number(64), seed=choices.number(1000))
    leaves = ["q", "k", "v", *(x for x in ("bias", "sinks") if getattr(case, x) not in ("", "bool"))]
    if "own_grads" in takes:
        return replace(case, grads=tuple(x for x in leaves if not choices.one_in(3)))
    leaves += ["alibi"] * bool(case.alibi)
    leaves += [name for name in case.captured if SOURCES[name].is_float]
    if "flash" in door:
        leaves = ["q", "k", "v"]  # FlashAttention's slopes have no gradient
    if "grads" in takes and choices.one_in(2):
        own["grads"] = tuple(x for x in leaves if choices.one_in(2))
    if case.captured and choices.number(4):
        own |= {"change": pick(case.captured), "replace": choices.one_in(2)}
    return Case(**own, extra=case.extra, seed=case.seed)


# ---- what functions capture ----


@dataclass(frozen=True)
class Source:
    """Where a captured value comes from. make: a tensor from the case and a generator, or a Python value without."""

    make: Callable[..., Any]
    is_float: bool = False
    other: Any = None

    def value(self, case: Case, generator: torch.Generator, again: bool) -> Any:
        return self.make(case, generator) if self.other is None else self.other if again else self.make()


def _floats(dtype: torch.dtype, *sizes: Any) -> Source:
    def make(case: Case, generator: torch.Generator) -> Tensor:
        return torch.randn(_shape(case, sizes), generator=generator).to(dtype)

    return Source(make, True)


def _integers(dtype: torch.dtype, low: int, high: int, *sizes: Any) -> Source:
    def make(case: Case, generator: torch.Generator) -> Tensor:
        return torch.randint(low, high, _shape(case, sizes), generator=generator).to(dtype)

    return Source(make)


def _shape(case: Case, sizes: tuple) -> list[int]:
    """ "b", "h", "q", "k" and "l" are batch, heads, queries, keys and the longer of these; at least one each."""
    (m, n), (batch, heads, rows) = case.longest, case.room
    named = {"b": max(batch, len(case.sequences)), "h": max(heads, case.nheads)}
    named |= {"q": max(rows, m), "k": max(rows, n), "l": max(rows, m, n)}
    return [named[x] if isinstance(x, str) else x for x in sizes]


SOURCES = {
    "slopes": _floats(torch.float32, "h"),
    "table": _floats(torch.float32, "h", 9),
    "cube": _floats(torch.float32, "b", "h", 5),
    "rows": _floats(torch.float32, "l"),
    "keys": _floats(torch.float32, "b", "l"),
    "halves": _floats(torch.bfloat16, "h", "k"),
    "halves16": _floats(torch.float16, 6, 3),
    "doubles": _floats(torch.float64, 7),
    "strided": Source(lambda case, g: torch.randn(_shape(case, ("b", 4)), generator=g).T, True),
    "cap": _floats(torch.float32),
    "temperature": _floats(torch.float64),
    "document": Source(
        lambda case, g: torch.randint(0, 3, _shape(case, ("b", "l")), generator=g).sort().values
    ),
    "lengths": _integers(torch.int32, 1, 9, "b"),
    "signed": _integers(torch.int16, -3, 4, 6),
    "unsigned": _integers(torch.uint8, 0, 128, 8),
    "large": _integers(torch.uint8, 128, 250, 8),
    "count": _integers(torch.int64, 1, 6),
    "kept": Source(lambda case, g: torch.rand(_shape(case, ("l",)), generator=g) > 0.3),
    "flag": Source(lambda case, g: torch.rand((), generator=g) > 0.5),
    "tables": Source(lambda case, g: [torch.randn(n, 3, generator=g) for n in _shape(case, ("b", "h"))]),
    "named": Source(lambda case, g: {"cap": torch.randn((), generator=g)}),
    "holder": Source(
        lambda case, g: SimpleNamespace(
            slopes=torch.rand(_shape(case, ("h",)), generator=g), factor=case.seed % 7 / 4
        )
    ),
    "factor": Source(lambda: 0.75, other=0.25),
    "steps": Source(lambda: 3, other=2),
    "on": Source(lambda: True, other=False),
    "pair": Source(lambda: [0.5, 1.5], other=[0.25, -1.0]),
    "options": Source(lambda: {"slope": 0.5}, other={"slope": -1.25}),
}
HELPERS = """
def helper(x):
    return torch.tanh(x) * 2 - x

partial_helper = functools.partial(lambda a, x: a * x, 0.5)
"""


@dataclass
class Functions:
    """score_mod and mask_mod of a case, over values that can change."""

    case: Case
    values: dict[str, Any]
    scope: dict[str, Any] = field(default_factory=dict)
    score_mod: Any = None
    mask_mod: Any = None

    @staticmethod
    def of(case: Case, device: str = "cpu") -> "Functions":
        generator = torch.Generator().manual_seed(case.seed)
        values = {name: _on(SOURCES[name].value(case, generator, False), device) for name in case.captured}
        for name in case.grads:
            if name in values:
                values[name].requires_grad_()
        made = Functions(case, values)
        made.define()
        return made

    def define(self) -> None:
        """New functions over the values."""
        self.scope = {"__name__": "fuzz", "torch": torch, "math": math}
        self.scope |= {"functools": functools, "operator": operator}
        exec(HELPERS, self.scope)
        self.score_mod, self.mask_mod = (
            _defined(self.scope, kind, body, self.case.form, self.values) if body else None
            for kind, body in (("score", self.case.score), ("mask", self.case.mask))
        )

    def wide(self) -> "Functions":
        """The same tensors with captured floats in float64."""

        def widened(x: Tensor) -> Tensor:
            return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

        wide = {name: _mapped(x, widened) for name, x in self.values.items()}
        made = Functions(self.case, wide)
        made.define()
        return made

    def change(self) -> None:
        """Change the value named by the case's ``change``: in place, or by another object."""
        name, case = self.case.change, self.case
        old = self.values[name]
        generator = torch.Generator().manual_seed(case.seed + 1)
        new = _on(SOURCES[name].value(case, generator, True), getattr(old, "device", "cpu"))
        if case.replace or not isinstance(old, Tensor | list | dict | SimpleNamespace):
            if isinstance(new, Tensor):
                new = _otherwise(new, case.extra % 3).requires_grad_(old.requires_grad)
            self.values[name] = new
            self._place(name, new)
        elif isinstance(old, Tensor):
            with torch.no_grad():
                old.copy_(new)
        elif isinstance(old, list):
            old[:] = new
        else:
            (old if isinstance(old, dict) else vars(old)).update(new if isinstance(old, dict) else vars(new))

    def _place(self, name: str, new: Any) -> None:
        """Where the function has it; what nobody can change in a closure or a default is a new function's."""
        if self.case.form == "globals":
            self.scope[name] = new
        elif self.case.form in ("object", "method", "module"):
            for made in (self.score_mod, self.mask_mod):
                owner = getattr(made, "__self__", made)
                if owner is not None and hasattr(owner, name):
                    setattr(owner, name, new)
        else:
            self.define()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_mapped(x, change) for x in value]
    if isinstance(value, dict):
        return {name: _mapped(x, change) for name, x in value.items()}
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**_mapped(vars(value), change))
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value that a function captures."""
    found: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        found.append(x)
        return x

    _mapped(value, noted)
    return found


def _on(value: Any, device: Any) -> Any:
    return _mapped(value, lambda x: x.to(device))


def _otherwise(x: Tensor, how: int) -> Tensor:
    """The values as they are, with other strides, or floats of another dtype."""
    if how == 1 and x.dim():
        return torch.stack((x, x), -1)[..., 0]
    if how == 2 and x.is_floating_point():
        return x.to(torch.float32 if x.dtype != torch.float32 else torch.float16)
    return x


def _defined(scope: dict[str, Any], kind: str, body: str, form: str, values: dict[str, Any]) -> Any:
    """The function of a body, with its captured values in the place that ``form`` names."""
    names = [name for name in values if re.search(rf"\b{name}\b", body)]
    own, arguments = {name: values[name] for name in names}, SIGNATURES[kind]
    inner = "\n".join(f"    {line}" for line in body.split("\n"))
    unpacked = "".join(f"        {name} = self.{name}\n" for name in names)
    method = {"object": "__call__", "method": "mod", "module": "forward"}.get(form, "mod")
    text = {
        "closure": f"def make({', '.join(names)}):\n    def mod({arguments}):\n{inner}\n    return mod",
        "globals": f"def mod({arguments}):\n{body}",
        "partial": f"def mod({', '.join([*names, arguments])}):\n{body}",
        "defaults": f"def mod({', '.join([arguments, *(f'{x}={x}' for x in names)])}):\n{body}",
        "module": f"class Mod(torch.nn.Module):\n    def forward(self, {arguments}):\n{unpacked}{inner}",
    }.get(form, f"class Mod:\n    def {method}(self, {arguments}):\n{unpacked}{inner}")
    if form == "globals":
        scope.update(own)
    exec(text, scope, own if form == "defaults" else (local := {}))
    made = own if form == "defaults" else local
    if form == "closure":
        return made["make"](**own)
    if form in ("globals", "defaults"):
        return made["mod"]
    if form == "partial":
        return functools.partial(made["mod"], *own.values())
    holder = made["Mod"]()
    for name, value in own.items():
        setattr(holder, name, value)
    return holder.mod if form == "method" else holder


# ---- tensors ----


@dataclass(frozen=True)
class Inputs:
    """A case's tensors: of equal sequences (batch, rows, heads, head_dim), of packed ones (total, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    @staticmethod
    def of(case: Case, device: str = "cpu") -> "Inputs":
        generator = torch.Generator().manual_seed(case.seed + 7)
        dtype = DTYPES[case.dtype]

        def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        rows = [
            (sum(x[i] for x in case.lengths),) if case.lengths else (case.batch, case.longest[i])
            for i in (0, 1)
        ]
        made: dict[str, Any] = {
            "q": randn(*rows[0], case.nheads, case.head_dim),
            "k": randn(*rows[1], case.nheads_kv, case.head_dim),
            "v": randn(*rows[1], case.nheads_kv, case.head_dim_v),
        }
        made = dict(zip(made, laid_out(tuple(made.values()), case.layout), strict=True))
        batch = len(case.sequences)
        if case.bias:
            sizes = {"b": batch, "h": case.nheads, "q": case.longest[0], "k": case.longest[1]}
            shape = [1 if x in case.bias_broadcast else n for x, n in sizes.items()]
            plain = randn(*shape, dtype=torch.float32)
            bias = plain > -0.5 if case.bias == "bool" else plain.to(DTYPES.get(case.bias, dtype))
            made["bias"] = laid_out((bias,), case.bias_layout)[0]
        if case.sinks:
            made["sinks"] = randn(case.nheads, dtype=DTYPES[case.sinks])
        if case.alibi:
            heads = (case.nheads,) if case.alibi == "heads" else (batch, case.nheads)
            made["alibi"] = randn(*heads, dtype=torch.float32).abs()
        made = {name: x.to(device).requires_grad_(name in case.grads) for name, x in made.items()}
        return Inputs(**made)

    def leaves(self, case: Case, functions: Functions) -> dict[str, Tensor]:
        """All tensors that require a gradient."""
        named = {x.name: getattr(self, x.name) for x in fields(self)} | functions.values
        return {name: named[name] for name in case.grads}


def laid_out(tensors: tuple[Tensor, ...], layout: str) -> tuple[Tensor, ...]:
    """The same values in another memory layout; "expanded" repeats the first head."""
    if layout == "heads_first":
        return tuple(x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in tensors)
    if layout == "fused" and len({x.shape[:-2] for x in tensors}) == 1:
        whole = torch.cat([x.flatten(-2) for x in tensors], -1)
        parts = whole.split([x.shape[-2] * x.shape[-1] for x in tensors], -1)
        return tuple(part.unflatten(-1, x.shape[-2:]) for part, x in zip(parts, tensors, strict=True))
    if layout in ("padded", "odd") and tensors[0].dtype == torch.bool:
        return tensors
    if layout == "padded":
        return tuple(torch.nn.functional.pad(x, (0, 8), value=math.nan)[..., : x.shape[-1]] for x in tensors)
    if layout == "expanded":
        return tuple(x[..., :1, :].expand(x.shape) for x in tensors)
    if layout == "odd":
        return tuple(torch.nn.functional.pad(x, (1, 2))[..., 1 : 1 + x.shape[-1]] for x in tensors)
    if layout == "last_dim":
        return tuple(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors)
    return tensors
