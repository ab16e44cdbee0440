"""Shipped compiled kernels: a folder that :func:`cute_attn.compiler.build` searches first.

    index.json.xz   versions, licence, each archive's SHA-256, and each kernel's name, tile, target and location
    kernels/NUMBER  an archive: shared libraries of similar kernels, concatenated and compressed by xz

``CUTE_ATTN_BUNDLE`` names a bundle; otherwise the package ``cute_attn_bundle`` is used if installed. Kernels in a
bundle are linked by ``cute-attn bundle``: they need TVM FFI and torch's CUDA runtime, but no DSL. Their keys are
digests of their sources (:func:`cute_attn.compiler.fingerprint.source_key`) and depend on no Python or DSL version.
The index has hashes of itself and of each file: a bundle that is damaged or was made from other sources is refused.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attn.compiler.cache import CUBIN, LIBRARY, Entry
from cute_attn.compiler.fingerprint import machine, package_sources

FORMAT = 2
INDEX, KERNELS = "index.json.xz", "kernels"
PACKAGE = "cute_attn_bundle"
VARIABLE = "CUTE_ATTN_BUNDLE"


class BundleUnusable(RuntimeError):
    """A bundle or one of its kernels cannot be loaded; the message says why."""


@dataclass(frozen=True)
class Bundle:
    """A bundle made from this version of the package.

    Attributes:
        root: its folder.
        toolchain: versions of the tools that built its kernels.
        archives: archive name -> ``size`` and ``sha256`` of the file.
        kernels: key -> the ``meta`` of an :class:`Entry` with the name of the ``archive``, the library's ``begin`` and
            ``size`` in the unpacked archive, and the ``cubin``'s begin and size in the library.
    """

    root: Path
    toolchain: dict[str, str]
    archives: dict[str, dict[str, Any]]
    kernels: dict[str, dict[str, Any]]

    def get(self, key: str) -> Entry | None:
        """The entry stored under ``key``, verified, or None if the bundle has none.

        Raises:
            BundleUnusable: the entry's archive cannot be read or differs from the index.
        """
        meta = self.kernels.get(key)
        if meta is None:
            return None
        archive = meta["archive"]
        try:
            packed = (self.root / KERNELS / archive).read_bytes()
        except OSError as error:
            raise BundleUnusable(
                f"the bundle {self.root} lists {meta['name']}, whose file cannot be read ({error.strerror or error}); "
                f"accepted: the whole bundle"
            ) from None
        found, listed = hashlib.sha256(packed).hexdigest(), self.archives[archive]["sha256"]
        if found != listed:
            raise BundleUnusable(
                f"the file of {meta['name']} in the bundle {self.root} is damaged: its SHA-256 begins with "
                f"{found[:12]}, the index has {listed[:12]}; accepted: the file that was bundled"
            )
        end = meta["begin"] + meta["size"]
        library = unpack(packed, end)[meta["begin"] :]
        begin, size = meta["cubin"]
        return Entry(
            key,
            meta | {"toolchain": self.toolchain},
            {LIBRARY: library, CUBIN: library[begin : begin + size]},
        )

    @property
    def size(self) -> int:
        return sum(archive["size"] for archive in self.archives.values())


def unpack(packed: bytes, size: int = -1) -> bytes:
    """Decompress xz data: its first ``size`` bytes, or all.

    Raises:
        BundleUnusable: this Python was built without lzma.
        ValueError: the data is damaged.
    """
    try:
        import lzma  # in the standard library, but some builds of Python lack it
    except ImportError:
        raise BundleUnusable(
            "a bundle is not used: this Python has no module lzma; accepted: one that has"
        ) from None
    try:
        return lzma.LZMADecompressor().decompress(packed, size)
    except lzma.LZMAError as error:
        raise ValueError(error) from None


def find_bundle() -> Bundle | None:
    """The bundle named by ``CUTE_ATTN_BUNDLE``, else the installed one; None if there is none or the variable is ``0``.

    Raises:
        BundleUnusable: the bundle cannot be read, is damaged, or was made from other sources or on another platform.
    """
    given = os.environ.get(VARIABLE) or _installed()
    return None if given in (None, "0") else open_bundle(given)


@functools.cache
def _installed() -> str | None:
    spec = importlib.util.find_spec(PACKAGE)
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None


@functools.cache
def open_bundle(root: str) -> Bundle:
    """The bundle in folder ``root``. Raises BundleUnusable as :func:`find_bundle` does."""
    folder = Path(root).expanduser().absolute()
    try:
        index = json.loads(unpack((folder / INDEX).read_bytes()))
        content = {name: value for name, value in index.items() if name != "digest"}
        reason = _reason(content, index["digest"])
        found = Bundle(folder, index["toolchain"], index["archives"], index["kernels"])
    except OSError as error:
        raise BundleUnusable(
            f"the bundle {folder} cannot be read ({error.strerror or error}); accepted as {VARIABLE}: a folder that "
            "`cute-attn bundle` wrote, or 0 for none"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = "its index is damaged; accepted: the one that was written with it"
    if reason:
        raise BundleUnusable(f"the bundle {folder} is not used: {reason}")
    return found


def _reason(content: dict[str, Any], digest: str) -> str:
    """Why a bundle with this index cannot be used here, or ``""``."""
    if content["format"] != FORMAT:
        return f"its format is {content['format']!r}; accepted: {FORMAT}"
    if index_digest(content) != digest:
        return "its index is damaged; accepted: the one that was written with it"
    built_on = content["toolchain"]["platform"]
    if built_on != machine():
        return f"it was made on {built_on}; accepted: one made on {machine()}"
    sources = package_sources()
    if content["sources"] != sources:
        return (
            f"it was made of other sources of cute_attn ({content['version']}, fingerprint {content['sources'][:12]}); "
            f"accepted: one made by the version that is installed, of fingerprint {sources[:12]}"
        )
    return ""


def index_digest(content: dict[str, Any]) -> str:
    """SHA-256 of an index without its entry ``digest``, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- loading ----

_loaded = itertools.count()


def load_function(library: bytes, name: str, toolchain: dict[str, str]) -> Callable[..., None]:
    """Load a linked kernel and return its launching function.

    toolchain: versions of the tools that built the kernel.

    Raises:
        BundleUnusable: torch's CUDA runtime lacks functions that the kernel needs, or the driver is too old.
    """
    import tvm_ffi  # loads a library, which only launches need

    _check_driver(toolchain["ptx_toolkit"])
    # From memory: the file may have been removed or replaced since it was checked.
    with open(os.memfd_create("cute_attn"), "wb") as file:
        file.write(library)
        file.flush()
        # The loader returns an earlier library for a path that it has seen, and file numbers are reused: so each
        # library's path is spelled differently.
        dots = "".join("./" if bit == "1" else "/" for bit in f"{next(_loaded):024b}")
        try:
            loaded = ctypes.CDLL(f"/proc/self/{dots}fd/{file.fileno()}")
        except OSError as error:
            reason = str(error).partition(": ")[2]
            raise BundleUnusable(
                f"a kernel of the bundle cannot be loaded ({reason}); accepted: torch for CUDA 12.8 or newer"
            ) from None
    address = ctypes.cast(loaded[f"__tvm_ffi_{name}"], ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=loaded)


def _driver_cuda_major() -> int:
    """The newest major CUDA version that the driver supports."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        raise BundleUnusable(f"a kernel of the bundle needs a CUDA driver ({error})") from None
    if status:
        raise BundleUnusable(f"the CUDA driver does not say its version (error {status})")
    return version.value // 1000


@functools.cache
def _check_driver(toolkit: str) -> None:
    """Make torch's CUDA runtime visible; raise if the driver's major CUDA version is below ``toolkit``'s."""
    import torch  # takes seconds, which only launches need

    major = (torch.version.cuda or "").partition(".")[0]
    if major:
        with contextlib.suppress(OSError):  # torch has loaded it, perhaps with local symbols
            ctypes.CDLL(f"libcudart.so.{major}", mode=ctypes.RTLD_GLOBAL)
        driver = _driver_cuda_major()
        if driver < int(toolkit.partition(".")[0]):
            raise BundleUnusable(
                f"the bundle's kernels were built by CUDA {toolkit}, and the GPU's driver is of CUDA {driver}; "
                "accepted: a newer driver, or a bundle made by the DSL's flavour for this one, nvidia-cutlass-dsl[cu12]"
            )
