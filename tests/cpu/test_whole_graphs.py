"""Calls with functions inside torch's compiler: one node of a whole graph, with the captured tensors as its inputs."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cute_attn import attention, attention_varlen, attention_with_kvcache, flex, score_mod
from cute_attn.api import in_graphs
from cute_attn.api.attention import attention_backward
from cute_attn.epilogues.functions.graph import digest
from cute_attn.epilogues.functions.known import held_epilogue_of, text_of, trace_of, without_texts
from cute_attn.epilogues.functions.trace import trace
from cute_attn.epilogues.names import user_epilogue
from cute_attn.flex import overrides
from cute_attn.host import doors
from cute_attn.host.activation import Options
from cute_attn.host.call import ATTENTION, Call
from cute_attn.sdpa.observe import Observer
from tests import processes
from tests.compared import same
from tests.tensors import randn

LENGTH, NHEADS = 40, 4


Q, K, V = (randn(2, LENGTH, NHEADS, 16, seed=i).requires_grad_() for i in range(3))
KEYS = K.detach()
GROUPED = randn(2, LENGTH, 2, 16, seed=3).requires_grad_()
TABLE = randn(NHEADS, 9, seed=4).requires_grad_()
SLOPES = randn(NHEADS, seed=5).abs().requires_grad_()
DOCUMENT = torch.arange(LENGTH) // 7
POSITION = torch.arange(LENGTH)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def alibi_of(slopes):
    def alibi(score, b, h, i, j):
        return score - slopes[h] * (i - j).abs()

    return alibi


def bias_of(table):
    return lambda score, b, h, i, j: score + table[h, (j - i).clamp(-4, 4) + 4]


def documents(b, h, i, j):
    return (i >= j) & (DOCUMENT[i] == DOCUMENT[j])


def mask_of(mask_mod=documents, batch=None, nheads=None, block_size=16):
    return create_block_mask(mask_mod, batch, nheads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block_size)


SMALL_BLOCKS, WHOLE_BLOCKS = mask_of(), mask_of(block_size=128)
OF_HEADS = mask_of(lambda b, h, i, j: i >= j + 3 * h, 2, NHEADS, 128)


def rows(table):
    def mod(score, b, h, i, j):
        near = (j - i).clamp(0, 4)
        return score + table[h][near] + table[h, 1:][near] + table.T[near, h] + table[..., near][h]

    return mod


def views(table):
    def mod(score, b, h, i, j):
        row = torch.select(table, 0, h)[POSITION[DOCUMENT[i]]]
        return score + table[h].view(3, 3)[i % 3, j % 3] + row + torch.take(table, i % 5)

    return mod


def in_place(table):
    def mod(score, b, h, i, j):
        x = score * 1
        x += table[h, 0]
        y = x.clone()
        y.mul_(2)
        return y

    return mod


def constants(table):
    def mod(score, b, h, i, j):
        with torch.no_grad():
            detached, tripled = 2 * score, 3 * table
        return score * torch.tensor(0.5) + detached + tripled[h, 1] + torch.nn.functional.gelu(table[h, 2])

    return mod


class Bias(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table.detach().clone())

    def forward(self, score, b, h, i, j):
        return torch.tanh(score) + self.table[h, (j - i).clamp(-4, 4) + 4]


BIAS = Bias(TABLE)
CU_SEQLENS = torch.tensor([0, 10, 40, 80], dtype=torch.int32)


def packed(q, slopes):
    x = [y.flatten(0, 1) for y in (q, K, V)]
    return attention_varlen(
        *x, CU_SEQLENS, CU_SEQLENS, 40, 40, score_mod=alibi_of(slopes), mask_mod=lambda b, h, i, j: i + b >= j
    )


def made_inside(q, document):
    twice = document * 2
    mask = mask_of(lambda b, h, i, j: twice[i] == twice[j])
    return attention(q, K, V, block_mask=mask)


def in_another_door(q, slopes):
    x = [y.transpose(1, 2) for y in (q, K, V)]
    return flex.flex_attention(*x, alibi_of(slopes), SMALL_BLOCKS)


CALLS = {
    "closure": (lambda q, t: attention(2 * q, K, V, score_mod=bias_of(t)), TABLE),
    "computed_table": (lambda q, t: attention(q, K, V, score_mod=bias_of(2 * t)), TABLE),
    "rows": (lambda q, t: attention(q, K, V, score_mod=rows(t)), TABLE),
    "views": (lambda q, t: attention(q, K, V, score_mod=views(t)), TABLE),
    "in_place": (lambda q, t: attention(q, K, V, score_mod=in_place(t)), TABLE),
    "constants": (lambda q, t: attention(q, K, V, score_mod=constants(t)), TABLE),
    "module": (lambda q, t: attention(q, K, V, score_mod=BIAS), BIAS.table),
    "both": (lambda q, t: attention(q, K, V, score_mod=alibi_of(t), mask_mod=documents, causal=True), SLOPES),
    "named_too": (lambda q, t: attention(q, K, V, epilogues={"whole_graphs_cap": t}, mask_mod=documents), SLOPES),
    "always": (lambda q, t: attention(q, K, V, mask_mod=lambda b, h, i, j: True), None),
    "same": (lambda q, t: attention(q, K, V, score_mod=lambda s, b, h, i, j: s), None),
    "small_blocks": (lambda q, t: attention(q, K, V, block_mask=SMALL_BLOCKS), None),
    "whole_blocks": (lambda q, t: attention(q, K, V, score_mod=alibi_of(t), block_mask=WHOLE_BLOCKS), SLOPES),
    "blocks_of_heads": (lambda q, t: attention(q, K, V, block_mask=OF_HEADS, causal=True), None),
    "united_blocks": (lambda q, t: attention(q, GROUPED, GROUPED, block_mask=OF_HEADS), None),
    "made_inside": (made_inside, DOCUMENT),
    "packed": (packed, SLOPES),
    "flex": (in_another_door, SLOPES),
}  # fmt: skip


@score_mod("whole_graphs_cap", example=lambda batch, nheads, *_: (torch.ones(nheads),))
def whole_graphs_cap(score, b, h, i, j, cap):
    return torch.tanh(score) * cap[h]


def operators_of(graph_module):
    return [
        node.target.name().removeprefix("cute_attn::")
        for node in graph_module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "cute_attn"
    ]


class Graphs:
    """A backend that keeps the graphs that it compiles."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph_module, examples):
        self.graphs.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, examples)


def assert_same(got, want, *wrt):
    same(got, want, [x for x in wrt if x is not None and x.requires_grad])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_operator(name):
    """The graph contains none of a function's operations, and gradients reach its captured tensors."""
    call, own = CALLS[name]
    backend = Graphs()
    got = torch.compile(call, backend=backend, fullgraph=True)(Q, own)
    assert_same(got, call(Q, own), Q, own)
    (graph,) = backend.graphs
    assert operators_of(graph)[-1] == "forward" and operators_of(graph).count("forward") == 1
    assert not any(node.target is torch.empty for node in graph.graph.nodes)
    assert not any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes)


@pytest.mark.parametrize("name", ["closure", "whole_blocks"])
def test_by_inductor(name):
    call, own = CALLS[name]
    assert_same(torch.compile(call, fullgraph=True)(Q, own), call(Q, own), Q, own)


def test_only_what_autograd_computes_requires_a_gradient():
    """This holds even if only a captured tensor requires one, which the compiler sees as it interprets the call."""

    def call(q, table):
        out = attention(q, q, q, score_mod=bias_of(table))
        return out * 2 if out.requires_grad else out * 0

    compiled, q = torch.compile(call, backend="aot_eager", fullgraph=True), Q.detach()
    assert_same(compiled(q, TABLE), call(q, TABLE), TABLE)
    assert not compiled(q, TABLE.detach()).any()


def listed(q, slopes, mask):
    return attention(q, K, V, score_mod=alibi_of(slopes), block_mask=mask)


def shifted(q, shift, factor):
    def mod(score, b, h, i, j):
        return score * factor + (i - j).clamp(0, shift) + TABLE[h, shift]

    return attention(q, K, V, score_mod=mod, mask_mod=lambda b, h, i, j: i >= j - shift)


def of_lengths(q, k, table):
    def mod(score, b, h, i, j):
        return score + table[h, (j - i + k.shape[1] - q.shape[1]).clamp(0, table.shape[1] - 1)]

    return attention(q, k, k, score_mod=mod)


# A function, its calls, and how often it may be compiled for them. A number is a constant until it changes.
CHANGING = {
    "values": (listed, [(Q, randn(NHEADS, seed=seed), SMALL_BLOCKS) for seed in range(4)], 1),
    "numbers": (shifted, [(Q, shift, shift / 8) for shift in range(2, 8)], 3),
    "lengths": (of_lengths, [(Q[:, :n].contiguous(), K, randn(NHEADS, n)) for n in (20, 30, 35)], 2),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_may_change_compiles_little(name):
    call, all_given, most = CHANGING[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=name == "lengths" or None)
    for given in all_given:
        torch.testing.assert_close(compiled(*given), call(*given))
    assert counter.frame_count <= most


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.table = torch.nn.Parameter(randn(NHEADS, 9, seed=seed))

    def forward(self, x):
        def mod(score, b, h, i, j):
            return score + self.table[h, (j - i).clamp(-4, 4) + 4]

        return x + attention(x, K, V, score_mod=mod, block_mask=WHOLE_BLOCKS)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpoint"])
def test_layers(recomputed):
    layers = [Layer(0), Layer(1)]

    def model(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return x

    backend = Graphs()
    got = torch.compile(model, backend=backend, fullgraph=True)(Q)
    assert_same(got, model(Q), Q, *(layer.table for layer in layers))
    if not recomputed:
        assert operators_of(backend.graphs[0]) == ["block_tables", "forward", "forward"]


def test_tables_are_made_again_where_a_mask_changes():
    def model(x, counts):
        mask = mask_of(block_size=128)
        mask.full_kv_num_blocks = mask.full_kv_indices = None
        mask.kv_num_blocks = counts
        first = attention(x, K, V, block_mask=mask)
        counts.zero_()
        return first + 2 * attention(x, K, V, block_mask=mask)

    given = [torch.ones(1, 1, 1, dtype=torch.int32) for _ in range(2)]
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(Q, given[0])
    torch.testing.assert_close(out, model(Q, given[1]))


def test_caches():
    """This includes the rows that a call appends, and a given output."""
    lengths = torch.tensor([5, 30], dtype=torch.int32)

    @torch.no_grad()
    def call(slopes, k_cache, v_cache, out):
        found = attention_with_kvcache(
            Q[:, :3], k_cache, v_cache, k=K[:, :3], v=V[:, :3], cache_seqlens=lengths, causal=True,
            score_mod=alibi_of(slopes), mask_mod=lambda b, h, i, j: j % 3 > 0, out=out,
        )  # fmt: skip
        return found * 2

    def tensors():
        return [randn(2, 64, NHEADS, 16, seed=seed) for seed in (7, 8)] + [torch.zeros(2, 3, NHEADS, 16)]

    backend = Graphs()
    mine, others = tensors(), tensors()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(SLOPES, *mine), call(SLOPES, *others))
    torch.testing.assert_close(mine, others)
    assert operators_of(backend.graphs[0]) == ["attention_with_kvcache"]


def test_a_given_output():
    def call(q, slopes, out):
        with torch.no_grad():
            return attention(q, K, V, score_mod=alibi_of(slopes), out=out, return_lse=True)

    mine, others = torch.zeros_like(Q), torch.zeros_like(Q)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(Q, SLOPES, mine)
    torch.testing.assert_close(got, call(Q, SLOPES, others))
    assert torch.equal(mine, others) and mine.any()


def test_a_backward_as_a_call():
    with torch.no_grad():
        out, lse = attention(Q, K, V, score_mod=alibi_of(SLOPES), return_lse=True)

        def call(grad_out, slopes):
            return attention_backward(grad_out, Q, K, V, out, lse, score_mod=alibi_of(slopes))

        got = torch.compile(call, backend="aot_eager", fullgraph=True)(2 * out, SLOPES)
        torch.testing.assert_close(got, call(2 * out, SLOPES))


# ---- what is refused ----


def test_what_cannot_be_interpreted_breaks_the_graph_before_the_call():
    def call(q, slopes):
        def mod(score, b, h, i, j):
            torch._dynamo.graph_break()
            return score * float(slopes[0]) - slopes[h] * (i - j).abs()

        return 2 * attention(q + 1, K, V, score_mod=mod)

    backend = Graphs()
    compiled = torch.compile(call, backend=backend)
    for seed in range(2):
        given = (Q, randn(NHEADS, seed=seed))
        assert_same(compiled(*given), call(*given), Q)
    assert len(backend.graphs) > 1 and not any(map(operators_of, backend.graphs))
    torch.compiler.reset()
    with pytest.raises(Unsupported, match="graph_break"):
        torch.compile(call, backend=backend, fullgraph=True)(*given)


@pytest.mark.parametrize("whole", [False, True], ids=["may_break", "fullgraph"])
def test_operations_that_are_not_traced(whole):
    def call(q):
        return attention(q, K, V, score_mod=lambda s, b, h, i, j: torch.lgamma(s))

    kind = Unsupported if whole else TypeError
    with pytest.raises(kind, match=r"score_mod uses lgamma; accepted: .*line \d+ of test_whole_graphs.py"):
        torch.compile(call, backend="aot_eager", fullgraph=whole)(Q)


@pytest.mark.parametrize(
    ("head_dim", "changes", "reason"),
    [
        (64, {}, None),
        (60, {}, None),
        (584, {}, "q has head_dim 584; accepted"),
        (64, {"deterministic": True}, None),
        (64, {"deterministic": True, "max_seqlen_k": 2**38}, "scores load an element; accepted"),
    ],
)
def test_unsupported_calls_are_known_while_a_graph_is_made(head_dim, changes, reason):
    """For tensors on a GPU, PyTorch's function then stays in the graph."""
    with FakeTensorMode():
        q = torch.empty(1, 256, NHEADS, head_dim, device="cuda", dtype=torch.bfloat16)
        table = torch.empty(NHEADS, 9, device="cuda", requires_grad=True)
    name, _ = held_epilogue_of(trace(bias_of(table), None, torch.device("cuda")))
    call = Call(q, q, q, max_seqlen_q=256, max_seqlen_k=256, softmax_scale=0.1, epilogues=(f"{name}:t",))
    graph = torch.fx.Graph()
    nodes = {id(x): graph.placeholder("x") for x in (q, table)}
    for x in (q, table):
        nodes[id(x)].meta["example_value"] = x
    given = call._replace(epilogue_tensors=(table,), **changes).values(ATTENTION)
    args = [[nodes[id(table)]] if x == (table,) else nodes.get(id(x), x) for x in given]
    node = graph.call_function(torch.ops.cute_attn.forward.default, tuple(args))
    with contextlib.nullcontext() if reason is None else pytest.raises(Exception, match=reason):
        in_graphs._check_kernels(node, args)


# ---- exports ----


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(TABLE.detach().clone())
        self.register_buffer("document", DOCUMENT.clone())

    def forward(self, q):
        out = attention(
            q, KEYS, KEYS, score_mod=bias_of(self.table),
            mask_mod=lambda b, h, i, j: self.document[i] == self.document[j],
        )  # fmt: skip
        listed = attention(q, KEYS, KEYS, score_mod=constants(self.table.T.T), block_mask=OF_HEADS)
        cached = attention_with_kvcache(q.detach(), KEYS, KEYS, score_mod=in_place(self.table.detach()))
        return out + listed + cached


ELSEWHERE = """
import sys, torch
from cute_attn import attention_with_kvcache
program, given, expected = sys.argv[1:]
loaded = torch.export.load(program).module()
with torch.no_grad():
    loaded.table.mul_(2)
    torch.testing.assert_close(loaded(torch.load(given)), torch.load(expected))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_exports(strict, tmp_path):
    """Captured tensors become the program's; it also runs in a process that has not traced the functions."""
    model, q = Exported(), Q.detach()
    program = torch.export.export(model, (q,), strict=strict)
    assert (
        operators_of(program)[-1] == "attention_with_kvcache" and operators_of(program).count("forward") == 2
    )
    with torch.no_grad():
        model.table.mul_(2)
        expected = model(q)
        loaded = program.module()
        loaded.table.copy_(model.table)
        torch.testing.assert_close(loaded(q), expected)
        loaded.table.div_(2)
    if strict:  # the saved program does not depend on it
        return
    files = [tmp_path / name for name in ("program.pt2", "q.pt", "expected.pt")]
    torch.export.save(program, files[0])
    torch.save(q, files[1])
    torch.save(expected, files[2])
    done = processes.alone("-c", ELSEWHERE, *files)
    assert not done.returncode, done.stderr


def test_functions_of_other_versions_are_refused():
    trace_ = trace(bias_of(TABLE), documents)
    made = trace_of(text_of(replace(trace_, partial=trace(None, documents), unites=True)))
    assert made.output is not trace_.output and digest(made.output, []) == digest(trace_.output, [])
    assert made.unites and digest(made.partial.output, []) == digest(trace(None, documents).output, [])
    name = "traced_0123456789abcdef"
    with pytest.raises(ValueError, match=f"{name} is a function of another version's program"):
        without_texts((f"{name}:t:{text_of(trace_)}",))
    with pytest.raises(ValueError, match=f"{name} is a function that this process has not traced"):
        user_epilogue(name)


# ---- in PyTorch's place ----


@pytest.fixture
def on_cpu():
    flex.served.clear()
    activation = overrides.Activation(Options(), "cpu")
    yield
    activation.remove()
    flex.served.clear()


def pytorchs_call(q, slopes):
    x = [y.transpose(1, 2) for y in (q, K, V)]
    return pytorch.flex_attention(*x, alibi_of(slopes), SMALL_BLOCKS)


def test_pytorchs_function(on_cpu):
    backend = Graphs()
    compiled = torch.compile(pytorchs_call, backend=backend, fullgraph=True)
    assert_same(compiled(Q, SLOPES), attention(
        Q, K, V, score_mod=alibi_of(SLOPES), block_mask=SMALL_BLOCKS
    ).transpose(1, 2), Q, SLOPES)  # fmt: skip
    compiled(Q, SLOPES * 2)
    assert flex.served == {(overrides.NAME, ""): 1} and len(backend.graphs) == 1
    assert operators_of(backend.graphs[0]) == ["block_tables", "forward"]


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_pytorchs_function_in_an_export(on_cpu, strict):
    class Layer(torch.nn.Module):
        def forward(self, q, slopes):
            x = (q, KEYS.transpose(1, 2), KEYS.transpose(1, 2))
            return pytorch.flex_attention(*x, alibi_of(slopes))

    given = (Q.detach().transpose(1, 2), SLOPES.detach())
    program = torch.export.export(Layer(), given, strict=strict)
    assert operators_of(program) == ["forward"] and set(flex.served) == {(overrides.NAME, "")}
    torch.testing.assert_close(program.module()(*given), Layer()(*given))


def test_a_call_that_no_kernel_supports_is_pytorchs_in_the_same_graph(on_cpu, monkeypatch):
    monkeypatch.setattr(doors, "_warned", set())

    def call(q):
        x = [y.transpose(1, 2) for y in (q, K.detach(), V.detach())]
        return 2 * pytorch.flex_attention(*x, lambda s, b, h, i, j: torch.lgamma(s * s + 1))

    counter = CompileCounterWithBackend("eager")
    with pytest.warns(UserWarning, match="PyTorch computes a call of flex_attention: score_mod uses lgamma"):
        out = torch.compile(call, backend=counter, fullgraph=True)(Q.detach())
    assert counter.frame_count == 1 and sum(flex.served.values()) == 1
    torch.testing.assert_close(out, call(Q.detach()))


def test_watched_calls_run_between_two_graphs(on_cpu, monkeypatch):
    observer = Observer()
    monkeypatch.setattr(doors, "observer", observer)
    compiled = torch.compile(pytorchs_call, backend="eager")
    for _ in range(2):
        compiled(Q, SLOPES)
    (row,) = observer.rows.values()
    assert (row.operator, row.calls, row.reason) == (overrides.NAME, 2, None)
    torch.compiler.reset()
    torch.compile(pytorchs_call, backend="eager", fullgraph=True)(Q, SLOPES)
    assert row.calls == 2
