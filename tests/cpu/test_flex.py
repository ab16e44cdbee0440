"""FlexAttention on the reference, against PyTorch's implementation: masks, gradients, compiled programs, activation."""

import gc
import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.attention.flex_attention as pytorch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from cute_attn import attention_with_kvcache, flex
from cute_attn.compiler.registry import Unsupported
from cute_attn.flex import overrides
from cute_attn.host import block_masks, doors
from cute_attn.host.activation import Options
from cute_attn.reference.check_epilogue import for_each
from cute_attn.sdpa.observe import Observer
from tests import refusals
from tests.compared import same
from tests.fuzz import oracle

BATCH, NHEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 100, 150
GENERATOR = torch.Generator().manual_seed(0)
SLOPES = torch.exp2(-2.0 * torch.arange(1, NHEADS + 1)).double()
TABLE = torch.randn(NHEADS, 65, generator=GENERATOR, dtype=torch.float64)
DOCUMENT = torch.randint(0, 3, (BATCH, SEQLEN_K), generator=GENERATOR).sort().values


@pytest.fixture(autouse=True)
def eagerly(monkeypatch):
    """PyTorch's function runs its definition eagerly, without a compiler."""
    monkeypatch.setattr(pytorch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def on_cpu():
    """PyTorch's function is served for CPU tensors, which the reference computes, and nothing is compiled yet."""
    torch._dynamo.reset()
    flex.served.clear()
    activation = overrides.Activation(Options(), "cpu")
    yield activation
    activation.remove()


def inputs(nheads_kv=NHEADS, dtype=torch.float64, lengths=(SEQLEN_Q, SEQLEN_K), batch=BATCH, grad=False):
    shapes = ((BATCH, NHEADS, lengths[0], 16), *[(batch, nheads_kv, lengths[1], 16)] * 2)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def dense(q, k, v, score_mod=None, shown=None):
    """The definition, differentiable. shown: bool, or None for all."""
    given = (x.expand(q.shape[0], -1, -1, -1).transpose(1, 2) for x in (q, k, v))
    out, lse = oracle.batched(*given, score_mod=score_mod, bias=shown)
    return out.transpose(1, 2), lse


# ---- functions as programs have them ----


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 20


def document(b, h, q_idx, kv_idx):
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 5 * torch.tanh(score / 5)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_output_lies_in_memory_as_pytorchs(order):
    q, k, v = inputs()
    stored = q.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)
    ours, theirs = (f(stored, k, v) for f in (flex.flex_attention, pytorch.flex_attention))
    torch.testing.assert_close(ours, theirs, check_stride=True)


def test_the_arguments_are_pytorchs():
    def arguments(function):
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    assert arguments(flex.flex_attention) == arguments(pytorch.flex_attention)
    assert arguments(flex.flex_attention) == arguments(overrides.flex_attention)


# ---- block masks ----


def lists_of(listed, width=None):
    """Counts and indices of the blocks that a bool tensor (..., rows, columns) lists."""
    indices = torch.argsort(listed.int(), dim=-1, descending=True, stable=True).int()
    return listed.sum(-1).int(), indices[..., :width].contiguous()


def random_mask(sizes, block_size, mask_mod):
    """A BlockMask with hidden, partial and full blocks, and the dense mask that it stands for."""
    blocks = [-(-n // size) for n, size in zip((SEQLEN_Q, SEQLEN_K), block_size, strict=True)]
    kinds = torch.randint(0, 3, (*sizes, *blocks), generator=torch.Generator().manual_seed(0))
    mask = BlockMask.from_kv_blocks(
        *lists_of(kinds == 1),
        *lists_of(kinds == 2),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(SEQLEN_Q, SEQLEN_K),
    )
    at = [kinds.repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)]
    at = at[0][..., :SEQLEN_Q, :SEQLEN_K]
    positions = (torch.arange(n) for n in (BATCH, NHEADS, SEQLEN_Q, SEQLEN_K))
    partial = True if mask_mod is None else for_each(mask_mod)(*positions)
    return mask, ((at == 2) | ((at == 1) & partial)).expand(BATCH, NHEADS, -1, -1)


@pytest.mark.parametrize("mask_mod", [None, causal, document], ids=lambda x: getattr(x, "__name__", "none"))
@pytest.mark.parametrize("sizes", [(1, 1), (BATCH, 1), (1, NHEADS), (BATCH, NHEADS)], ids=str)
@pytest.mark.parametrize("block_size", [(64, 128), (16, 32)], ids=str)
def test_blocks_are_hidden_partial_or_full(sizes, block_size, mask_mod):
    """Gradients are compared too, also of keys that batches and heads share."""
    mask, shown = random_mask(sizes, block_size, mask_mod)
    x = inputs(nheads_kv=2, batch=sizes[0], grad=True)
    slopes = SLOPES.clone().requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        table = TABLE[h, (kv_idx - q_idx).clamp(-32, 32) + 32]
        return 3 * torch.tanh(score / 3) + table - slopes[h] * (q_idx - kv_idx).abs()

    found = flex.flex_attention(*x, score_mod, mask, enable_gqa=True, return_lse=True)
    same(found, dense(*x, score_mod, shown), (*x, slopes))


def test_lists_shorter_than_rows_of_blocks():
    kinds = torch.zeros(1, 1, 7, 5, dtype=torch.int64)
    kinds[..., 1], kinds[..., 4] = 1, 2
    lists = *lists_of(kinds == 1, 1), *lists_of(kinds == 2, 1)
    options = {"BLOCK_SIZE": (16, 32), "seq_lengths": (SEQLEN_Q, SEQLEN_K), "compute_q_blocks": False}
    mask = BlockMask.from_kv_blocks(*lists, mask_mod=causal, **options)
    assert torch.equal(block_masks.kinds_of(mask).long(), kinds)


def test_what_lies_behind_the_lists_is_not_read():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 999, -7], [2, 0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, compute_q_blocks=False)
    assert block_masks.kinds_of(mask).tolist() == [[[[0, 1, 0], [1, 0, 1]]]]


def test_lengths_shorter_than_the_masks():
    mask, shown = random_mask((BATCH, 1), (32, 64), causal)
    x = inputs(lengths=(70, 90))
    out = flex.flex_attention(*x, block_mask=mask)
    torch.testing.assert_close(out, dense(*x, shown=shown[..., :70, :90])[0])
    torch.testing.assert_close(out, flex.flex_attention(*x, block_mask=mask._adjust(70, 90)))


def test_pytorchs_mask_of_one_block_hides_nothing():
    x = inputs()
    mask = pytorch._create_empty_block_mask(*x[:2])
    torch.testing.assert_close(flex.flex_attention(*x, block_mask=mask), dense(*x)[0])


def test_a_sliced_mask_has_its_mask_mod_from_its_owner():
    mask = create_block_mask(document, BATCH, None, SEQLEN_Q, SEQLEN_K, device="cpu", BLOCK_SIZE=32)
    q, k, v = (x[1:] for x in inputs())
    part = mask[1:]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex.flex_attention(q, k, v, block_mask=part)
    part.mask_mod = lambda b, h, q_idx, kv_idx: document(b + 1, h, q_idx, kv_idx)
    ours, theirs = (f(q, k, v, block_mask=part) for f in (flex.flex_attention, pytorch.flex_attention))
    torch.testing.assert_close(ours, theirs)


def test_pytorchs_paged_attention():
    """Its mask of pages in memory serves flex_attention, and its mask of sequences a cache of its pages."""
    batch, heads, pages, page, dim = 2, 2, 6, 128, 16
    paged = PagedAttention(pages, page, batch, device="cpu")
    caches = [torch.zeros(1, heads, pages * page, dim) for _ in range(2)]
    k, v = (torch.randn(batch, heads, 256, dim) for _ in range(2))
    for b in range(batch):
        paged.reserve(torch.tensor(b), torch.tensor(256))
    paged.assign(torch.arange(batch), torch.arange(256).expand(batch, -1), k, v, *caches)
    offsets, q = torch.tensor([250, 131]), torch.randn(batch, heads, 3, dim)
    mask = create_block_mask(lambda b, h, i, j: offsets[b] + i >= j, batch, None, 3, 256, device="cpu")
    expected = flex.flex_attention(q, k, v, block_mask=mask)
    found = flex.flex_attention(q, *caches, block_mask=paged.convert_logical_block_mask(mask))
    torch.testing.assert_close(found, expected)
    rows = [x[0].unflatten(1, (pages, page)).permute(1, 2, 0, 3) for x in caches]
    table = paged.page_table[:, :2].int().contiguous()
    found = attention_with_kvcache(q.transpose(1, 2), *rows, page_table=table, block_mask=mask)
    torch.testing.assert_close(found.transpose(1, 2), expected)


def test_a_table_is_made_once_and_again_where_lists_change():
    mask = create_block_mask(causal, None, None, SEQLEN_Q, SEQLEN_K, device="cpu", BLOCK_SIZE=32)
    first = block_masks._made_of(mask).kinds
    assert block_masks._made_of(mask).kinds is first and first[0, 0, 0].tolist() == [1, 0, 0, 0, 0]
    mask.kv_num_blocks[..., 0] = 2
    assert block_masks._made_of(mask).kinds[0, 0, 0].tolist() == [1, 1, 0, 0, 0]
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    assert block_masks._made_of(mask).kinds[0, 0, 0].tolist() == [0, 0, 0, 0, 0]
    other = mask.to("cpu")
    assert torch.equal(block_masks._made_of(other).kinds, block_masks._made_of(mask).kinds)
    gc.collect()  # other tests' masks
    before = len(block_masks._made)
    del mask, other
    gc.collect()
    assert len(block_masks._made) == before - 2


def test_a_mask_of_inference_tensors_serves_training():
    with torch.inference_mode():
        mask = create_block_mask(sliding_window, None, None, SEQLEN_Q, SEQLEN_K, device="cpu", BLOCK_SIZE=32)
        assert block_masks._made_of(mask).kinds[0, 0, 0].tolist() == [1, 1, 0, 0, 0]
        mask.kv_num_blocks[..., 0] = 1  # no version counter changes
        assert block_masks._made_of(mask).kinds[0, 0, 0].tolist() == [1, 0, 0, 0, 0]
    assert not block_masks._made_of(mask).kinds.is_inference()
    x = inputs(grad=True)
    flex.flex_attention(*x, block_mask=mask).sum().backward()
    assert x[1].grad.isfinite().all()


# ---- wrong calls ----

CPU_MASK = create_block_mask(causal, 1, 1, SEQLEN_Q, SEQLEN_K, device="cpu")
SMALL_MASK = BlockMask.from_kv_blocks(
    torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), BLOCK_SIZE=64, seq_lengths=(100, 150)
)


def meta(*x):
    return [y.to("meta") for y in x]


WRONG = """
activate(unsupported="raise") -> ValueError: unsupported is 'raise'; accepted: 'fall_back', 'error'
activate(strict=2) -> TypeError: strict is 2; accepted: False or True
flex_attention([1], k, v) -> TypeError: query is a list; accepted: a torch.Tensor
flex_attention(q, k[0], v) -> ValueError: key has shape (4, 150, 16); accepted: (batch, heads
flex_attention(q, k, v.half()) -> TypeError: value has dtype torch.float16; accepted: torch.float64
flex_attention(q, *meta(k, v)) -> ValueError: key is on meta; accepted: cpu, where query is
flex_attention(q, *(x.repeat(2, 1, 1, 1) for x in (k, v))) -> ValueError: key has batch 4; accepted: 2
flex_attention(q, k, v[:, :, 1:]) -> ValueError: value has shape ... accepted: (2, 4, 150) and a
flex_attention(q, k[..., 1:], v) -> ValueError: key has head dim 15; accepted: 16, query's
flex_attention(q, k[:, :2], v[:, :2]) -> ValueError: key has 2 heads; accepted without enable_gqa: 4
flex_attention(q, k[:, :3], v[:, :3], enable_gqa=True) -> ValueError: query has 4 heads; accepted with
flex_attention(q, k, v, enable_gqa=1.5) -> TypeError: enable_gqa is 1.5; accepted: False or True
flex_attention(q, k, v, scale="1") -> TypeError: scale is '1'; accepted: a Python number
flex_attention(q, k, v, kernel_options=3) -> TypeError: kernel_options is 3; accepted: a dict, which is not read
flex_attention(q, k, v, return_aux=True) -> TypeError: return_aux is True; accepted: an AuxRequest, or None
flex_attention(q, k, v, return_aux=AuxRequest(), return_lse=True) -> ValueError: return_lse is True with return_aux
flex_attention(q, k, v, block_mask=causal) -> TypeError: block_mask is ...; accepted: torch's BlockMask, or None
flex_attention(k, k, v, block_mask=CPU_MASK) -> ValueError: block_mask has 100 queries; accepted: 150 or more
flex_attention(q, k, v, block_mask=SMALL_MASK) -> ValueError: block_mask has 64 queries; accepted: 100 or more
flex_attention(*meta(q, k, v), block_mask=CPU_MASK) -> ValueError: block_mask is on cpu; accepted: meta, where q is
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_one_sentence(call, sentence):
    refusals.check(call, sentence, globals() | vars(flex) | dict(zip("qkv", inputs(), strict=True)))


def model(flex_attention):
    """A layer whose functions capture a tensor that the layer computes."""

    def layer(q, k, v, slopes, mask):
        steeper = slopes * 2

        def score_mod(score, b, h, q_idx, kv_idx):
            return score - steeper[h] * (q_idx - kv_idx).abs()

        return flex_attention(q + 1, k, v, score_mod, mask) * 2

    return layer


# ---- in the place of PyTorch's ----


def served():
    return {
        reason.partition(" ")[0]: count
        for (door, reason), count in flex.served.items()
        if door == overrides.NAME
    }


def unsupported(score, b, h, q_idx, kv_idx):
    return score * torch.lgamma(score)


def test_pytorchs_function_is_served_where_it_was_imported_before(on_cpu):
    x, mask = inputs(nheads_kv=2), CPU_MASK
    ours = pytorch.flex_attention(*x, alibi, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert served() == {"": 1}
    theirs = overrides.pytorchs(*x, alibi, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].lse, theirs[1].lse)
    on_cpu.remove()
    on_cpu.remove()
    assert not torch.equal(pytorch.flex_attention(*x, enable_gqa=True), ours[0]) and served() == {"": 1}


def test_compiled_programs_are_served(on_cpu):
    """Programs compiled before the activation are served until the removal, also if they capture computed tensors."""
    on_cpu.remove()
    x = inputs(dtype=torch.float32)
    slopes = torch.rand(NHEADS)
    layer = model(pytorch.flex_attention)
    compiled = torch.compile(layer, backend="eager")
    before = compiled(*x, slopes, CPU_MASK)
    with_grad = [y.clone().requires_grad_() for y in x]
    activation = overrides.Activation(Options(), "cpu")
    try:
        torch.testing.assert_close(compiled(*x, slopes, CPU_MASK), before)
        assert served() == {"": 1}
        grads = torch.autograd.grad(compiled(*with_grad, slopes, CPU_MASK).sum(), with_grad)
        assert served() == {"": 2}
    finally:
        activation.remove()
    assert all(y.isfinite().all() for y in grads)
    torch.testing.assert_close(compiled(*x, slopes, CPU_MASK), before)
    assert served() == {"": 2}


@pytest.mark.parametrize("module", [flex, pytorch], ids=["ours", "pytorchs"])
def test_one_graph_serves_lengths_that_change(module, on_cpu):
    compiled = torch.compile(module.flex_attention, backend="eager", fullgraph=True)
    for length in (20, 30):
        x = inputs(lengths=(length, length))
        found = compiled(*x)
        assert found.stride() == x[0].stride()
        torch.testing.assert_close(found, dense(*x)[0])
    assert served() == ({} if module is flex else {"": 2})  # traced for the first length, and for any other


def test_lengths_that_change_are_served_when_the_compiler_gives_up(on_cpu):
    counter, limit = torch._dynamo.testing.CompileCounter(), 2
    with torch._dynamo.config.patch(recompile_limit=limit):
        compiled = torch.compile(pytorch.flex_attention, backend=counter, dynamic=False)
        for length in range(20, 25):
            compiled(*inputs(lengths=(length, length)), lambda s, b, h, i, j: s * 2)
    assert served() == {"": 5} and counter.frame_count == limit


def test_what_is_not_served_is_pytorchs_and_warns_once(on_cpu, monkeypatch):
    monkeypatch.setattr(doors, "_warned", set())
    x = inputs(dtype=torch.float32)
    with pytest.warns(
        UserWarning, match="PyTorch computes a call of flex_attention: score_mod uses lgamma"
    ) as warned:
        out = pytorch.flex_attention(*x, unsupported)
    assert len(warned) == 1
    torch.testing.assert_close(out, overrides.pytorchs(*x, unsupported))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pytorch.flex_attention(*x, unsupported)
        with pytest.raises(ValueError, match="Expect query and key/value to have the same number of heads"):
            pytorch.flex_attention(x[0][:, :2], *x[1:])
    assert served() == {"score_mod": 2, "key": 1}


def test_watched_calls_in_compiled_code_are_compiled(on_cpu, monkeypatch):
    """Without a compiler, PyTorch's function would hold all scores."""
    calls = []
    monkeypatch.setattr(doors, "observer", Observer())
    monkeypatch.setattr(doors, "_warned", {overrides.NAME})
    monkeypatch.setattr(
        overrides, "_compiled", lambda: lambda *args, **kwargs: calls.append(kwargs) or args[0] * 0
    )
    x = inputs(dtype=torch.float32)
    compiled = torch.compile(pytorch.flex_attention, backend="eager")
    assert not compiled(*x, unsupported).any() and calls == [{"return_aux": None}]


def test_what_is_not_served_can_be_an_error(on_cpu):
    overrides.Activation(Options(unsupported="error"), "cpu")
    message = "flex_attention is not served: score_mod uses lgamma"
    for function in (pytorch.flex_attention, torch.compile(pytorch.flex_attention, backend="eager")):
        with pytest.raises(Unsupported, match=message):
            function(*inputs(), unsupported)
    on_cpu.remove()  # another one took its place
    assert overrides.serving() is not None
    flex.restore()
    assert overrides.serving() is None


def test_tensors_of_another_device_are_pytorchs(on_cpu, monkeypatch):
    monkeypatch.setattr(doors, "_warned", {overrides.NAME})
    activation = overrides.Activation(Options())
    pytorch.flex_attention(*inputs())
    assert served() == {"query": 1}
    activation.remove()


def test_tensors_that_override_operators_are_pytorchs(on_cpu):
    """An example is a DTensor, which PyTorch's function handles in a special way."""

    class Own(torch.Tensor):
        pass

    q, k, v = inputs()
    own = k.as_subclass(Own)
    assert on_cpu.attend(Options(), q, own, v) == "key is an Own; accepted: a plain torch.Tensor"
    assert on_cpu.attend(Options(), q, k, None) == "value is a NoneType; accepted: a plain torch.Tensor"


def test_activate_and_restore(monkeypatch):
    monkeypatch.setattr(doors, "why_nothing_is_served", lambda: None)
    flex.activate(unsupported="error")
    outer = overrides.serving()
    assert outer.options == Options(unsupported="error") and outer.device == "cuda"
    with flex.active():
        assert overrides.serving().options == Options()
        flex.restore()
    assert overrides.serving() is outer and pytorch.flex_attention.__code__ is overrides._own
    flex.activate()
    assert overrides.serving().options == Options()
    flex.restore()
    assert overrides.serving() is None and pytorch.flex_attention.__code__ is overrides._stock
    flex.restore()


def test_a_function_of_other_arguments_is_left_alone(monkeypatch):
    monkeypatch.setattr(doors, "why_nothing_is_served", lambda: None)
    monkeypatch.setattr(overrides, "_stock", (lambda query, key, window: None).__code__)
    with pytest.raises(
        ValueError, match="PyTorch's flex_attention takes query, key, window; accepted: query, key"
    ):
        flex.activate(strict=True)


# ---- watched ----


def test_calls_are_compared_with_pytorchs(on_cpu):
    observer, x = Observer(shadow=1), inputs(dtype=torch.float32)
    with observer.watching():
        for score_mod in (softcap, softcap, unsupported):
            pytorch.flex_attention(*x, score_mod, CPU_MASK)
        flex.flex_attention(*x)
    rows = {(row.operator, row.signature, row.calls): row for row in observer.rows.values()}
    sizes = "fp32, 2x4x100x16, k 2x4x150x16, v 2x4x150x16"
    assert set(rows) == {
        ("flex_attention", f"{sizes}, score_mod, block_mask", 3),
        ("flex.flex_attention", sizes, 1),
    }
    row = rows["flex_attention", f"{sizes}, score_mod, block_mask", 3]
    assert row.difference < 1e-5 and len(row.ours_us) == len(row.pytorch_us) == 1
    assert row.reason.startswith("score_mod uses lgamma")
