"""Dropout masks on the card equal PyTorch's bit for bit: of flash and of memory-efficient attention."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from cute_attn import attention, attention_backward, attention_varlen, attention_varlen_backward, reference
from cute_attn.api.attention import draw_rng_state
from cute_attn.host import random_states
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import int32

ARCHS = runnable_archs()
SHAPES = [(1, 1, 16, 32), (2, 3, 113, 203), (3, 4, 128, 64), (1, 2, 257, 500)]


def inputs(batch, nheads, seqlen_q, seqlen_k, nheads_kv=None, head_dim=64):
    torch.manual_seed(1)
    sizes = ((seqlen_q, nheads), (seqlen_k, nheads_kv or nheads), (seqlen_k, nheads_kv or nheads))
    return [torch.randn(batch, n, h, head_dim, dtype=torch.bfloat16, device="cuda") for n, h in sizes]


def coords(batch, nheads, seqlen_q, seqlen_k):
    index = [torch.arange(n, device="cuda") for n in (batch, nheads, seqlen_q, seqlen_k)]
    return reference.ScoreCoords(
        *(x.view([-1 if i == dim else 1 for i in range(4)]) for dim, x in enumerate(index)),
        nheads=nheads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        top_left=False,
    )


def torch_flash(q, k, v, dropout_p):
    """PyTorch's flash attention: out, rng_state as ours, and which elements it keeps."""
    out, _, rng_state, _, debug = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, False, True, scale=0.125
    )
    keep = ~debug[:, :, : q.shape[1], : k.shape[1]].signbit()
    return out, rng_state.view(torch.int64).cuda(), keep


def torch_mem_efficient(q, k, v, dropout_p):
    """PyTorch's memory-efficient attention: out, rng_state as ours, and which elements it keeps."""
    out, _, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, dropout_p, 0, True, scale=0.125
    )
    rng_state = torch.stack([seed, offset]).view(torch.int64).flatten().cuda()
    uniform = torch.empty(q.shape[0], q.shape[2], q.shape[1], k.shape[1], device="cuda")
    torch.ops.aten._fill_mem_eff_dropout_mask_(uniform, dropout_p, int(seed), int(offset))
    return out, rng_state, uniform > dropout_p


CHUNK = 64
"""Keys, or queries, whose dropout one call shows."""


def shown(n, start, nheads):
    """(n, nheads, CHUNK): rows from ``start`` on are the identity's, all others 0."""
    rows = torch.zeros(n, nheads, CHUNK, dtype=torch.bfloat16, device="cuda")
    count = max(0, min(CHUNK, n - start))
    rows[start : start + count] = torch.eye(CHUNK, dtype=torch.bfloat16, device="cuda")[:count, None]
    return rows


def kept(q, k, **options):
    """(batch, nheads, seqlen_q, seqlen_k): which scores of equal ones a forward keeps."""
    (batch, _, _, _), (_, seqlen_k, nheads_kv, _), q = q.shape, k.shape, torch.zeros_like(q)
    masks = []
    for start in range(0, seqlen_k, CHUNK):
        v = shown(seqlen_k, start, nheads_kv).expand(batch, -1, -1, -1).contiguous()
        masks.append((attention(q, k, v, **options) != 0).transpose(1, 2))
    return torch.cat(masks, -1)[..., :seqlen_k]


PEERS = {"flash": torch_flash, "mem_efficient": torch_mem_efficient}


@pytest.mark.parametrize("dropout_p", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", PEERS)
def test_the_definition_is_pytorchs(mask, shape, dropout_p):
    _, rng_state, keep = PEERS[mask](*inputs(*shape), dropout_p)
    ours = reference.DROPOUT_KEEP[mask](coords(*shape), dropout_p, rng_state)
    wrong = int((ours != keep).sum())
    assert wrong == 0, f"{wrong} of {keep.numel()} elements differ"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dropout_p", [0.2, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", PEERS)
def test_the_kernels_mask_is_pytorchs(mask, shape, dropout_p, arch):
    q, k, v = inputs(*shape)
    expected, rng_state, keep = PEERS[mask](q, k, v, dropout_p)
    options = {"dropout_p": dropout_p, "dropout_mask": mask, "rng_state": rng_state, "softmax_scale": 0.125}
    out, softmax = attention(q, k, v, **options, return_softmax=True, kernel=arch)
    assert torch.equal(~softmax.signbit(), keep)
    assert torch.equal(kept(q, k, **options, kernel=arch), keep)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    assert torch.equal(attention(q, k, v, **options, kernel=arch), out), (
        "the forward knows nothing of the matrix"
    )


# ---- PyTorch's numbers of varlen sequences, and beyond 2^32 ----


def as_tensor(state):
    """PyTorch's seed and offset as ``rng_state``."""
    return torch.stack(list(state)).view(torch.int64).flatten().cuda()


@dataclass(frozen=True)
class Varlen:
    """Packed sequences of q and k, and the maxima that a call states.

    used_k: how many keys of each count; empty for all.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    max_seqlens: tuple[int, int]
    used_k: tuple[int, ...] = ()
    nheads: int = 3
    dropout_p: float = 0.35

    @property
    def own_k(self):
        return self.used_k or self.lengths_k

    def cu_seqlens(self):
        return tuple(int32(0, *accumulate(lengths)) for lengths in (self.lengths_q, self.lengths_k))

    def tensors(self):
        """q, k and v of zeros, packed."""
        sizes = (sum(self.lengths_q), sum(self.lengths_k), sum(self.lengths_k))
        return [torch.zeros(n, self.nheads, 64, dtype=torch.bfloat16, device="cuda") for n in sizes]

    def pytorch(self, q, k, v):
        """PyTorch's memory-efficient forward, always with the same seed and offset: out, lse, (seed, offset)."""
        torch.cuda.manual_seed(7)
        torch.rand(1000, device="cuda")  # advances the offset
        out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            *(q[None], k[None], v[None], None),
            *(*self.cu_seqlens(), *self.max_seqlens),
            *(self.dropout_p, 0, True),
            scale=0.125,
            seqlen_k=self._used(),
        )
        return out[0], lse, (seed, offset)

    def call(self, function, *tensors, **options):
        """``attention_varlen`` or its backward."""
        options |= {"dropout_p": self.dropout_p, "dropout_mask": "mem_efficient", "softmax_scale": 0.125}
        given = (*self.cu_seqlens(), *self.max_seqlens)
        return function(*tensors, *given, seqused_k=self._used(), **options)

    def _used(self):
        return int32(*self.used_k) if self.used_k else None

    def sequences(self):
        """(batch, rows of q, rows of k that count) of each."""
        starts = [[0, *accumulate(lengths)] for lengths in (self.lengths_q, self.lengths_k)]
        for b, (n_q, n_k) in enumerate(zip(self.lengths_q, self.own_k, strict=True)):
            yield b, slice(starts[0][b], starts[0][b] + n_q), slice(starts[1][b], starts[1][b] + n_k)

    def kept(self, call, by_queries=False):
        """Which scores of each sequence a call keeps if all are equal: (nheads, q, k).

        call: out by v, or ``by_queries`` the gradient of v by that of out.
        """
        lengths = self.lengths_q if by_queries else self.lengths_k
        masks = [[] for _ in lengths]
        for start in range(0, max(lengths), CHUNK):
            found = call(torch.cat([shown(n, start, self.nheads) for n in lengths]))
            for b, rows, keys in self.sequences():
                own, other = (keys, rows) if by_queries else (rows, keys)
                count = max(0, min(CHUNK, other.stop - other.start - start))
                masks[b].append((found[own] != 0).transpose(0, 1)[..., :count])
        whole = [torch.cat(columns, -1) for columns in masks]
        return [x.mT for x in whole] if by_queries else whole

    def defined(self, state):
        """The reference's masks."""
        for b, rows, keys in self.sequences():
            here = coords(1, self.nheads, rows.stop - rows.start, keys.stop - keys.start)
            longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), self.max_seqlens, strict=True))
            here = replace(here, batch=here.batch + b, varlen=True, **longest)
            yield reference.mem_efficient_keep(here, self.dropout_p, state)[0]


LENGTHS = ((70, 1, 0, 33, 129), (97, 131, 40, 64, 203))
VARLEN = {
    "longest": Varlen(*LENGTHS, (129, 203)),
    "longer": Varlen(*LENGTHS, (150, 333)),
    "seqused_k": Varlen(*LENGTHS, (129, 203), used_k=(90, 131, 8, 5, 201)),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", VARLEN)
def test_the_mask_of_varlen_sequences_is_pytorchs(name, arch):
    case = VARLEN[name]
    q, k, v = case.tensors()
    out, lse, state = case.pytorch(q, k, v)
    keep = case.kept(lambda v: case.pytorch(q, k, v)[0])
    assert all(0.5 < float(x.double().mean()) < 0.8 for x in keep if x.numel() > 1000)
    rng_state = as_tensor(state)
    options = {"rng_state": rng_state, "kernel": arch}
    given = {**options, "wanted": ("v",)}
    masks = {
        "reference": case.defined(rng_state),
        "forward": case.kept(lambda v: case.call(attention_varlen, q, k, v, **options)),
        "backward": case.kept(
            lambda grad: case.call(attention_varlen_backward, grad, q, k, v, out, lse, **given)[0], True
        ),
    }
    for who, mask in masks.items():
        for b, (theirs, ours) in enumerate(zip(keep, mask, strict=True)):
            assert torch.equal(ours, theirs), f"{who}, sequence {b}"
    softmax = case.call(attention_varlen, q, k, v, **options, return_softmax=True)[1]
    expected = torch.zeros(softmax.shape, dtype=torch.bool, device="cuda")
    for b, x in enumerate(keep):
        expected[b, :, : x.shape[1], : x.shape[2]] = ~x
    assert torch.equal(softmax.signbit(), expected)


def equal_scores_forward(nheads, seqlen, v, dropout_p, **ours):
    """(nheads, seqlen, CHUNK) which keys are kept, seed and offset: PyTorch's, or with ``ours`` this package's."""
    zeros = torch.zeros(1, seqlen, nheads, 64, dtype=torch.bfloat16, device="cuda")
    if ours:
        options = {"dropout_p": dropout_p, "dropout_mask": "mem_efficient", "softmax_scale": 0.125}
        out, state = attention(zeros, zeros, v, **options, **ours), ours["rng_state"]
    else:
        torch.cuda.manual_seed(7)
        out, _, *state, _, _ = torch.ops.aten._efficient_attention_forward(
            zeros, zeros, v, None, None, None, None, None, dropout_p, 0, True, scale=0.125
        )
    return (out[0] != 0).transpose(0, 1), state


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("nheads", "seqlen"),
    [
        (17, 2**14),  # the last head's first number is 2^32
        (1, 65_600),  # the last queries' numbers are beyond 2^32
        (1, 70_000),  # 2^32 is a score in the middle of a row
    ],
)
def test_numbers_beyond_2_32_are_pytorchs(nheads, seqlen, arch):
    dropout_p, first = 0.35, seqlen - CHUNK
    v = shown(seqlen, first, nheads)[None]
    keep, state = equal_scores_forward(nheads, seqlen, v, dropout_p)
    rng_state = as_tensor(state)
    ours, _ = equal_scores_forward(nheads, seqlen, v, dropout_p, rng_state=rng_state, kernel=arch)
    assert torch.equal(ours, keep)
    where = coords(1, nheads, seqlen, seqlen)
    last_keys = replace(where, key=where.key[..., first:])
    assert torch.equal(reference.mem_efficient_keep(last_keys, dropout_p, rng_state)[0], keep)

    # The backward's mask of the last queries.
    zeros = torch.zeros(1, seqlen, nheads, 64, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((1, nheads, seqlen), float(torch.tensor(float(seqlen)).log()), device="cuda")
    options = {"dropout_p": dropout_p, "dropout_mask": "mem_efficient", "softmax_scale": 0.125}
    options |= {"rng_state": rng_state, "kernel": arch, "wanted": ("v",)}
    (dv,) = attention_backward(v, zeros, zeros, zeros, zeros, lse, **options)
    last_queries = replace(where, query=where.query[:, :, first:])
    right = reference.mem_efficient_keep(last_queries, dropout_p, rng_state)[0]
    assert torch.equal((dv[0] != 0).permute(1, 2, 0), right)


def test_a_restored_generator_draws_what_it_drew():
    """Checkpoints restore generators like this. Other streams, thousands of later draws and manual draws do no harm."""
    q, k, v = inputs(2, 4, 113, 203)
    before = torch.cuda.get_rng_state()
    first = [attention(q, k, v, dropout_p=0.5) for _ in range(3)]
    torch.rand(100_000, device="cuda")
    for _ in range(5000):
        last = random_states.draw(q.device)
    torch.cuda.set_rng_state(before)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = [
            attention(q, k, v, dropout_p=0.5, rng_state=state) for state in (draw_rng_state("cuda"), None)
        ]
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    with torch.profiler.profile():
        watched = attention(q, k, v, dropout_p=0.5)
    assert torch.equal(watched, first[2])
    assert not torch.equal(attention(q, k, v, dropout_p=0.5, rng_state=last), first[0])


def test_states_are_distinct_and_random():
    torch.cuda.manual_seed(2**64 - 1)
    states = torch.stack([random_states.draw(torch.device("cuda")) for _ in range(3 * random_states.DRAWN)])
    assert states.min() >= 0 and len(states.flatten().unique()) == states.numel()
    assert abs(float((states.double() / 2**63).mean()) - 0.5) < 0.01
