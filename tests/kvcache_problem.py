"""Calls of attention with a cache: their tensors and expected results."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cute_attn import reference
from cute_attn.api.append import ARGUMENTS as APPEND
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.block_masks import kinds_of
from cute_attn.host.call import Call
from cute_attn.reference import kvcache as ref
from tests.fuzz import oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; lengths of each sequence."""

    lengths: tuple[int, ...]  # before the append
    new: tuple[int, ...] = ()  # rows to append, none without
    queries: tuple[int, ...] = ()  # by default one per sequence
    capacity: int = 24
    page: int = 0  # rows of a page; 0: contiguous
    batch_idx: tuple[int, ...] = ()
    leftpad: tuple[int, ...] = ()
    packed: bool = False
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 8)
    rotary: int = 0  # elements that are turned
    interleaved: bool = True
    rotary_seqlens: tuple[int, ...] = ()
    mask: str = ""
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    alibi: str = ""  # "heads" or "batch"
    blocks: str = ""  # a BlockMask: "one" for all sequences and heads, or one for "each"
    block: int = 8  # rows and columns of its blocks
    bias: str = ""  # "whole", or the dimensions of size 1 among "bhq"
    sinks: bool = False
    tree: bool = False
    functions: bool = False  # score_mod and mask_mod that read all inputs

    @property
    def batch(self) -> int:
        return len(self.lengths)


def random_case(seed: int, appends: bool = False) -> Case:
    """appends: whether all calls append rows."""
    pick = random.Random(seed)
    batch, packed, page = pick.randint(1, 4), pick.random() < 0.5, pick.choice((0, 0, 1, 2, 3, 5, 7))
    capacity = page * pick.randint(2, 6) if page else pick.randint(5, 20)

    def drawn(low: int, high: int, chance: float = 1.0) -> tuple[int, ...]:
        return tuple(pick.randint(low, high) for _ in range(batch)) if pick.random() < chance else ()

    def rows(high: int) -> tuple[int, ...]:
        return drawn(0, high) if packed else (pick.randint(1, high),) * batch

    return Case(
        lengths=drawn(0, capacity),
        new=rows(5) if appends or pick.random() < 0.6 else (),
        queries=rows(4),
        capacity=capacity,
        page=page,
        batch_idx=tuple(pick.sample(range(batch + 2), batch)) if pick.random() < 0.4 else (),
        leftpad=drawn(0, 4, 0.4),
        packed=packed,
        heads=pick.choice(((1, 1), (2, 2), (3, 1), (4, 2), (6, 3))),
        dims=pick.choice(((16, 8), (40, 16))),
        rotary=pick.choice((0, 2, 6, 8, 16)),
        interleaved=pick.random() < 0.5,
        rotary_seqlens=drawn(-3, 50, 0.3),
        mask=pick.choice(("", "causal", "window")),
        window=(pick.choice((0, 3, UNBOUNDED)), pick.choice((0, 2, UNBOUNDED))),
        softcap=pick.choice((0.0, 2.0)),
        alibi=pick.choice(("", "heads", "batch")),
        sinks=pick.random() < 0.3,
        functions=pick.random() < 0.2,
        bias=pick.choice(("", "", "whole", "b", "h", "hq")),
        blocks=pick.choice(("", "", "", "one", "each")),
    )


UNALIGNED = {1: (13, 6), 2: (18, 10), 4: (20, 12)}
"""Head dims whose rows start at multiples of so many elements."""

CASES = {
    "plain": Case((5, 17, 1)),
    "empty": Case((0, 3), queries=(2, 2)),
    "all-empty": Case((0, 0)),
    "full": Case((24, 24), queries=(3, 3), mask="causal"),
    "append": Case((4, 0, 20), new=(3, 3, 3), mask="causal", queries=(3, 3, 3)),
    "append-at-capacity": Case((24, 21), new=(2, 2)),
    "append-beyond-capacity": Case((23, 5), new=(4, 4), mask="causal", queries=(2, 2)),
    "more-new-than-queries": Case((6, 2), new=(5, 5), mask="window", window=(1, 0)),
    "no-queries": Case((6, 2), new=(2, 2), queries=(0, 0)),
    "batch-idx": Case((4, 9, 13), new=(2, 2, 2), batch_idx=(3, 0, 4)),
    "shared-entry": Case((4, 9, 13), batch_idx=(1, 1, 0)),
    "page-1": Case((4, 9), new=(2, 2), page=1),
    "page-3": Case((4, 9), new=(4, 4), page=3, mask="causal", queries=(3, 3)),
    "page-16": Case((18, 38), new=(2, 2), page=16, capacity=64),
    "page-19": Case((18, 38), new=(2, 2), page=19, capacity=57),
    "page-beyond-capacity": Case((11, 7), new=(4, 4), page=4, capacity=12),
    "page-batch-idx": Case((4, 9), new=(2, 2), page=2, batch_idx=(2, 0)),
    "leftpad": Case((7, 12), leftpad=(3, 0), mask="causal", queries=(4, 4)),
    "leftpad-append": Case((7, 12), leftpad=(2, 5), new=(3, 3), rotary=4, mask="causal", queries=(3, 3)),
    "leftpad-everything": Case((7, 5), leftpad=(7, 9), alibi="heads"),
    "leftpad-page": Case((7, 12), leftpad=(3, 4), page=3, mask="window", window=(4, 0), queries=(2, 2)),
    "packed": Case((5, 0, 9), queries=(3, 1, 0), packed=True, mask="causal"),
    "packed-append": Case((5, 0, 9), queries=(2, 4, 0), new=(2, 4, 3), packed=True, mask="causal", rotary=8),
    "rotary-all": Case((5, 9), new=(1, 1), rotary=16),
    "rotary-halves": Case((5, 9), new=(2, 2), rotary=6, interleaved=False, queries=(2, 2)),
    "rotary-halves-causal": Case((5, 9), new=(2, 2), rotary=6, interleaved=False, queries=(2, 2), mask="causal"),
    "rotary-window": Case((5, 9), new=(2, 2), rotary=4, queries=(3, 3), mask="window", window=(2, 3)),
    "rotary-wide-window": Case((5, 9), new=(2, 2), rotary=4, queries=(3, 3), mask="window", window=(99, 99)),
    "rotary-seqlens": Case((5, 9), new=(2, 2), rotary=4, rotary_seqlens=(11, 2), queries=(2, 2), mask="causal"),
    "rotary-beyond-table": Case((5, 9), new=(2, 2), rotary=4, rotary_seqlens=(90, -5)),
    "rotary-beyond-int32": Case((5, 9), new=(3, 3), rotary=4, rotary_seqlens=(2**31 - 1, 2**31 - 2), queries=(3, 3),
                                mask="causal"),
    "rotary-queries-alone": Case((5, 9), rotary=4, queries=(2, 2), mask="causal"),
    "window-left": Case((5, 19), queries=(3, 3), mask="window", window=(2, UNBOUNDED)),
    "window-past": Case((2, 19), queries=(5, 5), mask="window", window=(3, 0)),
    "more-queries-than-keys": Case((2, 0), queries=(5, 5), mask="causal"),
    "softcap": Case((5, 9), softcap=1.5),
    "alibi-heads": Case((5, 9), alibi="heads", queries=(2, 2), mask="causal"),
    "alibi-batch": Case((5, 9), alibi="batch", queries=(2, 2), leftpad=(1, 3)),
    "sinks": Case((5, 0), sinks=True, queries=(2, 2), mask="causal"),
    "sinks-packed": Case((5, 0, 9), queries=(3, 1, 0), packed=True, sinks=True, heads=(4, 2), alibi="batch"),
    "tree": Case((5, 19), queries=(4, 4), tree=True),
    "tree-alone": Case((3, 0, 5), queries=(5, 5, 5), tree=True, mask="causal"),
    "tree-packed": Case((35, 0, 60), queries=(33, 1, 40), packed=True, tree=True, capacity=64, sinks=True),
    "tree-page-leftpad": Case((7, 12), queries=(4, 4), tree=True, page=3, leftpad=(5, 4), softcap=1.5),
    "functions": Case((5, 0, 9), functions=True, heads=(6, 2), queries=(3, 3, 3)),
    "functions-leftpad-page": Case((7, 12), functions=True, page=3, leftpad=(3, 4), mask="causal", queries=(2, 2)),
    "functions-packed-append": Case((5, 0, 9), queries=(2, 4, 0), new=(2, 4, 3), packed=True, functions=True, rotary=4,
                                    heads=(5, 1), softcap=1.5, sinks=True, mask="window", window=(4, 1)),
    "functions-leftpad": Case((17, 60), functions=True, leftpad=(3, 14), heads=(8, 1), capacity=64, alibi="batch"),
    "bias": Case((5, 0, 24), bias="whole", heads=(6, 2), queries=(3, 3, 3)),
    "bias-leftpad-page": Case((7, 12), bias="h", page=3, leftpad=(3, 4), mask="causal", queries=(2, 2), heads=(5, 1)),
    "bias-leftpad": Case((17, 60), bias="whole", leftpad=(3, 14), heads=(8, 1), capacity=64, alibi="batch"),
    "bias-packed-append": Case((5, 0, 9), queries=(2, 4, 0), new=(2, 4, 3), packed=True, bias="b", rotary=4, sinks=True,
                               heads=(4, 1), functions=True, mask="window", window=(4, 1)),
    "bias-tree": Case((5, 19), queries=(4, 4), tree=True, bias="bq", heads=(4, 2), page=16, capacity=32),
    "blocks": Case((17, 60, 0), blocks="one", capacity=64, heads=(8, 1), queries=(12, 12, 12)),
    "blocks-page-append": Case((17, 40), blocks="each", new=(3, 3), page=16, capacity=64, heads=(4, 1), bias="whole",
                               queries=(3, 3), softcap=1.5),
    "blocks-leftpad": Case((17, 60), blocks="one", functions=True, leftpad=(3, 14), heads=(6, 2), capacity=64),
    "blocks-packed": Case((5, 0, 39), blocks="each", queries=(3, 1, 9), packed=True, tree=True, page=8, capacity=40),
    "groups": Case((5, 9), heads=(6, 2)),
    "groups-of-5": Case((5, 9), heads=(5, 1), dims=(24, 16), mask="causal", queries=(2, 2)),
}  # fmt: skip


def block_mask_of(batch: int, heads: int, queries: int, keys: int, block: int = 8) -> BlockMask:
    """A third of the blocks is full, a third partial, and the others are in no list, though the function shows them."""
    shape = (batch, heads, -(-queries // block), -(-keys // block))
    b, h, i, j = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    kind, lists = (b + h + i + 2 * j) % 3, []
    for one in (1, 2):
        listed = (kind == one).int()
        lists += [listed.sum(-1).int(), listed.sort(dim=-1, descending=True, stable=True).indices.int()]

    def mask_mod(b, h, i, j):
        return (i + j + h) % 5 != 0

    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(queries, keys))


def shown_by(mask: BlockMask) -> Callable[..., torch.Tensor]:
    """The mask as a function of positions, read from its lists one by one."""
    counts, full, (rows, columns) = mask.kv_num_blocks, mask.full_kv_num_blocks, mask.BLOCK_SIZE
    shape = (*counts.shape, mask.kv_indices.shape[3])
    kinds = torch.zeros(shape, dtype=torch.int64)
    for place in itertools.product(*map(range, counts.shape)):
        kinds[place][mask.kv_indices[place][: counts[place]].long().cpu()] = 1
        kinds[place][mask.full_kv_indices[place][: full[place]].long().cpu()] = 2
    kinds = kinds.to(counts.device)

    def shows(b, h, i, j):
        kind = kinds[b if shape[0] > 1 else 0, h if shape[1] > 1 else 0, i // rows, j // columns]
        return (kind == 2) | ((kind == 1) & mask.mask_mod(b, h, i, j))

    return shows


class Problem:
    """Tensors of a case; rows that no sequence has are NaN."""

    def __init__(self, case: Case, seed: int = 0, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.case, self.device = case, "cpu"
        entries = max((*case.batch_idx, case.batch - 1)) + 1
        heads, heads_kv = case.heads
        self.table, shape = None, (entries, case.capacity)
        if case.page:
            per_entry = case.capacity // case.page
            pages = list(range(entries * per_entry + 2))
            random.Random(seed).shuffle(pages)
            self.table = torch.tensor(pages[: entries * per_entry], dtype=torch.int32).view(entries, -1)
            shape = (len(pages), case.page)
        self.k, self.v = (randn(*shape, heads_kv, dim) for dim in case.dims)
        self.forget_unused()
        queries, new = case.queries or (1,) * case.batch, case.new
        if case.packed:
            self.q = randn(sum(queries), heads, case.dims[0])
            self.new = [randn(sum(new), heads_kv, dim) for dim in case.dims] if new else None
        else:
            self.q = randn(case.batch, queries[0], heads, case.dims[0])
            self.new = [randn(case.batch, new[0], heads_kv, dim) for dim in case.dims] if new else None
        self.cu_q, self.cu_new = (self.cumulative(n) if case.packed else None for n in (queries, new))
        angle = randn(max(40, case.capacity), case.rotary // 2)
        self.rotary = None
        if case.rotary:
            seqlens = self.int32(case.rotary_seqlens)
            self.rotary = ref.Rotary(angle.cos(), angle.sin(), case.interleaved, seqlens)
        shape = (heads,) if case.alibi == "heads" else (case.batch, heads)
        self.slopes = randn(*shape).abs() if case.alibi else None
        self.sinks = 3 * randn(heads) if case.sinks else None
        rows, words = math.prod(self.q.shape[:-2]), -(-max(queries) // 32)
        bits = torch.randint(-(2**31), 2**31, (rows, words), generator=generator, dtype=torch.int32)
        self.tree = bits if case.tree else None
        shape = (case.batch, heads, max(*queries, 1), case.capacity)
        self.added = randn(*shape).float() if case.functions else None
        sizes = zip("bhqk", shape, strict=True)
        bias = 2 * randn(*(1 if axis in case.bias else n for axis, n in sizes))
        sizes = shape[:2] if case.blocks == "each" else (1, 1)
        self.blocks = block_mask_of(*sizes, *shape[2:], case.block) if case.blocks else None
        self.bias = None
        if case.bias:
            self.bias = bias.masked_fill(bias > 3, -math.inf)
            longest = max(map(sum, zip(case.lengths, new or (0,) * case.batch, strict=True)))
            self.bias[..., max(longest, 1) :] = math.nan  # columns of no sequence

    def share(self) -> "Problem":
        """The same problem with latent values, which are the first columns of the keys, in the same memory."""
        columns = self.case.dims[1]
        self.v = self.k[..., :columns]
        self.new = self.new and [self.new[0], self.new[0][..., :columns]]
        return self

    def apart(self) -> "Problem":
        """The same problem with values in separate memory."""
        self.v, self.new = self.v.clone(), self.new and [x.clone() for x in self.new]
        return self

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device) if values else None

    def to(self, device: str) -> "Problem":
        """The same problem on another device."""
        self.device = device
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor | BlockMask):
                setattr(self, name, value.to(device))
        self.new = self.new and [x.to(device) for x in self.new]
        if self.rotary is not None:
            angles = (self.rotary.cos.to(device), self.rotary.sin.to(device))
            self.rotary = ref.Rotary(*angles, self.case.interleaved, self.int32(self.case.rotary_seqlens))
        return self

    def cumulative(self, lengths):
        return self.int32([sum(lengths[:i]) for i in range(len(lengths) + 1)] if lengths else ())

    @property
    def cache(self) -> ref.Cache:
        return ref.Cache(self.k, self.v, self.table, self.int32(self.case.batch_idx))

    def hide(self) -> None:
        """Fill the keys and values of blocks that no query of a kv head sees with NaN."""
        case, seen = self.case, (kinds_of(self.blocks) > 0).any(2)
        seen = seen.expand(case.batch, case.heads[0], -1).unflatten(1, (case.heads[1], -1)).any(2)
        for b, length in enumerate(case.lengths):
            for row in range(length):
                for x in (self.k, self.v):
                    x[self.place(b, row)][~seen[b, :, row // case.block]] = math.nan

    def append(self) -> Call:
        """Only the append."""
        cache, new, rotary = self.cache, self.new or (None, None), self.rotary
        cu_new = self.cu_new if self.new else None
        angles = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.seqlens)
        lengths, interleaved = self.int32(self.case.lengths), self.case.interleaved
        tables = (cache.page_table, cache.batch_idx)
        return Call.of(APPEND, (cache.k, cache.v, *new, lengths, *tables, cu_new, *angles, interleaved))

    def append_arguments(self) -> dict[str, Any]:
        """Arguments of ``append_kv``."""
        return dict(zip(APPEND, self.append().values(APPEND), strict=True))

    def options(self) -> dict[str, Any]:
        """Arguments of attention_with_kvcache other than q and the caches."""
        case, given = self.case, self.append_arguments()
        del given["k_cache"], given["v_cache"]
        window = tuple(None if bound == UNBOUNDED else bound for bound in case.window)
        return given | {
            "cache_leftpad": self.int32(case.leftpad),
            "cu_seqlens_q": self.cu_q,
            "max_seqlen_q": max(case.queries or (1,)) if case.packed else None,
            "softmax_scale": 0.3,
            "causal": case.mask == "causal",
            "window": window if case.mask == "window" else (None, None),
            "softcap": case.softcap,
            "alibi_slopes": self.slopes,
            "bias": self.bias,
            "sinks": self.sinks,
            "tree_mask": self.tree,
            "block_mask": self.blocks,
            **(self.functions() if case.functions else {}),
        }

    def functions(self) -> dict[str, Any]:
        """score_mod and mask_mod."""
        added = self.added
        return {
            "score_mod": lambda score, b, h, i, j: score + added[b, h, i, j],
            "mask_mod": lambda b, h, i, j: (2 * b + h + i + j) % 3 != 0,
        }

    def epilogues(self) -> dict[str, tuple]:
        """The traced functions as epilogues, with their tensors."""
        if not self.case.functions and self.blocks is None:
            return {}
        functions = self.definition()
        name, tensors = epilogue_of(functions.get("score_mod"), functions["mask_mod"])
        return {name: tensors}

    def definition(self) -> dict[str, Any]:
        """The functions, with what the blocks show as a part of mask_mod."""
        found = self.functions() if self.case.functions else {}
        if self.blocks is not None:
            own, shows = found.get("mask_mod"), shown_by(self.blocks)
            found["mask_mod"] = shows if own is None else lambda *at: own(*at) & shows(*at)
        return found

    def place(self, b: int, row: int) -> tuple[int, int]:
        """Index of a row of sequence b in the cache, computed once more from the definition."""
        entry = self.case.batch_idx[b] if self.case.batch_idx else b
        if self.table is None:
            return entry, row
        return int(self.table[entry][row // self.case.page]), row % self.case.page

    def forget_unused(self):
        case, used = self.case, set()
        for b, length in enumerate(case.lengths):
            pad = case.leftpad[b] if case.leftpad else 0
            used |= {self.place(b, row) for row in range(pad, min(length, case.capacity))}
        for page in range(self.k.shape[0]):
            for row in range(self.k.shape[1]):
                if (page, row) not in used:
                    self.k[page, row], self.v[page, row] = math.nan, math.inf

    def run(self):
        """Results by definition: the cache after the call, out and lse."""
        case = self.case
        lengths, q = self.int32(case.lengths), self.q
        total = lengths
        if self.new is not None:
            ref.append(self.cache, *self.new, lengths, cu_seqlens_k_new=self.cu_new, rotary=self.rotary)
            total = lengths + self.int32(case.new)
        if self.rotary is not None:
            start = lengths if self.rotary.seqlens is None else self.rotary.seqlens
            positions = ref.query_positions(start, self.cu_q, q.shape[:-2], bool(case.mask))
            q = ref.rotate(q.flatten(0, -3), positions, self.rotary).view(q.shape)
        own = self.epilogues()
        return ref.attention(
            q,
            self.cache,
            0.3,
            ref.Lengths(total, self.int32(case.leftpad), self.cu_q),
            reference.Features(case.mask, epilogues=tuple(user_epilogue(name).reference for name in own)),
            ScoreInputs(
                *case.window,
                alibi_slopes=self.slopes,
                bias=self.bias,
                softcap=case.softcap,
                sinks=self.sinks,
                tree_mask=self.tree,
                extra=own,
            ),
        )

    # ---- the same, one sequence after the other, by the oracle ----

    def turned(self, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Rows of heads (rows, heads, dim), each turned by the angles of its position."""
        pairs, last = self.case.rotary // 2, self.rotary.cos.shape[0] - 1
        at = [min(max(position, 0), last) for position in positions]
        cos, sin = (angles[at].unsqueeze(1) for angles in (self.rotary.cos, self.rotary.sin))
        one, two = slice(pairs), slice(pairs, 2 * pairs)
        if self.case.interleaved:
            one, two = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        found = x.clone()
        found[..., one] = x[..., one] * cos - x[..., two] * sin
        found[..., two] = x[..., one] * sin + x[..., two] * cos
        return found

    def rows_of(self, x, b, cumulative):
        return x[b] if cumulative is None else x[cumulative[b] : cumulative[b + 1]]

    def appended(self):
        """The cache after the append."""
        case, k, v = self.case, self.k.clone(), self.v.clone()
        for b in range(case.batch if case.new else 0):
            position = (case.rotary_seqlens or case.lengths)[b]
            new_k, new_v = (self.rows_of(x, b, self.cu_new) for x in self.new)
            if case.rotary:
                new_k = self.turned(new_k, [position + i for i in range(len(new_k))])
            for i in range(min(len(new_k), case.capacity - case.lengths[b])):
                place = self.place(b, case.lengths[b] + i)
                k[place], v[place] = new_k[i], new_v[i]
        return k, v

    def expected(self):
        """out and lse of each sequence, (queries, heads, dim) and (queries, heads), from the cache as it is."""
        case, found = self.case, []
        window = (UNBOUNDED, 0) if case.mask == "causal" else case.window if case.mask else (UNBOUNDED,) * 2
        bounds = tuple(None if bound == UNBOUNDED else bound for bound in window)
        for b in range(case.batch):
            q, start = self.rows_of(self.q, b, self.cu_q), (case.rotary_seqlens or case.lengths)[b]
            if case.rotary:
                q = self.turned(q, [start + (i if case.mask else 0) for i in range(len(q))])
            end = min(case.lengths[b] + (case.new[b] if case.new else 0), case.capacity)
            places = [self.place(b, row) for row in range(case.leftpad[b] if case.leftpad else 0, end)]
            k, v = (torch.stack([x[at] for at in places]) if places else x[0, :0] for x in (self.k, self.v))
            options = oracle.Options(
                0.3,
                softcap=case.softcap,
                alibi=self.slopes,
                bias=self.bias_of(b, len(q), len(k)),
                window=bounds,
                sinks=self.sinks,
                **self.definition(),
            )
            # Both lengths count from leftpad, so that their difference does not depend on it.
            out, lse = oracle.attend(q, k, v, options, q.dtype, b, len(k) - len(q))
            found.append((out, lse.T))
        return zip(*found, strict=True)

    def bias_of(self, b: int, queries: int, keys: int) -> torch.Tensor | None:
        """The bias of a sequence, with -inf for what its tree hides."""
        if self.tree is None:
            return self.bias
        seen = self.seen_in_tree(b, queries, keys)
        if self.bias is None:
            return seen
        bias = self.bias[min(b, len(self.bias) - 1) :][:1, :, :queries, :keys]
        return torch.where(seen, bias, -math.inf)

    def seen_in_tree(self, b: int, queries: int, keys: int) -> torch.Tensor:
        """(1, 1, queries, keys): whether a query sees a key; the last keys are at the queries' positions."""
        first = sum((self.case.queries or (1,) * self.case.batch)[:b])
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        for query, draft in itertools.product(range(queries), range(max(queries - keys, 0), queries)):
            seen[..., query, keys - queries + draft] = (
                int(self.tree[first + query, draft // 32]) >> (draft % 32) & 1
            )
        return seen
