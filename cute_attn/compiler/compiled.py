"""Turns traits and a tile into a kernel that runs: loaded from a bundle, or built and cached in memory and on disk.

    compiled = compile("forward-sm80-bf16-d128-causal", target="sm90")
    compiled.resources.registers, compiled.instructions["HMMA"], compiled.ptx

Only launching a kernel needs a GPU or a driver.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import os
import shlex
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cute_attn import _without_dsl
from cute_attn.compiler import cubin as _cubin
from cute_attn.compiler import registry
from cute_attn.compiler.arguments import fakes, ordered, parameters
from cute_attn.compiler.bundle import VARIABLE, BundleUnusable, find_bundle, load_function
from cute_attn.compiler.cache import (
    CUBIN,
    ELSEWHERE,
    LIBRARY,
    OBJECT,
    PTX,
    CacheUnusable,
    DiskCache,
    Entry,
    needed_cache,
    usable_cache,
    warn_once,
)
from cute_attn.compiler.cubin import Resources
from cute_attn.compiler.fingerprint import cache_key, digest, dsl, source_key, toolchain
from cute_attn.compiler.workers import Workers
from cute_attn.epilogues.names import TRACED, is_registered, user_epilogue
from cute_attn.tiles import check_target, check_tile, text_of
from cute_attn.traits import Traits
from layouts import html

__all__ = [
    "CompiledKernel", "Resources", "SpillWarning", "compile", "default_target", "prebuild", "toolchain",
]  # fmt: skip

# The compiler's names of the targets.
_GPU_ARCH = {
    "sm80": "sm_80",
    "sm86": "sm_86",
    "sm89": "sm_89",
    "sm90": "sm_90a",
    "sm100": "sm_100f",
    "sm120": "sm_120f",
}

# All except the architecture and options that name a folder. With these, options in brackets (cute.compile[...]) are
# dropped.
_OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin remarks{ptx}"

_LINE_INFO = " --generate-line-info"

_requests: dict[tuple[Any, Any, Any, bool], "CompiledKernel"] = {}
_kernels: dict[str, "CompiledKernel"] = {}
_spilling: set[tuple[Traits, Any, str]] = set()
"""Kernels for which a :class:`SpillWarning` was issued."""
# The compiler replaces the process's stdout and stderr while it works, so a process builds one kernel at a time; see
# prebuild.
_building = threading.RLock()
_streams: tuple[Any, Any] | None = None
"""The process's stdout and stderr from before a build, while a kernel is built."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    global _streams
    with _building:
        before, _streams = _streams, (sys.stdout, sys.stderr)
        try:
            yield
        finally:
            _streams = before


def _leave_build_to_parent() -> None:
    """Reset the build lock and the streams in a forked child, which lacks the thread that was building."""
    global _building, _streams
    _building = threading.RLock()
    if _streams is not None:
        (sys.stdout, sys.stderr), _streams = _streams, None


os.register_at_fork(after_in_child=_leave_build_to_parent)
in_prebuild_worker = False
"""True while a process of :func:`prebuild` imports users' modules, which must not call :func:`prebuild` again."""


class SpillWarning(UserWarning):
    """A kernel spills registers to local memory. Issued once per process, when the kernel is first loaded."""


class CompiledKernel:
    """A kernel built for one target. Calling it with the kernel's arguments launches it on the current stream.

    Attributes:
        traits, tile, target: what the kernel was built for.
        resources: registers, shared memory, spills and local memory.
        warnings: ptxas warnings: serialised wgmma (C7510 to C7518) or ignored setmaxnreg (C7508).
        key: the key under which the kernel is cached.
        seconds: build time.
        from_cache: True if this process found the kernel on disk or in a bundle.
        not_stored: why later processes will not find the kernel on disk, or None.
    """

    def __init__(
        self, kernel: Any, target: str, entry: Entry, from_cache: bool, not_stored: str | None = None
    ) -> None:
        self.traits = kernel.traits
        self.tile = kernel.tile
        self.target = target
        self.key = entry.key
        self.from_cache = from_cache
        self.not_stored = not_stored
        self.seconds: float = entry.meta["seconds"]
        self.resources = Resources(**entry.meta["resources"])
        self.warnings: tuple[str, ...] = tuple(entry.meta["warnings"])
        self._classes = kernel_classes(type(kernel), kernel.traits)
        self._parameters = tuple(parameters(type(kernel)))
        self._entry = entry

    @property
    def name(self) -> str:
        return self.traits.name

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The launching function, loaded on first use; a hot path should keep a reference to it."""
        files, name = self._entry.files, self._entry.meta["function"]
        if LIBRARY in files:
            return load_function(files[LIBRARY], name, self._entry.meta["toolchain"])
        # From memory: the file may have gone, or be another, since it was checked.
        with open(os.memfd_create("cute_attn"), "wb") as file:
            file.write(files[OBJECT])
            file.flush()
            module = dsl().runtime.load_module(f"/proc/self/fd/{file.fileno()}", enable_tvm_ffi=True)
        return getattr(module, name)

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def bind(self, **arguments: Any) -> tuple:
        """The launching function and its arguments in order. Names are those of the kernel's ``__call__``.

        Raises:
            TypeError: an argument is missing, or the kernel has none of that name.
        """
        return self.function, *ordered(self.name, self._parameters, arguments)

    @property
    def ptx(self) -> str:
        if PTX not in self._entry.files:
            raise ValueError(
                f"{self.name} comes from a bundle, which holds no PTX; accepted: {VARIABLE}=0, with which "
                "nvidia-cutlass-dsl builds it"
            )
        return self._entry.files[PTX].decode().rstrip("\0")

    @property
    def cubin(self) -> bytes:
        return self._entry.files[CUBIN]

    @functools.cached_property
    def sass(self) -> str:
        """The machine code, as nvdisasm prints it (FileNotFoundError without nvdisasm)."""
        return _cubin.disassemble(self.cubin)

    @property
    def instructions(self) -> dict[str, int]:
        """Machine instructions in the code, by mnemonic, most frequent first."""
        return _cubin.count_instructions(self.sass)

    @property
    def how_built(self) -> str:
        """Where the kernel was loaded from (cache or bundle), or how long building it took."""
        if LIBRARY in self._entry.files:
            return "from a bundle"
        return "from the cache" if self.from_cache else f"in {self.seconds:.1f} s"

    def __repr__(self) -> str:
        used = self.resources
        return (
            f"CompiledKernel({self.name} on {self.target}, {self.tile}: {used.registers} registers, "
            f"{used.shared_memory_bytes:,} bytes of shared memory, {used.spill_store_bytes} bytes spilled)"
        )

    def _repr_html_(self) -> str:
        used = self.resources
        costs = {
            "tile": str(self.tile).replace(",", ", "),
            "registers per thread": str(used.registers),
            "shared memory per block": f"{used.shared_memory_bytes:,} bytes",
            "spills": f"{used.spill_store_bytes} bytes stored, {used.spill_load_bytes} loaded",
            "local memory per thread": f"{used.local_bytes} bytes",
            "built": self.how_built,
        }
        if self.warnings:
            costs["ptxas"] = " ".join(self.warnings)
        return html.table(f"{self.name} on {self.target}", [""], [costs])


def compile(
    traits: Traits | str, tile: Any = None, target: str | None = None, *, lines: bool = False
) -> CompiledKernel:
    """Build a kernel, or load it from the cache.

    Args:
        traits: the kernel's traits, or its name.
        tile: a tile, or text such as ``"tile_n=64,num_stages=2"`` that overrides fields of the default one.
        target: one of :data:`cute_attn.tiles.TARGETS`, from ``"sm80"`` to ``"sm120"``; the default is that of the
            current GPU, or without a GPU the kernel's generation.
        lines: build with line info: the same machine code, with the source line of each instruction.

    Raises:
        TypeError: the traits or the tile have another type, or the tile is another kernel's.
        ValueError: the name, the tile's text or the target is invalid; or a method of a user's kernel returns a layout,
            copy or MMA that the kernel cannot use, such as a layout with two elements at one offset.
        Unsupported: no kernel supports the traits, or the tile does not fit them or the target.
    """
    traits = Traits.of(traits, "traits")
    check_tile(tile)
    target = target or default_target(traits.arch)
    check_target(target)
    request = (traits, tile, target, lines)
    known = _requests.get(request)
    if known is not None and known._classes == kernel_classes(known._classes[0], traits):
        return known

    _let_go(traits)
    compiled = _requests[request] = build(registry.lookup(traits, tile, target), target, lines=lines)
    return compiled


def build(kernel: Any, target: str, *, lines: bool = False) -> CompiledKernel:
    """Like :func:`compile`, for a kernel that ``registry.lookup`` returned for that target.

    The kernel is loaded from the bundle or else from the disk cache; if neither has it, it is built.

    Raises:
        BundleUnusable: the DSL is not installed, and no bundle contains that kernel.
    """
    compiled = _built(kernel, target, lines)
    _warn_of_spills(compiled)
    return compiled


def _warn_of_spills(compiled: CompiledKernel) -> None:
    used, kernel = compiled.resources, (compiled.traits, compiled.tile, compiled.target)
    if not (used.spill_store_bytes or used.spill_load_bytes) or kernel in _spilling:
        return
    _spilling.add(kernel)
    warnings.warn(
        f"{compiled.name} for {compiled.target} keeps {used.local_bytes} bytes of each thread in local memory, which "
        f"costs time: registers do not suffice for tile {compiled.tile}; {_without_spills(compiled)}",
        SpillWarning,
        stacklevel=4,
    )


def _without_spills(compiled: CompiledKernel) -> str:
    """The warning's advice: the default tile, which spills in no kernel of the package, or how to find a tile."""
    traits = compiled.traits
    if any(name.startswith(TRACED) for name in traits.epilogues):
        return (
            "no tile without spills is known, and `cute-attn tune NAME --static` lists some of a function with a name, "
            "which score_mod gives it"
        )
    if not (traits.epilogues or traits.variant):
        with contextlib.suppress(ValueError):  # a target on which the default tile does not fit
            default = registry.lookup(traits, None, compiled.target).tile
            if default != compiled.tile:
                return f"its default tile, {default}, does without"
    return f"no tile without spills is known, and `cute-attn tune {traits} --static` lists some"


def _built(kernel: Any, target: str, lines: bool) -> CompiledKernel:
    bundled = None if lines else _bundled(kernel, target)
    if bundled is not None:
        return bundled
    if not _without_dsl.is_installed():
        raise BundleUnusable(_why_not_built(kernel, target))
    key = key_of(kernel, target, lines=lines)
    known = _kernels.get(key)
    if known is not None:
        return known
    cache = usable_cache()
    entry = cache.get(key) if cache is not None else None
    if entry is not None:
        return _kernels.setdefault(key, CompiledKernel(kernel, target, entry, from_cache=True))
    with _alone():
        if key not in _kernels:  # another thread may have built it meanwhile
            _let_go(kernel.traits)
            _kernels[key] = _build_once(cache, kernel, target, key, _options(target, lines))
        return _kernels[key]


def _bundled(kernel: Any, target: str) -> CompiledKernel | None:
    """The bundle's kernel, or None. Warns of an unusable bundle if the DSL can build the kernel, else raises."""
    try:
        bundle = find_bundle()
        if bundle is None:
            return None
        key = bundle_key(kernel, target)
        known = _kernels.get(key)
        if known is not None:
            return known
        entry = bundle.get(key)
    except BundleUnusable as reason:
        if not _without_dsl.is_installed():
            raise
        warn_once(f"kernels are built here: {reason}")
        return None
    if entry is None:
        return None
    return _kernels.setdefault(key, CompiledKernel(kernel, target, entry, from_cache=True))


def why_no_kernels() -> str | None:
    """One sentence that says why no kernel at all can be loaded here, or None."""
    if _without_dsl.is_installed():
        return None
    try:
        found = find_bundle()
    except BundleUnusable as reason:
        return str(reason)
    if found is None:
        return f"there is no bundle of kernels, and {_without_dsl.REASON}; accepted: one of them"
    return None


def _why_not_built(kernel: Any, target: str) -> str:
    """The message for a kernel that is not bundled and cannot be built, since the DSL is not installed."""
    bundle = find_bundle()
    where = f"{VARIABLE} names no bundle" if bundle is None else f"the bundle {bundle.root} does not hold it"
    return (
        f"{kernel.traits.name} for {target} with tile {kernel.tile} cannot be loaded: {where}, and "
        f"{_without_dsl.REASON}; accepted: a bundle of `cute-attn bundle` that holds it, or nvidia-cutlass-dsl"
    )


def key_of(kernel: Any, target: str, *, lines: bool = False) -> str:
    """The key under which :func:`build` caches the kernel."""
    key = cache_key(*_what(kernel, target, lines))
    # The source lines of the epilogues' functions appear in line info.
    functions = map(user_epilogue, kernel.traits.epilogues if lines else ())
    places = "".join(repr(found) for one in functions if (found := getattr(one, "source_places", None)))
    return digest(key.encode(), places.encode()) if places else key


def bundle_key(kernel: Any, target: str) -> str:
    return source_key(*_what(kernel, target, lines=False))


def _what(kernel: Any, target: str, lines: bool) -> tuple[Traits, Any, str, str, tuple[type, ...]]:
    classes = kernel_classes(type(kernel), kernel.traits)
    return kernel.traits, kernel.tile, target, _options(target, lines), classes


def _options(target: str, lines: bool) -> str:
    return f"{_OPTIONS} --gpu-arch {_GPU_ARCH[target]}" + (_LINE_INFO if lines else "")


def is_built(kernel: Any, target: str, *, lines: bool = False) -> bool:
    """True if :func:`build` would find the kernel in the bundle, in memory or on disk."""
    if not lines and _bundled(kernel, target) is not None:
        return True
    key, cache = key_of(kernel, target, lines=lines), usable_cache()
    return key in _kernels or (cache is not None and cache.get(key) is not None)


def kernel_classes(kernel_class: type, traits: Traits) -> tuple[Any, ...]:
    """The classes whose sources shape a kernel: its class and, for users' epilogues, their classes or function objects.

    Traced functions are left out: their names are digests of their operations.
    """
    if not (traits.variant or traits.epilogues):
        return (kernel_class,)
    current = registry.kernel_class(traits) or kernel_class
    return (current, *(user_epilogue(name) for name in traits.epilogues if not name.startswith(TRACED)))


def _let_go(traits: Traits) -> None:
    """If ``traits`` has a traced function, drop the kernels whose traced functions no longer exist."""
    if any(name.startswith(TRACED) for name in traits.epilogues):
        for known in (_requests, _kernels):
            for key, kernel in list(known.items()):
                if any(x.startswith(TRACED) and not is_registered(x) for x in kernel.traits.epilogues):
                    known.pop(key, None)  # type: ignore[call-overload]


def loaded_kernels() -> list[CompiledKernel]:
    """All kernels that this process has built or found, in that order."""
    return list(_kernels.values())


def default_target(arch: str) -> str:
    """The target of torch's current GPU, or without a GPU ``arch``, a kernel's generation.

    Raises:
        ValueError: no kernel is built for the GPU's generation.
    """
    if not _has_driver():
        return arch
    import torch  # takes seconds, and compiling needs none

    if not torch.cuda.is_available():
        return arch
    return _device_target(*torch.cuda.get_device_capability())


@functools.cache
def _has_driver() -> bool:
    """True if there may be a GPU, so that loading torch, which takes seconds, is worthwhile."""
    if "torch" in sys.modules:
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@functools.cache
def _device_target(major: int, minor: int) -> str:
    if major == 9:
        return "sm90"
    if major == 8:
        return {6: "sm86", 9: "sm89"}.get(minor, "sm80")
    if major in (10, 12):  # families of GPUs: sm_100f and sm_120f
        return f"sm{major}0"
    raise ValueError(
        f"the GPU's compute capability is {major}.{minor}; accepted: 8.x, 9.x, 10.x or 12.x, which "
        f"{', '.join(_GPU_ARCH)} stand for"
    )


def _build_once(cache: DiskCache | None, kernel: Any, target: str, key: str, options: str) -> CompiledKernel:
    """Build and store the kernel, or load it if another process has just stored it."""
    with cache.lock(key) if cache is not None else contextlib.nullcontext():
        entry = cache.get(key) if cache is not None else None
        if entry is not None:
            return CompiledKernel(kernel, target, entry, from_cache=True)
        entry = _build(kernel, target, key, options)
        return CompiledKernel(kernel, target, entry, False, _store(cache, entry))


def _store(cache: DiskCache | None, entry: Entry) -> str | None:
    """Store an entry; return why that failed, or None."""
    if cache is None:
        return "there is no disk cache"
    try:
        cache.put(entry)
        return None
    except CacheUnusable as error:
        reason = str(error)
    except OSError as error:
        reason = f"the cache {cache.root} cannot be written ({error.strerror or error}); {ELSEWHERE}"
    warn_once(f"compiled kernels stay in this process: {reason}")
    return reason


def _build(kernel: Any, target: str, key: str, options: str) -> Entry:
    start = time.perf_counter()
    check_layouts(kernel)
    function = f"cute_attn_{key[:16]}"  # loaded kernels need different symbols
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as name:
        folder = Path(name)
        places = shlex.join(["--dump-dir", name, f"--remark-output={folder / 'remarks'}"])
        stream = dsl().runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        with dsl().no_arguments():
            compiled = dsl().cute.compile(kernel, *fakes(kernel), stream, options=f"{options} {places}")
        compiled.export_to_c(str(folder / OBJECT), function_name=function)
        files = {
            OBJECT: (folder / OBJECT).read_bytes(),
            CUBIN: bytes(compiled.__cubin__),
            PTX: compiled.__ptx__.encode(),
        }
        remarks = (folder / "remarks").read_text("utf-8", "replace")
        module = str(compiled.ir_module)
    resources = _cubin.read_resources(files[CUBIN], remarks, module)
    meta = {
        "name": kernel.traits.name,
        "tile": asdict(kernel.tile),
        "target": target,
        "resources": asdict(resources),
        "warnings": list(_cubin.read_warnings(remarks)),
        "seconds": round(time.perf_counter() - start, 3),
        "function": function,
        "toolchain": toolchain(),
    }
    return Entry(key, meta, files)


def check_layouts(kernel: Any) -> None:
    """Check the layouts, copies and MMAs of a user's kernel, which no test covers: errors there would be silent.

    Raises:
        ValueError: a layout, copy or MMA is wrong; the message describes the first error.
    """
    if type(kernel).__module__.startswith("cute_attn."):
        return
    reason = next(dsl().reasons(kernel), None)
    if reason is not None:
        raise ValueError(f"{kernel.traits}: {reason}")


@dataclass(frozen=True)
class Prebuilt:
    """The result of one request to :func:`prebuild`.

    Attributes:
        traits, tile, target: the request.
        seconds: build time, 0 if the kernel was on disk.
        error: the error's message, or None.
    """

    traits: Traits
    tile: Any
    target: str | None
    seconds: float
    error: str | None


Request = tuple[Traits, Any, str | None]
"""(traits, tile or its text or None, target or None)."""


def prebuild(
    requests: Iterable[Traits | str | tuple], workers: int | None = None, *, lines: bool = False
) -> Iterator[Prebuilt]:
    """Build many kernels into the disk cache in parallel processes; yield each result when it is built.

    The processes load the files that register the requests' variants and epilogues, but not the running script:
    this process builds kernels whose classes are defined in the script.

    Args:
        requests: for each kernel the traits or their name, or (traits or their name, tile or its text or None[, target
            or None]), with the meanings of :func:`compile`.
        workers: number of processes; by default one per core.
        lines: build with line info, as in :func:`compile`.

    Raises:
        TypeError: a request has another type.
        ValueError: the disk cache is off or unusable, a name or number is invalid, or a loaded file calls this.
    """
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers is {workers!r}; accepted: 1 or more, or None for one a core")
    if in_prebuild_worker:
        raise ValueError(
            "a module that registers kernels calls prebuild when it is imported; accepted: a script"
        )
    needed_cache("prebuilding needs").prepare()
    return _prebuilt(as_requests(requests), workers, lines)


def _prebuilt(wanted: list[Request], workers: int | None, lines: bool) -> Iterator[Prebuilt]:
    modules = {request: user_modules(request) for request in wanted}
    own = [request for request in wanted if "__main__" in modules[request]]
    yield from _build_in_processes(
        [request for request in wanted if request not in own], modules, workers, lines
    )
    for request in own:
        yield Prebuilt(*request, *build_for_later(*request, lines=lines))


def as_requests(requests: Any) -> list[Request]:
    """Validate the ``requests`` of :func:`prebuild` and return each once, with traits in place of names."""
    accepted = (
        "kernels' names such as 'forward-sm80-bf16-d128', or tuples (name, tile or None, target or None)"
    )
    if isinstance(requests, str | Traits) or not isinstance(requests, Iterable):
        raise TypeError(f"requests is {requests!r:.100}; accepted: a list of {accepted}")
    found: dict[Request, None] = {}
    for one in requests:
        parts = tuple(one) if isinstance(one, tuple | list) else (one,)
        if not 1 <= len(parts) <= 3 or not isinstance(parts[0], str | Traits):
            raise TypeError(f"requests has {one!r:.100}; accepted: {accepted}")
        traits, tile, target = (*parts, None, None)[:3]
        check_tile(tile)
        if target is not None:
            check_target(target)
        found[Traits.of(traits), tile, target] = None
    return list(found)


def build_for_later(
    traits: Traits | str, tile: Any, target: str | None, *, lines: bool = False
) -> tuple[float, str | None]:
    """Build one kernel into the disk cache; return the seconds it took (0 if cached) and an error or None."""
    try:
        compiled = compile(traits, tile, target, lines=lines)
    except Exception as failure:  # the result of that request
        return 0.0, f"{type(failure).__name__}: {failure}"
    return (0.0 if compiled.from_cache else compiled.seconds), compiled.not_stored


def user_modules(request: Request) -> dict[str, str]:
    """Names and files of the modules that define a request's tile, variant and epilogues."""
    traits, tile, _ = request
    classes: tuple[Any, ...] = () if tile is None else (type(tile),)
    base = registry.kernel_class(traits)
    if base is not None and (traits.variant or traits.epilogues):
        with contextlib.suppress(KeyError):  # building it reports unregistered names
            classes += kernel_classes(base, traits)
    ours = ("cute_attn", "builtins")
    homes = [getattr(x, "written", x).__module__ for x in classes]  # a function's module for its object
    names = dict.fromkeys(home for home in homes if home.partition(".")[0] not in ours)
    return {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}


def _build_in_processes(
    requests: list[Request], modules: dict[Request, dict[str, str]], workers: int | None, lines: bool
) -> Iterator[Prebuilt]:
    if not requests:
        return
    count = max(1, min(workers or os.cpu_count() or 1, len(requests)))
    processes = Workers("cute_attn.compiler.prebuild_worker", count)
    try:
        futures = {
            processes.ask(as_message(request, modules[request]) | {"lines": lines}): request
            for request in requests
        }
        for future in concurrent.futures.as_completed(futures):
            answer = future.result()
            yield Prebuilt(*futures[future], answer.get("seconds", 0.0), answer["error"])
    finally:  # also where the caller stops early
        processes.stop()


def as_message(request: Request, modules: dict[str, str]) -> dict[str, Any]:
    """The message with which :mod:`cute_attn.compiler.prebuild_worker` is asked. modules: its :func:`user_modules`."""
    traits, tile, target = request
    text = None if tile is None else text_of(tile)
    return {"traits": traits.name, "tile": text, "target": target, "modules": modules}
