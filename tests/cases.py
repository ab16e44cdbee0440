"""Named test cases of the forward: shapes, features and memory layouts that broke attention kernels before.

Grouped by purpose; few distinct kernels serve many of them.
"""

from typing import Any

from tests.problem import Case

GQA, MQA, MHA = {"nheads": 6, "nheads_kv": 2}, {"nheads": 4, "nheads_kv": 1}, {"nheads": 3, "nheads_kv": 3}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "window": {"window": (37, 20)},
    "window_top_left": {"causal": "top_left", "window": (50, None)},
}
SEQLENS = (
    *((1, 1), (1, 63), (63, 1), (64, 64), (65, 127)),
    *((127, 65), (129, 129), (113, 203), (203, 113), (256, 1000)),
)
SEQLENS += ((1000, 256),)
ALL = {"softcap": 12.0, "alibi": "batches", "bias": "bf16", "bias_broadcast": "b"}
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0, "logits": 6.0},
    "alibi": {"alibi": "heads"},
    "alibi_batches": {"alibi": "batches"},
    "bias_bf16": {"bias": "bf16"},
    "bias_fp16": {"bias": "fp16"},
    "bias_fp32": {"bias": "fp32"},
    "sinks": {"sinks": "bf16"},
    "dropout": {"dropout_p": 0.2},
    "mem_efficient": {"dropout_p": 0.35, "dropout_mask": "mem_efficient"},
}
PAIRS = (
    *(("softcap", "alibi"), ("softcap", "bias_bf16"), ("softcap", "dropout"), ("alibi", "bias_fp32")),
    *(("alibi", "dropout"), ("bias_bf16", "dropout"), ("bias_fp16", "mem_efficient")),
)
VARLEN = {"lengths_q": (5, 0, 130, 64, 1, 77), "lengths_k": (70, 33, 0, 64, 129, 40)}
# More query blocks than a GPU runs at a time, some of which see no key.
NO_KEYS_BETWEEN = {"lengths_q": (300, 3, 40) * 12, "lengths_k": (300, 90, 0) * 12}
USED_Q, USED_K = (3, 0, 100, 64, 0, 76), (65, 0, 0, 63, 128, 40)


def _seqlens() -> list[Case]:
    return [
        Case(f"{mask}-{sq}x{sk}", seqlen_q=sq, seqlen_k=sk, **MASKS[mask])
        for mask in MASKS
        for sq, sk in (SEQLENS if mask in ("full", "causal", "window") else SEQLENS[4:9])
    ]


def _head_dims() -> list[Case]:
    shape: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "layout": "padded"}
    cases = [
        Case(f"causal-d{d}", head_dim=d, causal=True, **shape, **GQA)
        for d in (8, 32, 40, 72, 80, 96, 104, 112, 128, 192, 256)
    ]
    cases += [Case(f"full-d{d}", head_dim=d, **shape, **MHA) for d in (128, 256)]
    cases += [
        Case(f"full-d{d}x{dv}", head_dim=d, head_dim_v=dv, **shape, **GQA)
        for d, dv in ((40, 72), (192, 128), (64, 256), (128, 64))
    ]
    cases += [
        Case(f"fp16-causal-d{d}", head_dim=d, dtype="fp16", causal=True, **shape, **MQA) for d in (64, 256)
    ]
    return cases


def _features() -> list[Case]:
    odd: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203}
    cases = [Case(f"{name}", **odd, **GQA, **f) for name, f in FEATURES.items()]
    cases += [
        Case(f"{name}-causal", **odd, **MQA, **f, causal=True)
        for name, f in FEATURES.items()
        if name not in ("bias_fp16", "bias_fp32")
    ]
    cases += [Case(f"{a}-{b}", **odd, **(FEATURES[a] | FEATURES[b])) for a, b in PAIRS]
    for dropout in ("dropout", "mem_efficient"):
        for mask in ("causal", "window"):
            every = ALL | FEATURES[dropout] | MASKS[mask]
            cases.append(Case(f"everything-{mask}-{dropout}", **odd, **every))
    cases += [
        Case(f"everything-d{d}", head_dim=d, causal=True, **odd, **ALL, dropout_p=0.1) for d in (128, 256)
    ]
    cases += [
        Case(f"bias-over-{b}", bias="bf16", bias_broadcast=b, seqlen_q=65, seqlen_k=130)
        for b in ("b", "h", "q", "bh", "bhq")
    ]
    whole: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 200, "bias": "bf16"}  # rows that TMA can read
    cases += [
        Case("bias-by-tma", **whole, **GQA),
        Case("bias-by-tma-causal-d128", head_dim=128, causal=True, **whole),
        Case("bias-by-tma-window-d96", head_dim=96, window=(37, 20), **whole),
        Case("bias-by-tma-hides", bias_hides=True, **whole),
        Case("bias-by-tma-over-b", bias_broadcast="b", **whole),
        Case("bias-by-tma-softcap", softcap=5.0, logits=6.0, **whole),
        Case("bias-by-tma-dropout-d128", head_dim=128, dropout_p=0.2, **whole),
        Case("bias-by-tma-of-fp16", **(whole | {"bias": "fp16"})),
        Case("bias-by-tma-varlen", bias="bf16", lengths_q=(5, 0, 130, 64), lengths_k=(70, 33, 0, 136)),
        Case("bias-hides", bias="bf16", bias_hides=True, **odd),
        Case("bias-fp32-hides", bias="fp32", bias_hides=True, seqlen_q=64, seqlen_k=128),
        Case("bias-beyond-65536", bias="bf16", bias_broadcast="bhq", seqlen_q=17, seqlen_k=65600, nheads=2, batch=1),
        Case("mem_efficient-beyond-65536", **FEATURES["mem_efficient"], seqlen_q=65600, seqlen_k=17, nheads=2,
            batch=1),
        Case("dropout-beyond-65536", dropout_p=0.5, seqlen_q=17, seqlen_k=65600, nheads=2, batch=1),
    ]  # fmt: skip
    return cases


def _softmax() -> list[Case]:
    odd: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "return_softmax": True}
    return [
        Case("softmax", **odd),
        Case("softmax-causal-dropout", causal=True, dropout_p=0.3, logits=8.0, **odd, **GQA),
        Case("softmax-mem_efficient", **FEATURES["mem_efficient"], **odd, **GQA),
        Case("softmax-varlen-dropout", dropout_p=0.3, return_softmax=True, **VARLEN),
        Case("softmax-everything-window", dropout_p=0.3, window=(37, 20), head_dim=128, layout="padded", **ALL,
            **odd),
        Case("softmax-bias-hides-d256", bias="fp32", bias_hides=True, head_dim=256, dtype="fp16", **odd, **MQA),
        Case("softmax-long-q", causal=True, head_dim=40, head_dim_v=72, **(odd | {"seqlen_q": 300}), **GQA),
        Case("softmax-varlen-seqused", seqused_q=USED_Q, seqused_k=USED_K, causal=True, return_softmax=True,
            **VARLEN),
        Case("softmax-few-queries", seqlen_q=3, seqlen_k=300, nheads=16, nheads_kv=2, return_softmax=True),
        Case("softmax-no-keys", seqlen_q=5, seqlen_k=0, return_softmax=True),
        Case("softmax-sinks-dropout", sinks="fp32", dropout_p=0.3, causal=True, **odd),
    ]  # fmt: skip


def _lengths() -> list[Case]:
    used: dict[str, Any] = {"batch": 4, "seqlen_q": 70, "seqlen_k": 140, "seqused_k": (140, 0, 65, 33)}
    cases = [Case(f"varlen-{mask}", **VARLEN, **GQA, **m) for mask, m in MASKS.items()]
    cases += [Case(f"varlen-causal-d{d}", head_dim=d, causal=True, **VARLEN) for d in (128, 256)]
    cases += [
        Case("varlen-everything", causal=True, **VARLEN, **ALL),
        Case("varlen-dropout", dropout_p=0.2, causal=True, **VARLEN, **GQA),
        Case("varlen-mem_efficient", **FEATURES["mem_efficient"], **VARLEN),
        Case("varlen-seqused_k", causal=True, seqused_k=USED_K, **VARLEN),
        Case("varlen-seqused", causal=True, seqused_q=USED_Q, seqused_k=USED_K, **VARLEN),
        Case("varlen-all-empty", causal=True, lengths_q=(0, 0), lengths_k=(0, 3)),
        Case("varlen-no-keys", lengths_q=(4, 3), lengths_k=(0, 0)),
        Case("varlen-sinks-seqused", causal=True, seqused_q=USED_Q, seqused_k=USED_K, sinks="fp32", **VARLEN),
        Case("varlen-sinks-no-keys", lengths_q=(4, 3), lengths_k=(0, 0), sinks="bf16"),
        Case("sinks-no-keys", seqlen_q=5, seqlen_k=0, sinks="bf16"),
        Case("sinks-more-queries", seqlen_q=203, seqlen_k=113, causal=True, sinks="fp32", head_dim=128, **GQA),
        *(Case(f"varlen-no-keys-d{d}", nheads=8, nheads_kv=4, head_dim=d, causal=d > 64,
            **NO_KEYS_BETWEEN) for d in (64, 256)),
        Case("varlen-one", causal=True, lengths_q=(129,), lengths_k=(129,)),
        *(Case(f"seqused_k-{mask}", **used, **MASKS[mask]) for mask in ("full", "causal", "window")),
    ]  # fmt: skip
    for sq, sk in ((0, 5), (5, 0), (0, 0)):
        cases += [
            Case(f"{mask}-d256-{sq}x{sk}", seqlen_q=sq, seqlen_k=sk, head_dim=256, **MASKS[mask])
            for mask in ("full", "causal")
        ]
    return cases


def _few_queries() -> list[Case]:
    """Fewer queries than a block has rows, with many heads to a key head."""
    group8, odd = {"nheads": 16, "nheads_kv": 2}, {"seqlen_q": 5, "seqlen_k": 203}
    cases = [Case(f"few-{mask}", **odd, **group8, **m) for mask, m in MASKS.items()]
    cases += [
        Case(f"few-d{d}-{sq}x{sk}", head_dim=d, seqlen_q=sq, seqlen_k=sk, causal=True, **group8)
        for d, sq, sk in ((128, 1, 1500), (128, 64, 200), (256, 3, 300), (40, 17, 65))
    ]
    packed = {"lengths_q": (5, 0, 30, 64, 1, 17), "lengths_k": VARLEN["lengths_k"]}
    soft: dict[str, Any] = {"alibi": "batches", "softcap": 12.0, "head_dim": 128, "causal": True}
    cases += [
        Case("few-alibi-softcap", **soft, **odd, **group8),
        Case("few-sinks-group-of-7", sinks="bf16", causal=True, head_dim=128, **odd, nheads=14, nheads_kv=2),
        Case("few-mqa-fp16", dtype="fp16", seqlen_q=3, seqlen_k=300, nheads=32, nheads_kv=1),
        Case("few-group-of-6", causal=True, layout="heads_first", nheads=12, nheads_kv=2, **odd),
        Case("few-keys", seqlen_q=1100, seqlen_k=77, head_dim=128),
        Case("few-keys-dropout", seqlen_q=1100, seqlen_k=77, dropout_p=0.2),
        Case("few-alibi-softcap-group-of-7", **soft, **odd, nheads=14, nheads_kv=2),
        Case("few-group-of-6-70x300", causal=True, seqlen_q=70, seqlen_k=300, nheads=12, nheads_kv=2),
        Case("few-varlen-group-of-5", causal=True, alibi="batches", nheads=10, nheads_kv=2, **packed),
        Case("few-varlen", causal=True, alibi="heads", **packed, **group8),
        Case("few-varlen-seqused", seqused_q=(3, 0, 10, 64, 0, 16), seqused_k=USED_K, **packed, **group8),
    ]
    return cases


def _windows() -> list[Case]:
    windows = {
        "0-0": (0, 0),
        "all-0": (None, 0),
        "0-all": (0, None),
        "5-300": (5, 300),
        "left-is-all": (202, 0),
    }
    cases = [Case(f"window-{n}", window=w, seqlen_q=113, seqlen_k=203) for n, w in windows.items()]
    cases += [Case(f"window-{n}-long-q", window=w, seqlen_q=203, seqlen_k=113) for n, w in windows.items()]
    return cases


def _memory() -> list[Case]:
    odd: dict[str, Any] = {"causal": True, "seqlen_q": 113, "seqlen_k": 203}
    return [
        Case("padded", layout="padded", **odd),
        Case("heads-first", layout="heads_first", **odd),
        Case("fused", layout="fused", causal=True, seqlen_q=113, seqlen_k=113, **GQA),
        Case("expanded", layout="expanded", **odd),
        Case("odd-strides-batch-1", layout="odd_strides", batch=1, **odd),
        Case("odd-strides-one-row", layout="odd_strides", batch=1, nheads=1, nheads_kv=1, causal=True, seqlen_q=1,
            seqlen_k=1),
        Case("far", layout="far", causal=True, batch=3, seqlen_q=3, seqlen_k=3),
        Case("batch-8300", batch=8300, seqlen_q=1, seqlen_k=1),
        Case("batch-70000", batch=70_000, seqlen_q=1, seqlen_k=5, nheads=1, nheads_kv=1),
        Case("heads-66000", batch=1, seqlen_q=3, seqlen_k=5, nheads=66_000, nheads_kv=33_000),
        Case("beyond-2-31", batch=2100, nheads=64, nheads_kv=64, head_dim=128, causal=True, compare=(0, 1049, 2099)),
    ]  # fmt: skip


def _magnitudes() -> list[Case]:
    return [
        Case("large-logits", logits=40.0, seqlen_q=113, seqlen_k=203),
        Case("large-logits-causal", logits=40.0, seqlen_q=203, seqlen_k=203, causal=True),
        Case("large-logits-fp16", logits=40.0, dtype="fp16", causal=True, seqlen_q=203, seqlen_k=203),
        # Scores that exceed the first key blocks' row maxima repeatedly.
        Case("wild-logits", logits=60.0, seqlen_q=333, seqlen_k=1023),
        Case("wild-logits-causal", logits=60.0, seqlen_q=1023, seqlen_k=1023, head_dim=128, causal=True),
        Case("wild-logits-fp16", logits=60.0, dtype="fp16", seqlen_q=333, seqlen_k=1023, head_dim=128),
        Case("negative-logits", logits="negative", seqlen_q=192, seqlen_k=192),
        Case("negative-logits-causal", logits="negative", seqlen_q=192, seqlen_k=192, causal=True),
        Case("negative-logits-d128", logits="negative", seqlen_q=64, seqlen_k=320, head_dim=128, causal=True),
    ]


CASES = (
    *_seqlens(),
    *_head_dims(),
    *_features(),
    *_softmax(),
    *_lengths(),
    *_few_queries(),
    *_windows(),
    *_memory(),
    *_magnitudes(),
)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "names are distinct"

# Cases that every tile is tested with.
FOR_EVERY_TILE = tuple(
    BY_NAME[name]
    for name in (
        *("causal-203x113", "full-256x1000", "window-1000x256", "causal-d96"),
        *("causal-d128", "causal-d256", "dropout-causal", "everything-causal-dropout"),
        *("everything-window-mem_efficient", "varlen-causal"),
    )
)

# The cases above that have gradients.
BACKWARD_CASES = tuple(case for case in CASES if not case.return_softmax)
