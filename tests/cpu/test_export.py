"""Kernels for C and C++: the exported files, and the example, linked and run with a stub of the CUDA runtime."""

import os
import re
import subprocess

import pytest
import tvm_ffi.libinfo

from cute_attn import Traits
from cute_attn.lab import bundles, exports
from tests import exported

# A runtime whose memory is the CPU's: kernels check their arguments, are loaded and launched, and compute nothing.
RUNTIME = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int succeed(void) { return 0; }
int cudaMalloc(void **p, size_t n) { *p = aligned_alloc(256, (n + 255) / 256 * 256); return 0; }
int cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return 0; }
int cudaMemcpy(void *p, const void *q, size_t n, int kind) { memcpy(p, q, n); return 0; }
int cudaFree(void *p) { free(p); return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int d) { return 0; }
int cudaGetDeviceCount(int *d) { *d = 1; return 0; }
int cudaDeviceGetAttribute(int *v, int a, int d) { *v = a == 16 ? 132 : 232448; return 0; }
int cudaLibraryLoadData(void **l) { *l = (void *)8; return 0; }
int cudaLibraryGetKernel(void **k) { *k = (void *)8; return 0; }
int cudaLibraryUnload(void *l) { return 0; }
int cudaKernelSetAttributeForDevice(void) { return 0; }
int cudaFuncSetAttribute(void) { return 0; }
int cudaLaunchKernelExC(void *c, void *f, void **a) { puts("launch"); return 0; }
int cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long g, int *status) {
  *f = (void *)succeed;
  return *status = 0;
}
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, exported.export(folder)


def test_the_header_is_c_and_names_each_kernel(kernels):
    folder, made = kernels
    text = (folder / exports.HEADER).read_text()
    for kernel in made:
        name = exports.macro_name(kernel.traits, kernel.target)
        assert re.search(rf"^#define {name} __tvm_ffi_cute_attn_\w+$", text, re.M)
        assert f"#define {name}_tile_m {kernel.tile.tile_m}\n" in text
        assert (folder / f"{name}.o").read_bytes()[:4] == b"\x7fELF"
    assert "schedule: Tuple[Tensor([4], int32), int32]" in text and "NVIDIA" in text
    include = tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()
    options = ("-std=c99", "-Wall", "-Werror", "-fsyntax-only", *(f"-I{path}" for path in include))
    command = [*bundles.compiler(), *options, "-x", "c", folder / exports.HEADER]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 or "pragma once in main file" in done.stderr, done.stderr


def test_the_example_passes_what_kernels_take(kernels, tmp_path):
    program = exported.build_example(kernels[0], tmp_path / "build")
    (tmp_path / "runtime.c").write_text(RUNTIME)
    runtime = tmp_path / "runtime.so"
    subprocess.run(
        [*bundles.compiler(), "-w", "-shared", "-fPIC", "-o", runtime, tmp_path / "runtime.c"], check=True
    )
    done = subprocess.run(
        [program], env=os.environ | {"LD_PRELOAD": str(runtime)}, capture_output=True, text=True
    )
    assert done.stdout.count("launch") == 5 and not done.stderr
    assert done.returncode == 1 and "decoded error 1.00000 of its size" in done.stdout  # nothing was computed


def test_a_name_is_exported_once(tmp_path):
    append = Traits.parse("append-sm80-bf16-d64")
    with pytest.raises(
        ValueError, match="append-sm80-bf16-d64 is exported more than once; accepted: one tile"
    ):
        exports.export([(append, None, "sm80"), (append, "num_threads=64", "sm80")], tmp_path)
    assert not list(tmp_path.iterdir())
