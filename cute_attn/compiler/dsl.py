"""The DSL's names that building and loading kernels need. Importing this module loads the DSL, which takes seconds."""

from cutlass import CUDA_VERSION, Numeric, cute
from cutlass.cute import runtime

from cute_attn.compiler.smem_layouts import reasons
from layouts.model import no_arguments

__all__ = ["CUDA_VERSION", "Numeric", "cute", "no_arguments", "reasons", "runtime"]
