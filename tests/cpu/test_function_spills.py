"""Kernels of the functions that documents and examples show: no default tile spills with one, or with its gradients.

A few are built each time. The slow tests add, for each kernel and target, one that takes most registers, and on sm90
the backward of each function that a page or an example shows: all of them on all targets would take an hour.
"""

import ast
import importlib.util
import sys

import pytest
import torch

from cute_attn import Traits, compile
from cute_attn.compiler import registry
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.names import user_epilogue
from tests.cpu.test_documents import ROOT, blocks
from tests.cpu.test_examples import load
from tests.cpu.test_functions import t5
from tests.defaults import AMPERE_TARGETS

PAGES = ("README.md", "docs/functions.md", "docs/epilogues.md")
CALLS = {"attention", "compile", "block_mask", "create_block_mask", "interval_mask"}
"""Functions that pages call."""


def definitions(page):
    """A page's imports, functions, classes and tensors under unique names, without its calls."""
    body = [node for block in blocks(ROOT / page, "python") for node in ast.parse(block).body]
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    names = [{getattr(x, "id", "") for x in ast.walk(node)} for node in body]
    lines = [
        ast.unparse(node) for node, used in zip(body, names, strict=True)
        if isinstance(node, kept) and (isinstance(node, ast.ClassDef | ast.FunctionDef) or not used & CALLS)
    ]  # fmt: skip
    return (
        "\n".join(lines)
        .replace("@score_mod('", "@score_mod('shown_")
        .replace("@register_epilogue('", "@register_epilogue('shown_")
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Each page's definitions as a module with a file: the cache key of a kernel with a class includes that file."""
    found = {}
    for page in PAGES:
        name = "shown_" + page.rpartition("/")[2].removesuffix(".md").lower()
        path = tmp_path_factory.mktemp("pages") / f"{name}.py"
        path.write_text(definitions(page))
        spec = importlib.util.spec_from_file_location(name, path)
        found[page] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[page])
    return found


TABLE, SLOPES, CAP = torch.randn(16, 257), torch.rand(16), torch.tensor(30.0)
DOCUMENTS, KEPT = torch.arange(4096) // 300, torch.rand(2, 4096) > 0.3


def same_document(b, h, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx)


def causal_bias(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, load("learned_bias").bucket((q_idx - kv_idx).clamp(min=0))]


def images():
    """examples/flex_attention.py's function of scores and its mask."""
    example = load("flex_attention")
    score_mod, mask = example.neighbourhood(*example.packed([(12, 16), (8, 8)], "cpu"))
    return score_mod, mask.mask_mod


def listed(mask_mod):
    return epilogue_of(None, mask_mod, torch.device("cpu"), unites=False)[0]


def traced(score_mod, mask_mod=None):
    return epilogue_of(score_mod, mask_mod)[0]


WRITTEN = {
    "wrapped_distances": lambda s, b, h, q, k: s + TABLE[h, (k - q) % 257],
    "learned_cap": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "t5": t5,
    "wave": lambda s, b, h, q, k: s * (1 + torch.sin(q * 0.37 - k) / 2) + torch.log(1 + s * s),
}
FUNCTIONS = {
    **{name: lambda pages, function=function: traced(function) for name, function in WRITTEN.items()},
    "padding": lambda pages: traced(None, lambda b, h, q, k: KEPT[b, k]),
    "distance": lambda pages: pages["README.md"].distance and "shown_distance",
    "alibi-and-document": lambda pages: traced(
        pages["docs/functions.md"].alibi, pages["docs/functions.md"].same_document
    ),
    "relative": lambda pages: "shown_relative",
    "rational": lambda pages: "shown_rational",
    "relative_position": lambda pages: load("custom_epilogue").RelativePosition.name,
    "softcap-and-document": lambda pages: traced(
        lambda s, b, h, q, k: 30 * torch.tanh(s / 30), same_document
    ),
    "document-blocks": lambda pages: listed(same_document),
    "causal_bias-blocks": lambda pages: f"{traced(causal_bias)}-{listed(same_document)}",
    "image-blocks": lambda pages: f"{traced(images()[0])}-{listed(images()[1])}",
}
"""Names -> of the pages' modules the words of a kernel's name."""


def words_of(function, op, pages):
    words = FUNCTIONS[function](pages)
    if op not in ("gradients", "repeating", "tangents"):
        return words
    cls = user_epilogue(words)
    every = tuple(range(len(cls.captured)))
    exact = every if op == "repeating" else ()
    name, numbers = cls.with_tangents(every) if op == "tangents" else cls.with_gradients(every, exact)
    assert numbers
    return name


SAMPLE = [
    ("wrapped_distances", "forward", "sm80", "sm90", 64),
    ("wave", "backward", "sm80", "sm90", 128),
    ("t5", "gradients", "sm90", "sm90", 64),
    ("learned_cap", "gradients", "sm90", "sm90", 128),
    ("t5", "repeating", "sm80", "sm80", 128),
    ("learned_cap", "tangents", "sm90", "sm90", 64),
    ("image-blocks", "forward", "sm90", "sm90", 64),
    ("image-blocks", "kvcache", "sm80", "sm80", 128),
]
MOST = {
    "forward": ("wrapped_distances", "t5", "wave", "document-blocks"),
    "backward": ("padding", "softcap-and-document", "wave"),
    "gradients": ("learned_cap", "t5"),
    "repeating": ("t5", "learned_cap"),
    "tangents": ("learned_cap", "t5"),
}
"""Functions that need most registers or instructions of the ones that share a tile, or that once spilled."""
GENERATIONS = [*(("sm80", target) for target in AMPERE_TARGETS), ("sm90", "sm90")]
EXTREME = [
    (functions[place % len(functions)], op, *generation, (64, 128)[(place // 2 + turn) % 2])
    for turn, (op, functions) in enumerate(MOST.items())
    for place, generation in enumerate(GENERATIONS)
]
"""Each target gets several functions, and each head dim several targets."""
SHOWN = [function for function in FUNCTIONS if function not in WRITTEN]
KERNELS = dict.fromkeys((*EXTREME, *((function, "backward", "sm90", "sm90", 128) for function in SHOWN)))


@pytest.mark.parametrize(
    "case",
    [*SAMPLE, *(pytest.param(case, marks=pytest.mark.slow) for case in KERNELS if case not in SAMPLE)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_function_does_not_spill(case, pages):
    function, op, arch, target, head_dim = case
    kernel = {"forward": "forward", "kvcache": "kvcache", "tangents": "jvp"}.get(op, "backward")
    mask = "" if "blocks" in function else "-causal"
    traits = Traits.parse(f"{kernel}-{arch}-bf16-d{head_dim}{mask}-{words_of(function, op, pages)}")
    compiled = compile(traits, target=target)
    used = compiled.resources
    assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), f"{compiled.tile}: {used}"


def test_row_maxima_are_frozen_where_the_nearest_keys_come_first():
    slopes = traced(lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs())

    def frozen(dtype, mask):
        traits = Traits.parse(f"forward-sm90-{dtype}-d128{mask}-{slopes}")
        return registry.lookup(traits).tile.speculative

    assert [frozen("bf16", mask) for mask in ("-causal", "-window", "")] == [True, False, False]
    assert not frozen("fp16", "-causal")


def test_functions_of_positions_alone_take_more_queries_in_a_backward():
    names = traced(lambda s, b, h, q, k: s - (q - k).abs()), traced(lambda s, b, h, q, k: s + SLOPES[h] * k)
    tiles = [registry.lookup(Traits.parse(f"backward-sm90-bf16-d128-{name}")).tile.tile_m for name in names]
    assert tiles == [64, 48]
