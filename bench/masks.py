"""What does a mask cost, forward and backward, next to this package's own causal kernel and the peers of the same run?

    python -m bench.masks                       every row; writes bench/results/DATE-GPU-masks.json
    python -m bench.masks 'd64-*' '*-causal'    the rows whose name matches
    python -m bench.masks --compile 0/8         build an eighth of the package's kernels, without a GPU
    python -m bench.masks --list                their names

Needs a GPU. One sequence of 16,384 tokens with 16 heads in bf16: eight masks as a BlockMask, then functions of scores
under a causal mask. ``built_in`` is the package's kernel that has the mask or the function as an option, or else its
causal kernel, which visits other scores. Peers get the same blocks: FlashAttention-4 as lists, FlexAttention
compiled. Each output is compared with the package's.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import run

SEQLEN, HEADS, BLOCK = 16384, 16, 128
GRID, RADIUS = 128, 8
"""Side of a neighbourhood's image, and how far a query sees in it."""
DOCUMENT, PREFIX, WINDOW, FIRST, REACH = 1500, 2048, 1024, 128, 4096
WRONG = 0.02
"""Maximum difference between outputs, relative to the largest element."""


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < WINDOW)


def streaming(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The first keys and a window."""
    return (q >= kv) & ((q - kv < WINDOW) | (kv < FIRST))


def prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) | (kv < PREFIX)


def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Causal in documents of equal length."""
    return (q >= kv) & (q // DOCUMENT == kv // DOCUMENT)


def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Every fourth key of a window: all of its blocks are partial."""
    return (q >= kv) & (q - kv < REACH) & ((q - kv) % 4 == 0)


def neighbourhood(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A square around the query in an image."""
    rows, columns = q // GRID - kv // GRID, q % GRID - kv % GRID
    return (rows <= RADIUS) & (rows >= -RADIUS) & (columns <= RADIUS) & (columns >= -RADIUS)


def blocks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A quarter of all blocks, none of them partial."""
    return (q // BLOCK * 7 + kv // BLOCK * 13) % 4 == 0


MASKS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (causal, window, streaming, prefix, documents, dilated, neighbourhood, blocks)
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (WINDOW - 1, 0)},
}
"""Options of the masks that kernels have built in."""


@dataclass(frozen=True)
class Row:
    """A mask or a function with a head dim.

    Attributes:
        kind: a key of ``MASKS``, or ``alibi``, ``softcap`` or ``t5``, whose table has a gradient.
        head_dim: of q, k and v.
    """

    kind: str
    head_dim: int
    inputs: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return f"d{self.head_dim}-{self.kind}"

    @functools.cached_property
    def mask(self) -> Any:
        """The BlockMask of a mask; None for a function."""
        from cute_attn import block_mask

        if self.kind not in MASKS:
            return None
        return block_mask(MASKS[self.kind], None, None, SEQLEN, SEQLEN, device=self.inputs["q"].device)


def rows() -> Iterator[Row]:
    for head_dim in (64, 128):
        for kind in (*MASKS, "alibi", "softcap", "t5"):
            yield Row(kind, head_dim)


def prepared(row: Row, device: str) -> Row:
    """The row with its tensors: q, k, v and a gradient (batch, seqlen, heads, head_dim), slopes and T5's table."""
    import torch

    shape = (1, SEQLEN, HEADS, row.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    for name in ("q", "k", "v", "grad"):
        made = torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)
        row.inputs[name] = made.requires_grad_(name != "grad")
    row.inputs["slopes"] = torch.exp2(-torch.arange(1, HEADS + 1, device=device) * 8 / HEADS).float()
    row.inputs["table"] = torch.zeros(HEADS, 32, device=device).requires_grad_()
    return row


# ---- functions ----


def function_of(row: Row) -> Callable[..., Any]:
    """The row's ``score_mod``."""
    import torch

    slopes, table = row.inputs["slopes"], row.inputs["table"]

    def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slopes[h] * (kv - q)

    def softcap(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 30 * torch.tanh(score / 30)

    def t5(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).clamp(min=0)
        large = 16 + (torch.log(distance.clamp(min=1) / 16.0) / math.log(128 / 16) * 16).to(torch.int32)
        return score + table[h, torch.where(distance < 16, distance, large.clamp(max=31))]

    return {"alibi": alibi, "softcap": softcap, "t5": t5}[row.kind]


# ---- implementations ----

Forward = Callable[[], Any]


def cute(row: Row, **options: Any) -> Forward:
    """The package, with the mask as a BlockMask or with the function."""
    from cute_attn import attention

    q, k, v = (row.inputs[name] for name in "qkv")
    if row.mask is not None:
        return lambda: attention(q, k, v, block_mask=row.mask, **options)
    function = function_of(row)
    return lambda: attention(q, k, v, causal=True, score_mod=function, **options)


def deterministic(row: Row) -> Forward:
    """The package, with gradients that repeat bit for bit."""
    return cute(row, deterministic=True)


def built_in(row: Row) -> Forward:
    """The package's kernel with the mask or the function as an option, or its causal one."""
    from cute_attn import attention

    q, k, v = (row.inputs[name] for name in "qkv")
    options = OPTIONS.get(row.kind, {"causal": True})
    if row.kind == "alibi":
        options = options | {"alibi_slopes": row.inputs["slopes"]}
    if row.kind == "softcap":
        options = options | {"softcap": 30.0}
    return lambda: attention(q, k, v, **options)


def fa4(row: Row) -> Forward:
    """FlashAttention-4: the same mask, in CuTe's operators, and the same blocks."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    if row.mask is None:
        raise NotImplementedError("functions are not written for it here")
    function, mask = MASKS[row.kind], row.mask

    def lists(of: str) -> Any:
        names = f"{of}_num_blocks {of}_indices full_{of}_num_blocks full_{of}_indices".split()
        return BlockSparseTensorsTorch(*(getattr(mask, name) for name in names), block_size=(BLOCK, BLOCK))

    def of_indices(b: Any, h: Any, q: Any, kv: Any, seqlens: Any, tensors: Any) -> Any:
        return function(b, h, q, kv)

    q, k, v = (row.inputs[name] for name in "qkv")
    options = {"block_sparse_tensors": lists("kv"), "block_sparse_tensors_bwd": lists("q")}
    return lambda: flash_attn_func(q, k, v, mask_mod=of_indices, **options)[0]


def flex(row: Row) -> Forward:
    """FlexAttention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    from cute_attn import block_mask

    torch.compiler.reset()  # after a few functions more it would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    mask, function = row.mask, None
    if mask is None:
        mask = block_mask(causal, None, None, SEQLEN, SEQLEN, device=row.inputs["q"].device)
        function = function_of(row)

    def call() -> Any:
        q, k, v = (row.inputs[name].transpose(1, 2) for name in "qkv")
        return compiled(q, k, v, block_mask=mask, score_mod=function).transpose(1, 2)

    return call


IMPLEMENTATIONS: dict[str, Callable[[Row], Forward]] = {
    one.__name__: one for one in (cute, deterministic, built_in, fa4, flex)
}


# ---- timing ----


def needs(row: Row) -> list[Any]:
    """The inputs that have gradients."""
    return [row.inputs[name] for name in ("q", "k", "v", *(["table"] if row.kind == "t5" else []))]


def steps(row: Row, name: str, forward: Forward) -> tuple[Forward, Forward]:
    """A forward without gradients, and a backward alone."""
    import torch

    out = forward()
    own = needs(row)[: 3 if name == "built_in" else None]

    def alone() -> Any:
        with torch.no_grad():
            return forward()

    return alone, lambda: torch.autograd.grad(out, own, row.inputs["grad"], retain_graph=True)


def measure(row: Row, names: Sequence[str], clock: Any, milliseconds: float) -> Iterator[dict[str, Any]]:
    """A result for each implementation, or the first line of its error."""
    import torch

    from cute_attn.lab.benchmark.results import difference, first_line

    prepared(row, "cuda")
    both, errors = dict[str, tuple[Forward, Forward]](), dict[str, str]()
    expected = cute(row)().detach()
    for name in names:
        try:
            both[name] = steps(row, name, IMPLEMENTATIONS[name](row))
            off = difference(both[name][0](), expected)
            both[name][1]()
            torch.cuda.synchronize()
            if off > WRONG and (name != "built_in" or row.kind in OPTIONS):
                errors[name] = f"its output differs by {off:.2g}"
        except Exception as error:  # a row of the table
            both.pop(name, None)
            errors[name] = first_line(error)
    for index, op in enumerate(("forward", "backward")):
        times = clock.medians({name: pair[index] for name, pair in both.items()}, milliseconds, 3)
        for name in names:
            result = {"workload": row.name, "op": op, "impl": name}
            note = {"error": errors[name]} if name in errors else {}
            yield result | ({"ms": round(times[name], 4)} if name in times else {}) | note


def table(results: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of each row, and geometric means of the peers' times over the package's."""
    times = {(r["workload"], r["op"], r["impl"]): r["ms"] for r in results if "ms" in r and "error" not in r}
    names = list(dict.fromkeys(r["impl"] for r in results))
    lines = [f"{'ms':28}" + "".join(f"{name:>10}" for name in names)]
    for workload, op in dict.fromkeys((r["workload"], r["op"]) for r in results):
        own = (times.get((workload, op, name)) for name in names)
        lines.append(f"{workload:18} {op:9}" + "".join(f"{ms:10.3f}" if ms else f"{'-':>10}" for ms in own))
    for op in ("forward", "backward"):
        for name in names:
            found = [
                ms / times[workload, of, "cute"]
                for (workload, of, impl), ms in times.items()
                if impl == name != "cute" and of == op and (workload, of, "cute") in times
            ]
            if found:
                mean = statistics.geometric_mean(found)
                lines.append(
                    f"{op}: {name} takes {mean:.2f} of the time over {len(found)} rows, least {min(found):.2f}"
                )
    return "\n".join(lines)


def needed(chosen: Sequence[Row]) -> dict[str, tuple[Any, str]]:
    """(kernel, target) by a name of all that the package launches for these rows."""
    with run.machine_of_tests().launches() as (_, found):
        for row in chosen:
            prepared(row, "cpu")
            for implementation in (cute, deterministic, built_in):
                implementation(row)().backward(row.inputs["grad"])
            row.inputs.clear()
    return found


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--impl", nargs="*", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    parser.add_argument("--milliseconds", type=float, default=30, help="how long each is timed a row")
    only = "build some of the kernels, without a GPU"
    parser.add_argument("--compile", metavar="PART/PARTS", help=only)
    parser.add_argument("-o", "--output", type=Path, help="the file to write")
    options = parser.parse_args()
    chosen = run.choose(options, {row.name: row for row in rows()})
    if options.compile:
        run.build(needed(chosen), options.compile)
        return

    run.need_gpu()
    from cute_attn.lab.benchmark.results import default_path, machine, write
    from cute_attn.lab.benchmark.timing import Clock

    clock, result = Clock(), machine() | {"rows": list[dict[str, Any]]()}
    path = options.output or default_path(run.RESULTS, "masks", result)
    names = list(dict.fromkeys(("cute", *options.impl)))
    for row in chosen:
        for one in measure(row, names, clock, options.milliseconds):
            result["rows"].append(one)
            print(*one.values(), flush=True)
        write(result, path)
        row.inputs.clear()
    print(f"\n{table(result['rows'])}\n{result['gpu']}; wrote {path}")


if __name__ == "__main__":
    main()
