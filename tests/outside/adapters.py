"""The functions that a suite's tests run on: each adapter is called once, before pytest imports the tests."""

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface")
"""Modules that :func:`cute_attn.flash_attn.install` makes."""


def sdpa(folder: Path) -> None:
    """PyTorch's attention operators on the kernels, with PyTorch's dropout masks, which its tests compute."""
    import cute_attn.sdpa

    cute_attn.sdpa.activate(rng="torch")


def flash_attn(folder: Path) -> None:
    """``flash_attn`` is :mod:`cute_attn.flash_attn`; its rotary embedding, which tests compare with, is the suite's."""
    installed(folder)
    for name in [n for n in sys.modules if n.startswith(("flash_attn.layers", "flash_attn.ops"))]:
        del sys.modules[name]
    package = sys.modules["flash_attn"]
    package.__path__ = [str(folder / "flash_attn")]
    interface = sys.modules["flash_attn.flash_attn_interface"]
    # Only normalize_flash_attn_S asks for a block's keys, and it is replaced below.
    vars(interface).update(_get_block_size_n=lambda *args: 64, USE_TRITON_ROCM=False)


def installed(folder: Path) -> None:
    """``flash_attn`` is :mod:`cute_attn.flash_attn`, also for those who ask whether it is installed."""
    import cute_attn.flash_attn as ours

    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        del sys.modules[name]
    ours.find_spec = lambda name: None  # perhaps only a subpackage is installed, such as flash_attn.cute
    ours.install()


def hub(folder: Path) -> None:
    """transformers' flash_attention_2 and _3 are local kernels that :mod:`cute_attn.cli.hub` writes."""
    from cute_attn.cli import hub

    kernel = Path(tempfile.mkdtemp())
    hub.write(kernel)
    os.environ["LOCAL_KERNELS"] = hub.local_kernels(kernel)


def flash_attn_3(folder: Path) -> None:
    """FlashAttention-3's ``flash_attn_interface`` is :mod:`cute_attn.flash_attn.flash_attn_3`."""
    from . import flash_attn_kvcache

    flash_attn_kvcache.fa3(folder)


def flash_attn_4(folder: Path) -> None:
    """FlashAttention-4's ``flash_attn.cute``."""
    from . import flash_attn_kvcache

    flash_attn_kvcache.fa4(folder)


def flash_attn_4_functions(folder: Path) -> None:
    """As flash_attn_4; tests skip on Hopper what FlashAttention-4 has on Blackwell only, so they read 10.0 or 11.0."""
    import torch

    real, compiled = torch.cuda.get_device_capability, torch.compile

    def capability(device: Any = None) -> tuple[int, int]:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if not asks.startswith("test_"):
            return real(device)
        return (11, 0) if asks == "test_mask_mod" else (10, 0)  # has tiles other than 128 x 128

    torch.cuda.get_device_capability = capability
    # Of what tests compare with; FlexAttention passes options, and is compiled as they say.
    torch.compile = lambda function, **options: compiled(function, **options) if options else function
    flash_attn_4(folder)


def flash_mla(folder: Path) -> None:
    """FlashMLA's ``flash_mla``."""
    from . import flash_mla_dense

    sys.modules["flash_mla"] = flash_mla_dense.module()
    sys.path.insert(0, str(folder / "tests"))


def jvp(folder: Path) -> None:
    """jvp-flash-attention's ``JVPAttn``."""
    from . import jvp_flash

    sys.modules["jvp_flash_attention.jvp_attention"] = jvp_flash.module()
    sys.path.insert(0, str(folder / "tests"))


def flex(folder: Path) -> None:
    """PyTorch's FlexAttention on the kernels, eager and compiled; ``attn_gym`` without its own kernels."""
    import cute_attn.flex

    from . import flash_attn_kvcache

    cute_attn.flex.activate()
    flash_attn_kvcache._module("attn_gym", folder / "attn_gym")


def stock(folder: Path) -> None:
    """The library that the tests were written for, or that they choose themselves."""


def mend(module: ModuleType) -> None:
    """Change what in a module of tests depends on FlashAttention-2's way of returning the softmax.

    Its kernels return it without the last normalisation, which the tests undo; ours is normalised.
    """
    if hasattr(module, "normalize_flash_attn_S"):

        def identity(attn_unnorm: Any, *args: Any, **kwargs: Any) -> Any:
            return attn_unnorm

        vars(module)["normalize_flash_attn_S"] = identity


ADAPTERS = {
    "sdpa": sdpa,
    "flash_attn": flash_attn,
    "flash_attn_3": flash_attn_3,
    "flash_attn_4": flash_attn_4,
    "flash_attn_4_functions": flash_attn_4_functions,
    "flash_mla": flash_mla,
    "flex": flex,
    "hub": hub,
    "installed": installed,
    "jvp": jvp,
    "stock": stock,
}
