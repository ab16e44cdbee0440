"""Make a bundle: build kernels, link each with the DSL's small runtime to a shared library, and write an index.

For what a bundle is and how it is read, see :mod:`cute_attn.compiler.bundle`.
"""

import base64
import concurrent.futures
import functools
import hashlib
import itertools
import json
import lzma
import os
import re
import shlex
import subprocess
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cute_attn
from cute_attn.compiler import bundle, compiled, has_dsl, registry
from cute_attn.compiler.cache import CUBIN, LIBRARY, OBJECT, DiskCache, Entry, needed_cache
from cute_attn.compiler.compiled import Prebuilt, Request, as_requests, default_target, prebuild, toolchain
from cute_attn.compiler.fingerprint import machine, package_sources
from cute_attn.epilogues.names import TRACED
from cute_attn.lab import common_calls
from cute_attn.lab.environment import environment
from cute_attn.lab.recorded import listed
from cute_attn.lab.tables import template
from cute_attn.traits import Traits

RUNTIME = "libcuda_dialect_runtime_static.a"
LICENCE = {
    "kernels": "BSD-3-Clause",
    "runtime": "each library contains some of the runtime of nvidia-cutlass-dsl, under that package's NVIDIA Software "
    "License Agreement: read it before you give a library to others",
}

_EXPORTED = "{ global: __tvm_ffi_*; local: *; };"
_ARCHIVE_BYTES = 16 << 20
"""Maximum uncompressed bytes of one archive: loading one kernel may have to unpack all of it."""
_KNOWN_SYMBOL = re.compile(
    r"TVMFFI\w+|cu(da)?[A-Z]\w+|\w+@GLIBC_[\d.]+|_ITM_\w+|__gmon_start__|__cxa_finalize.*"
)
"""Symbols that a library may leave undefined: of TVM FFI, the CUDA runtime and the C library."""


without_bundle = functools.partial(environment, bundle.VARIABLE, "0")
"""Within the block, this process and its children build kernels instead of loading them from a bundle."""

# ---- what to bundle ----


def named_requests(names: Iterable[str], tile: str, targets: Iterable[str]) -> list[Request]:
    """Requests for kernels by name, each for the ``targets`` that it runs on; by default for the GPU that is present.

    The kernels that a backward's calls launch besides its main kernel are added.
    """
    groups = []
    for traits in map(Traits.parse, names):
        given = list(targets) or [default_target(traits.arch)]
        fitting = [on for on in given if on in registry.RUNS_ON[traits.arch]]
        groups += [common_calls.with_its_parts(traits, tile or None, on) for on in fitting or given]
    return common_calls.distinct(groups)


def like(paths: Iterable[Path]) -> list[Request]:
    """The kernels that programs' calls needed, from files written by ``cute-attn run --json``.

    Kernels with unnamed functions are left out with a warning, since only their program knows the functions.

    Raises:
        ValueError: a path is not such a file, or lists no kernel, or lists one that is not registered here.
    """
    found: dict[Request, None] = {}
    for traits, tile, on in itertools.chain.from_iterable(map(listed, paths)):
        if any(name.startswith(TRACED) for name in traits.epilogues):
            warnings.warn(
                f"left out: {traits}, whose function has no name; score_mod gives it one", stacklevel=2
            )
        else:
            found[traits, registry.lookup(traits, tile, on).tile, on] = None
    return list(found)


# ---- making it ----


def make_bundle(
    requests: Iterable[Request], output: Path | str, workers: int | None = None
) -> Iterator[Prebuilt]:
    """Build kernels in parallel processes, through the disk cache, and bundle them; yields each when it is built.

    ``output``, a folder or a wheel named ``wheel_name()``, is written at the end, unless a kernel failed.

    Raises:
        ValueError: ``output`` is neither of these, or a folder with other files; the DSL is not installed; the disk
            cache is off; there is no C compiler; or a kernel failed.
    """
    output = Path(output)
    _check_output(output)
    wanted = check_requests(requests)
    _run([*compiler(), "--version"], Path())
    cache = needed_cache("bundling needs")
    # The folder is made now: kernels take long to build.
    folder = output.parent if output.suffix == ".whl" else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"-o is {str(output)!r}; accepted: a place that can be written ({reason})") from None
    return _make(wanted, output, workers, cache)


def check_requests(requests: Iterable[Any]) -> list[Request]:
    """The requests without repetitions, each with a target. Raises ValueError if the DSL is not installed."""
    if not has_dsl():
        raise ValueError("nvidia-cutlass-dsl is not installed; accepted: a machine where it is")
    given = as_requests(requests)
    return list(
        dict.fromkeys((traits, tile, on or default_target(traits.arch)) for traits, tile, on in given)
    )


def _make(wanted: list[Request], output: Path, workers: int | None, cache: DiskCache) -> Iterator[Prebuilt]:
    kernels: dict[str, tuple[dict[str, Any], bytes]] = {}
    failed = 0
    with without_bundle(), concurrent.futures.ThreadPoolExecutor() as pool:
        linking = []

        def add(traits: Any, tile: Any, target: str) -> None:
            kernel = registry.lookup(traits, tile, target)
            entry = cache.get(compiled.key_of(kernel, target))
            if entry is None:
                raise ValueError(
                    f"{traits} is no longer in the cache {cache.root}; accepted: no pruning meanwhile"
                )
            kernels[compiled.bundle_key(kernel, target)] = _linked(entry)

        for built in prebuild(wanted, workers):
            failed += built.error is not None
            if built.error is None:
                linking.append(pool.submit(add, built.traits, built.tile, built.target or ""))
            yield built
        for future in linking:
            future.result()
    if failed:
        raise ValueError(f"{failed} of {len(wanted)} kernels could not be built, and nothing was written")
    files = contents(kernels)
    (_write_wheel if output.suffix == ".whl" else _write_folder)(output, files)


def contents(kernels: dict[str, tuple[dict[str, Any], bytes]]) -> dict[str, bytes]:
    """A bundle's files by name; kernels: results of :func:`_linked` by key.

    Similar kernels are in the same archive, which compresses each to about a sixth of its size.
    """
    described, archives, raw = {}, [], b""
    for key, (meta, packed) in sorted(kernels.items(), key=_by_similarity):
        library = zlib.decompress(packed)
        if raw and len(raw) + len(library) > _ARCHIVE_BYTES:
            archives.append(lzma.compress(raw, preset=9))
            raw = b""
        described[key] = meta | {"archive": str(len(archives)), "begin": len(raw), "size": len(library)}
        raw += library
    archives.append(lzma.compress(raw, preset=9))
    files = {f"{bundle.KERNELS}/{i}": packed for i, packed in enumerate(archives)}
    content = {
        "format": bundle.FORMAT,
        "version": cute_attn.__version__,
        "sources": package_sources(),
        "toolchain": toolchain(),
        "licence": LICENCE,
        "archives": {
            str(i): {"size": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
            for i, packed in enumerate(archives)
        },
        "kernels": described,
    }
    return files | {bundle.INDEX: index_file(content)}


def _by_similarity(kernel: tuple[str, tuple[dict[str, Any], bytes]]) -> tuple[str, ...]:
    """Sort key for archives: puts tiles and dtypes of otherwise equal traits next to each other."""
    key, (meta, _) = kernel
    return meta["name"].replace("fp16", "bf16"), meta["target"], str(meta["tile"]), meta["name"], key


def index_file(content: dict[str, Any]) -> bytes:
    """The compressed index file: ``content`` and its digest."""
    return lzma.compress(json.dumps(content | {"digest": bundle.index_digest(content)}).encode())


def _linked(entry: Entry) -> tuple[dict[str, Any], bytes]:
    """A kernel's entry in the index, except where it is in the archives, and its compressed library."""
    library, cubin = link(entry.files[OBJECT]), entry.files[CUBIN]
    place = library.find(cubin)
    if place < 0:
        raise RuntimeError(f"{entry.meta['name']}'s object does not contain its cubin as it is")
    meta = {name: value for name, value in entry.meta.items() if name != "toolchain"}
    return meta | {"cubin": [place, len(cubin)]}, zlib.compress(library, 1)


# ---- linking ----


def link(object_file: bytes) -> bytes:
    """Link a kernel's object into a shared library that only needs TVM FFI, the CUDA runtime and the C library."""
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as name:
        folder = Path(name)
        (folder / OBJECT).write_bytes(object_file)
        (folder / "raise.c").write_text(template("raise.c"))
        (folder / "exported").write_text(_EXPORTED)
        options = ["-shared", "-fPIC", "-O1", "-s", "-o", LIBRARY, OBJECT, "raise.c", str(runtime_archive())]
        _run([*compiler(), *options, "-Wl,--version-script=exported,--build-id=none"], folder)
        for line in _run(["nm", "--dynamic", "--undefined-only", LIBRARY], folder).splitlines():
            symbol = line.split()[-1]
            if not _KNOWN_SYMBOL.fullmatch(symbol):
                raise ValueError(
                    f"a kernel needs {symbol}, which {RUNTIME} of nvidia-cutlass-dsl "
                    f"{toolchain()['cutlass_dsl']} has not; accepted: another version of it"
                )
        return (folder / LIBRARY).read_bytes()


def compiler() -> list[str]:
    """The C compiler's command: ``CC``, or ``cc``."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def runtime_archive() -> Path:
    """The static runtime library that kernels are linked with, from the installed flavour of the DSL."""
    from cutlass.runtime import find_runtime_libraries  # loads the DSL

    return Path(find_runtime_libraries(enable_tvm_ffi=False)[0]).parent / RUNTIME


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"kernels are linked by {command[0]!r}, which cannot be run ({error.strerror}); accepted: a C compiler and "
            "binutils, by CC or as cc"
        ) from None
    if done.returncode:
        raise ValueError(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


# ---- writing ----


def size_of(output: Path) -> int:
    """Total size of a bundle's files in bytes."""
    files = [output] if output.is_file() else [output / bundle.INDEX, *(output / bundle.KERNELS).iterdir()]
    return sum(path.stat().st_size for path in files)


def wheel_name() -> str:
    """The file name of a wheel for this version and machine."""
    return f"{bundle.PACKAGE}-{cute_attn.__version__}-py3-none-{machine().replace('-', '_')}.whl"


def _check_output(output: Path) -> None:
    if output.suffix in (".whl", ".zip", ".tar", ".gz"):
        if output.name != wheel_name():
            raise ValueError(f"-o is {output.name!r}; accepted: a folder, or {wheel_name()}")
    elif output.exists() and not (output / bundle.INDEX).is_file():
        if not output.is_dir() or any(output.iterdir()):
            raise ValueError(f"-o is {str(output)!r}; accepted: a new or empty folder, or one with a bundle")


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write the kernels, then the index that names them, so that a reader sees the old bundle or the new one."""
    (folder / bundle.KERNELS).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        scratch = folder / f".{Path(name).name}.{os.getpid()}"
        scratch.write_bytes(content)
        os.replace(scratch, folder / name)
    for path in (folder / bundle.KERNELS).iterdir():
        if f"{bundle.KERNELS}/{path.name}" not in files:
            path.unlink()


def _write_wheel(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel; its layout: https://packaging.python.org/en/latest/specifications/binary-distribution-format."""
    version = cute_attn.__version__
    about = f"{bundle.PACKAGE}-{version}.dist-info"
    summary = "Compiled kernels of cute-attn"
    texts = {
        f"{bundle.PACKAGE}/__init__.py": f'"""{summary}: see cute_attn.compiler.bundle."""\n',
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {bundle.PACKAGE.replace('_', '-')}\nVersion: {version}\n"
        f"Summary: {summary}\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: cute-attn {version}\nRoot-Is-Purelib: false\n"
        f"Tag: {path.stem.partition(version)[2][1:]}\n",
        f"{about}/LICENSE": "\n".join(f"{name}: {text}" for name, text in LICENCE.items()) + "\n",
    }
    content = {f"{bundle.PACKAGE}/{name}": data for name, data in files.items()}
    content |= {name: text.encode() for name, text in texts.items()}
    digests = (base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for data in content.values())
    sizes = zip(content.items(), digests, strict=True)
    record = [f"{name},sha256={digest.decode().rstrip('=')},{len(data)}" for (name, data), digest in sizes]
    content[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # with a fixed date
    os.replace(scratch, path)
