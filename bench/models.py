"""How fast is the attention of real models, forward and backward, against the fastest peer of the same run?

    python -m bench.models                      every row, both ways; writes bench/results/DATE-GPU-models.json
    python -m bench.models '*llama*' 'bwd-*'    the rows whose model or workload matches
    python -m bench.models --op forward --impl '*sm90' fa3 cudnn
    python -m bench.models --list               their names
    python -m bench.models --result FILE        table and picture of an existing result; needs no GPU

Needs a GPU. Sizes are from the models' published configurations, lengths and batches from their typical use. Rows
are timed, compared and shown as by :mod:`bench.shapes`, whose options these are.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench import run, shapes
from cute_attn.lab.benchmark.workload import Workload, mixed_lengths

causal = functools.partial(Workload, causal=True)

IMPL = (*shapes.IMPL, "mem_efficient", "ffpa")
"""The default of ``--impl``; mem_efficient has biases and their gradients, ffpa head dims above 256."""


def trained() -> Iterator[tuple[str, Workload]]:
    """Models and forwards that are trained: timed both ways."""
    # Decoders with as many key heads as query heads, with groups of query heads, and with one key head.
    yield "gpt2 124M s1024", causal(8, 1024, 12, 64)
    yield "gpt2-xl s1024", causal(4, 1024, 25, 64)
    yield "gpt3-13B s2048", causal(2, 2048, 40, 128)
    yield "gpt-neox-20B d96 s2048", causal(2, 2048, 64, 96)
    yield "pythia-6.9B s2048", causal(2, 2048, 32, 128)
    yield "llama2-7B s4096", causal(1, 4096, 32, 128)
    yield "llama3-8B s8192", causal(1, 8192, 32, 128, nheads_kv=8)
    yield "llama3-70B s4096", causal(1, 4096, 64, 128, nheads_kv=8)
    yield "llama3.2-1B s4096", causal(2, 4096, 32, 64, nheads_kv=8)
    yield "llama3-8B 128k, a quarter of its heads", causal(1, 131072, 8, 128, nheads_kv=2)
    yield "qwen2.5-7B 28 on 4", causal(1, 8192, 28, 128, nheads_kv=4)
    yield "qwen2.5-0.5B 14 on 2", causal(4, 4096, 14, 64, nheads_kv=2)
    yield "qwen3-32B 64 on 8", causal(1, 8192, 64, 128, nheads_kv=8)
    yield "phi-3-medium 40 on 10", causal(2, 4096, 40, 128, nheads_kv=10)
    yield "falcon-7B 71 on 1", causal(8, 2048, 71, 64, nheads_kv=1)
    yield "starcoder 48 on 1", causal(2, 8192, 48, 128, nheads_kv=1)
    yield "gemma-2B 8 on 1 d256", causal(2, 8192, 8, 256, nheads_kv=1)
    yield "gptj-6B d256", causal(2, 2048, 16, 256)
    yield "llama3-70B b2 s4096", causal(2, 4096, 64, 128, nheads_kv=8)
    yield "qwen2-7B b4 s3000", causal(4, 3000, 28, 128, nheads_kv=4)
    yield "16 heads on 2 d256 s4096", causal(1, 4096, 16, 256, nheads_kv=2)
    yield "16 heads d256 s8192", causal(1, 8192, 16, 256)
    yield "16 heads d256 s8192, full", Workload(1, 8192, 16, 256)
    yield "32 heads d80 s2048", causal(2, 2048, 32, 80)
    yield "32 heads d112 s2048", causal(2, 2048, 32, 112)
    yield "deepseek-v3, half of its heads", causal(1, 4096, 64, 192, head_dim_v=128)
    for seqlen in (1024, 2048, 4096, 8192):
        yield f"48 heads b4 s{seqlen}", causal(4, seqlen, 48, 128)
    yield "one short sequence", causal(1, 1024, 8, 128)
    # Windows, softcap, sinks, ALiBi, a latent cache.
    yield "mistral-7B window 4096", causal(1, 16384, 32, 128, nheads_kv=8, window=4096)
    yield "gemma2-9B softcap d256", causal(1, 8192, 16, 256, nheads_kv=8, softcap=True)
    yield (
        "gemma2-9B window and softcap d256",
        causal(1, 8192, 16, 256, nheads_kv=8, window=4096, softcap=True),
    )
    yield "gemma3-12B window 1024 d256", causal(1, 8192, 16, 256, nheads_kv=8, window=1024)
    yield "gpt-oss-20B window 128 with sinks", causal(1, 8192, 64, 64, nheads_kv=8, window=128, sinks="bf16")
    yield "gpt-oss-20B with sinks", causal(1, 8192, 64, 64, nheads_kv=8, sinks="bf16")
    yield "window 128 without sinks", causal(1, 8192, 64, 64, nheads_kv=8, window=128)
    yield "mpt-7B alibi", causal(2, 2048, 32, 128, alibi=True)
    yield "deepseek-v3 192 x 128", causal(1, 4096, 128, 192, head_dim_v=128)
    yield "gemma4 global d512", causal(1, 8192, 16, 512, nheads_kv=4)
    # Packed sequences.
    lengths = mixed_lengths(16384, 4096)
    yield "llama3-8B packed", causal(1, 1, 32, 128, nheads_kv=8, lengths=lengths)
    yield "bert-large packed", Workload(1, 1, 16, 64, lengths=mixed_lengths(16384, 512))
    # Encoders, vision, speech.
    yield "bert-base s512", Workload(32, 512, 12, 64)
    yield "bert-large s384", Workload(32, 384, 16, 64)
    yield "modernbert window 128 s8192", Workload(2, 8192, 12, 64, window=64, window_right=64)
    yield "modernbert global s8192", Workload(2, 8192, 12, 64)
    yield "wav2vec2 s749", Workload(16, 749, 16, 64)
    yield "esm s1022", Workload(8, 1022, 20, 64)
    yield "clip text s77", causal(256, 77, 12, 64)
    yield "vit-base s197", Workload(64, 197, 12, 64)
    yield "vit-large s577", Workload(16, 577, 16, 64)
    yield "vit-huge d80 s257", Workload(32, 257, 16, 80)
    yield "siglip-so400m d72 s729", Workload(16, 729, 16, 72)
    yield "sam windows of 14 x 14", Workload(100, 196, 12, 64, bias="bf16")
    yield "swin windows of 49", Workload(4096, 49, 4, 32, bias="bf16")
    yield "whisper encoder s1500", Workload(8, 1500, 20, 64)
    yield "whisper decoder across 1500", Workload(8, 448, 20, 64, seqlen_k=1500)
    yield "q-former 32 on 257 d88", Workload(64, 32, 16, 88, seqlen_k=257)
    yield "detr 100 on 1064", Workload(16, 100, 8, 32, seqlen_k=1064)
    yield "perceiver 512 on 50176", Workload(4, 512, 8, 64, seqlen_k=50176)
    # Diffusion.
    yield "sd1.5 d40 s4096", Workload(8, 4096, 8, 40)
    yield "sd1.5 d80 s1024", Workload(8, 1024, 8, 80)
    yield "sd1.5 d160 s256", Workload(8, 256, 8, 160)
    yield "sdxl s4096", Workload(4, 4096, 10, 64)
    yield "sdxl across 77", Workload(4, 4096, 10, 64, seqlen_k=77)
    yield "sd3 across 154", Workload(4, 4096, 24, 64, seqlen_k=154)
    yield "sdxl s1024", Workload(4, 1024, 20, 64)
    yield "dit-xl d72 s256", Workload(64, 256, 16, 72)
    yield "dit-xl d72 s1024", Workload(16, 1024, 16, 72)
    yield "sd3 s4250", Workload(2, 4250, 24, 64)
    yield "flux s4608", Workload(1, 4608, 24, 128)
    yield "video s32760", Workload(1, 32760, 12, 128)
    # T5, proteins.
    bias: dict[str, Any] = {"bias": "bf16", "bias_grad": True}
    yield "t5-large s512 bias", Workload(16, 512, 16, 64, **bias)
    yield "t5-11B d128 s512 bias", Workload(4, 512, 128, 128, **bias)
    yield "triangle attention 256 x 256 d32", Workload(256, 256, 4, 32, **bias)
    yield "pair bias 384 d64", Workload(4, 384, 16, 64, **bias)
    yield "atoms 32 on 128 d32", Workload(4096, 32, 4, 32, seqlen_k=128, **bias)


def served() -> Iterator[tuple[str, Workload]]:
    """Models and forwards that only serve."""
    yield "llama3-8B prefill 512 after 8k", causal(1, 512, 32, 128, nheads_kv=8, seqlen_k=8704)
    yield "llama3-8B prefill 2048 after 32k", causal(1, 2048, 32, 128, nheads_kv=8, seqlen_k=34816)
    yield "llama3-70B prefill 8192 after 8k", causal(1, 8192, 64, 128, nheads_kv=8, seqlen_k=16384)
    yield "llama3-8B decode k4096 b32", causal(32, 1, 32, 128, nheads_kv=8, seqlen_k=4096)
    yield "llama3-8B decode k32768 b4", causal(4, 1, 32, 128, nheads_kv=8, seqlen_k=32768)
    yield "falcon-7B decode k2048 b64", causal(64, 1, 71, 64, nheads_kv=1, seqlen_k=2048)
    yield "gpt2 decode k300", causal(1, 1, 12, 64, seqlen_k=300)
    yield "llama3-8B decode k2048 b128", causal(128, 1, 32, 128, nheads_kv=8, seqlen_k=2048)
    yield "decode k1000 b256 8 on 1", causal(256, 1, 8, 128, nheads_kv=1, seqlen_k=1000)
    yield "decode k9000 d64 64 on 8", causal(1, 1, 64, 64, nheads_kv=8, seqlen_k=9000)
    yield "4 queries on 16384 b8", causal(8, 4, 32, 128, nheads_kv=8, seqlen_k=16384)
    yield "64 queries on 30000 b4", causal(4, 64, 32, 128, nheads_kv=8, seqlen_k=30000)
    yield "speculative 8 on 4096 b16", causal(16, 8, 32, 128, nheads_kv=8, seqlen_k=4096)


def rows(op: str) -> list[tuple[str, Workload]]:
    """Model and workload of "forward", "backward" or "both"; models that only serve have no backward."""
    ops = ("forward", "backward") if op == "both" else (op,)
    both = [
        (model, replace(w, op=one, bias_grad=w.bias_grad and one == "backward"))
        for model, w in trained()
        for one in ops
    ]
    return both + [(model, w) for model, w in served() if "forward" in ops]


def main() -> None:
    parser = run.timing_parser(__doc__, IMPL)
    parser.add_argument("--op", choices=("forward", "backward", "both"), default="both")
    options = parser.parse_args()
    found = rows(options.op)
    models = {w.name: model for model, w in found}
    run.main("models", options, [w for _, w in found], models, {"models": models})


if __name__ == "__main__":
    main()
