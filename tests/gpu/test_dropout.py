"""Dropout masks on the card are PyTorch's own, bit for bit: those of its flash and its memory-efficient attention."""

import pytest
import torch

from cute_attn import attention, random_states, reference
from cute_attn.interface import draw_rng_state
from tests.gpu.archs import runnable_archs

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
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    assert torch.equal(attention(q, k, v, **options, kernel=arch), out), (
        "the forward knows nothing of the matrix"
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", PEERS)
def test_the_mask_is_the_same_for_every_tile_and_head_dim(mask, arch):
    rng_state = torch.tensor([3, 2**40 + 1], device="cuda")
    masks = []
    for head_dim, tile in ((64, None), (64, "tile_m=64,tile_n=32,num_warps=4"), (128, None)):
        q, k, v = inputs(2, 4, 113, 203, nheads_kv=2, head_dim=head_dim)
        options = {"dropout_p": 0.3, "dropout_mask": mask, "rng_state": rng_state, "kernel": arch}
        softmax = attention(q, k, v, **options, tile=tile if arch == "sm80" else None, return_softmax=True)[1]
        masks.append(softmax.signbit())
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_seeds_are_drawn_from_torchs_generator():
    q, k, v = inputs(2, 4, 113, 203)
    torch.cuda.manual_seed(5)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.cuda.manual_seed(5)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first) and not torch.equal(first, second)


def test_a_restored_generator_draws_what_it_drew():
    """As checkpoints restore it; and another stream, thousands of draws later and a draw by hand see no difference."""
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
