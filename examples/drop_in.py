"""Two models that know nothing of this package, before and after ``cute_attn.sdpa.activate()``.

    python examples/drop_in.py                        on a GPU: tokens and images per second, and errors
    python examples/drop_in.py --json rows.json
    python examples/drop_in.py --small                on a CPU: the same models, tiny; no call is served

A Llama of Hugging Face's transformers with random weights, in training, without and with padding; and a diffusion
transformer (DiT, Peebles and Xie 2023, arXiv:2212.09748) in plain torch, head dim 72, in inference. An error compares
the model's output in bf16 with that of the same weights in fp32: their rms difference over the output's rms.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_attn import sdpa

# ---- a diffusion transformer ----


class DiTBlock(nn.Module):
    """Attention and an MLP, shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: (batch, tokens, width); condition: (batch, width)."""
        parts = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x) * (1 + parts[0]) + parts[1]).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.project(attended)
        return x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[3]) + parts[4])


class DiT(nn.Module):
    """Predicts the noise from noisy latents (batch, 4, size, size) and a condition (batch, width)."""

    def __init__(self, width: int, heads: int, depth: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.embed, self.unembed = nn.Linear(16, width), nn.Linear(width, 16)
        self.positions = nn.Parameter(torch.randn((size // 2) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList([DiTBlock(width, heads) for _ in range(depth)])

    def forward(self, latents: Tensor, condition: Tensor) -> Tensor:
        """One denoising step."""
        x = self.embed(F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return F.pixel_shuffle(self.unembed(x).transpose(1, 2).unflatten(2, (self.size // 2, -1)), 2)


# ---- what is measured ----


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Attributes:
        model: in fp32, on the CPU.
        inputs: by name; floating ones take the model's dtype.
        train: whether a step has a backward.
        unit: of ``count``.
        count: tokens or images of a step.
        kept: selects the outputs that count, or None for all.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    train: bool
    unit: str
    count: int
    kept: Tensor | None = None

    def on(self, device: str, dtype: torch.dtype) -> "Runner":
        """The model there, in that dtype, with the same weights."""
        model = copy.deepcopy(self.model).to(device, dtype)
        inputs = {
            name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in self.inputs.items()
        }
        return Runner(model, inputs, self.train)


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model on a device."""

    model: nn.Module
    inputs: dict[str, Tensor]
    train: bool

    def output(self) -> Tensor:
        """Logits, or the image."""
        found = self.model(**self.inputs)
        return found if isinstance(found, Tensor) else found.logits

    def step(self) -> None:
        """A training step without its optimiser, or an inference."""
        if self.train:
            self.output().float().square().mean().backward()
            self.model.zero_grad()
        else:
            with torch.no_grad():
                self.output()


def llama(small: bool, padded: bool) -> Case:
    """Hugging Face's, causal, four query heads on one key head."""
    import transformers

    width, layers, batch, seqlen = (64, 2, 2, 48) if small else (2048, 8, 4, 4096)
    config = transformers.LlamaConfig(
        vocab_size=256 if small else 32000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=1 if small else 4,
        max_position_embeddings=seqlen,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config)
    mask = torch.ones(batch, seqlen, dtype=torch.int64)
    if padded:  # before the sequences, up to a half of the longest
        for i in range(batch):
            mask[i, : i * seqlen // (2 * batch)] = 0
    inputs = {"input_ids": torch.randint(config.vocab_size, (batch, seqlen)), "attention_mask": mask}
    return Case(model, inputs, True, "tokens", int(mask.sum()), mask.bool())


def dit(small: bool) -> Case:
    """DiT-XL's width, heads and patches, on latents of 512 x 512 images."""
    width, heads, depth, size, batch = (64, 2, 2, 8, 2) if small else (1152, 16, 28, 64, 16)
    inputs = {"latents": torch.randn(batch, 4, size, size), "condition": torch.randn(batch, width)}
    return Case(DiT(width, heads, depth, size), inputs, False, "images", batch)


CASES: dict[str, Callable[[bool], Case]] = {
    "llama": lambda small: llama(small, padded=False),
    "llama, padded": lambda small: llama(small, padded=True),
    "dit": dit,
}


def seconds(step: Callable[[], Any], repeats: int) -> float:
    """Median time of a step."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    step()
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(case: Case, device: str, repeats: int, when: str) -> dict[str, Any]:
    """Units a second, errors and calls; when: "before" or "after"."""
    with torch.no_grad():
        exact = case.on(device, torch.float32).output()
        exact = (exact if case.kept is None else exact[case.kept.to(device)]).float()
    runner, row = case.on(device, torch.bfloat16), {"unit": f"{case.unit}/s"}
    served = sdpa.served.copy()
    with sdpa.active() if when == "after" and device == "cuda" else contextlib.nullcontext():
        with torch.no_grad():
            found = runner.output()
            found = (found if case.kept is None else found[case.kept.to(device)]).float()
        row[f"{when}_error"] = float((found - exact).norm() / exact.norm())
        row[f"{when}"] = case.count / seconds(runner.step, repeats)
    calls = sdpa.served - served
    row[f"{when}_served"] = sum(n for (_, reason), n in calls.items() if not reason)
    row[f"{when}_fell_through"] = {reason: n for (_, reason), n in calls.items() if reason}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    options = parser.parse_args()
    if options.json is not None:
        try:
            options.json.touch()
        except OSError as error:
            parser.error(
                f"--json is {str(options.json)!r}; accepted: a file that can be written ({error.strerror})"
            )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: dict[str, dict[str, Any]] = {}
    for when in ("before", "after"):  # once it was active, PyTorch's calls take a hop through Python
        for name, make in CASES.items():
            if name.startswith("llama") and importlib.util.find_spec("transformers") is None:
                continue
            torch.manual_seed(0)
            case = make(options.small or device == "cpu")
            rows.setdefault(name, {}).update(measure(case, device, options.repeats, when))
    for name in CASES.keys() - rows.keys():
        print(f"{name:14} not run: transformers is not installed")
    if device == "cpu":
        print("No GPU here: nothing is served, and times would be of PyTorch's attention alone")
    for name, row in rows.items():
        rates = f"{row['before']:10.1f} -> {row['after']:10.1f} {row['unit']}"
        times = "" if device == "cpu" else f"{rates}, {row['after'] / row['before']:.2f} times, "
        errors = f"error {row['before_error']:.1e} -> {row['after_error']:.1e}"
        print(f"{name:14} {times}{errors}, {row['after_served']} calls served")
        for reason, count in row["after_fell_through"].items():
            print(f"    {count} calls fell through: {reason}")
    if options.json is not None:
        about = {
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
