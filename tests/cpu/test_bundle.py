"""Bundles of compiled kernels: made here, and read without a compiler."""

import json
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cute_attn import Traits, _without_dsl, lookup
from cute_attn.compiler import bundle, cache, compiled, fingerprint
from cute_attn.compiler.bundle import BundleUnusable, open_bundle
from cute_attn.compiler.cache import CUBIN, LIBRARY
from cute_attn.lab import bundles
from tests import processes, refusals, toy  # noqa: F401  # registers the kernel
from tests.conftest import forget

APPEND, SECOND, FORWARD = (
    Traits.parse(name)
    for name in ("append-sm80-bf16-d64", "append-sm80-fp16-d64", "forward-sm80-bf16-d64-causal")
)
REQUESTS = [(one, None, "sm80") for one in (APPEND, SECOND, FORWARD)]


@pytest.fixture(scope="module", autouse=True)
def built_here():
    """Kernels of a bundle are built in this process, not in new ones, which load the DSL again."""

    def prebuild(requests, workers=None):
        return (compiled.Prebuilt(*one, *compiled.build_for_later(*one)) for one in requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "prebuild", prebuild)
        yield


@pytest.fixture(scope="module")
def made(built_here, tmp_path_factory):
    """A bundle of three small kernels: the first two in one archive, the third in another."""
    folder = tmp_path_factory.mktemp("bundles") / "three"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "_ARCHIVE_BYTES", 128 << 10)
        for built in bundles.make_bundle(REQUESTS, folder):
            assert built.error is None
    return folder


@pytest.fixture(autouse=True)
def unseen(monkeypatch):
    """Nothing in the compiler's memory; no bundle unless a test names one."""
    monkeypatch.delenv(bundle.VARIABLE, raising=False)
    forget(monkeypatch)
    monkeypatch.setattr(cache, "_warned", set())
    open_bundle.cache_clear()


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the bundle, for tests that damage it."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def no_dsl(monkeypatch):
    """To the compiler, the DSL looks as if it were not installed."""
    monkeypatch.setattr(_without_dsl, "is_installed", lambda: False)


def build(traits=APPEND):
    return compiled.build(lookup(traits, None, "sm80"), "sm80")


def key(traits=APPEND):
    return compiled.bundle_key(lookup(traits, None, "sm80"), "sm80")


def archive(folder, number=0):
    return folder / bundle.KERNELS / str(number)


def index(folder):
    return json.loads(bundle.unpack((folder / bundle.INDEX).read_bytes()))


# ---- a machine without a compiler ----


MISSING = {
    "not bundled": "forward-sm80-bf16-d64 for sm80 with tile tile_m=128,...does not hold it, and building kernels "
    "needs nvidia-cutlass-dsl, which is not",
    "cache not bundled": "kvcache-sm80-bf16-d64",
    "no CUDA runtime": "undefined symbol: cuda",
    "a call of the DSL": "RuntimeError: building kernels needs nvidia-cutlass-dsl",
    "ptx": "append-sm80-bf16-d64 comes from a bundle, which holds no PTX",
}
"""Cases in which a process without the DSL lacks something -> the sentence that says so."""


def test_calls_need_no_compiler(made, tmp_path):
    """On the CPU; on a GPU, calls use the bundle's kernels, which check arguments and report the runtime's errors.

    A process without the DSL reports its findings as sentences, see ``tests/without_compiler.py``.
    """
    library = open_bundle(str(made)).get(key()).files[LIBRARY]
    (tmp_path / "kernel.so").write_bytes(library)
    undefined = subprocess.check_output(
        ["nm", "--dynamic", "--undefined-only", tmp_path / "kernel.so"], text=True
    )
    names = {name for name in undefined.split() if name.startswith("cuda")}
    texts = {"cudaGetErrorName", "cudaGetErrorString"}
    failing = [f"int {name}(void) {{ return 35; }}" for name in names - texts]
    source = [*failing, *(f'const char *{name}(int e) {{ return "{name}"; }}' for name in texts)]
    (tmp_path / "runtime.c").write_text("\n".join(source))
    stub = tmp_path / "runtime.so"
    subprocess.run(
        [*bundles.compiler(), "-w", "-shared", "-fPIC", "-o", stub, tmp_path / "runtime.c"], check=True
    )
    done = processes.alone("-m", "tests.without_compiler", stub, environment={bundle.VARIABLE: str(made)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["import cutlass"] == "ModuleNotFoundError: No module named 'cutlass'"
    assert not found["cutlass is found"] and not found["cutlass is loaded"]
    assert found["attention on the CPU"] and found["planned"] == FORWARD.name
    assert found["imported since"] == []  # all that calls need came with ``import cute_attn``
    assert "mQ" in found["launch"] and "device" in found["launch"]
    assert "mKcache" in found["append without arguments"] and "mQ" in found["forward without arguments"]
    failed = "RuntimeError: Got Cuda Runtime Error: cudaGetErrorName cudaGetErrorString"
    assert found["append on a GPU"] == failed
    assert found["registers"] == build().resources.registers and found["how built"] == "from a bundle"
    for what, text in MISSING.items():
        refusals.check_sentence(found[what], text)


# ---- where there is a compiler ----


def test_a_bundle_comes_before_the_cache(made, monkeypatch, fresh_cache):
    monkeypatch.setenv(bundle.VARIABLE, str(made))
    monkeypatch.setattr(compiled, "_build", None)
    kernel = build()
    assert kernel.how_built == "from a bundle" and kernel is build() and not fresh_cache.exists()
    assert compiled.is_built(lookup(APPEND, None, "sm80"), "sm80")
    assert kernel.cubin[:4] == b"\x7fELF" and len(kernel.cubin) < len(kernel._entry.files[LIBRARY])
    assert not compiled.is_built(lookup(APPEND, None, "sm90"), "sm90")


def test_the_machine_code_is_what_was_built(made):
    for traits in (APPEND, SECOND, FORWARD):
        assert open_bundle(str(made)).get(key(traits)).files[CUBIN] == build(traits).cubin


def test_what_builds_a_kernel_does_not_change_its_key_in_a_bundle(monkeypatch):
    before = key()
    monkeypatch.setattr(fingerprint, "toolchain", lambda: {"cutlass_dsl": "other"})
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert key() == before != key(FORWARD)


# ---- refusals ----


def edit(folder, **changes):
    """Change fields of the index; its digest follows."""
    content = index(folder) | changes
    content.pop("digest")
    (folder / bundle.INDEX).write_bytes(bundles.index_file(content))


def edit_without_digest(folder):
    text = json.dumps(index(folder)).replace('"sm80"', '"sm90"')
    (folder / bundle.INDEX).write_bytes(lzma.compress(text.encode()))


DAMAGES = """
edit(copy, format=1) -> its format is 1; accepted: 2
edit(copy, sources="f" * 40) -> made of other sources of cute_attn (0.1.0, fingerprint ffffffffffff)
edit(copy, toolchain={"platform": "linux-aarch64"}) -> it was made on linux-aarch64; accepted: one made on
edit_without_digest(copy) -> its index is damaged
(copy / bundle.INDEX).write_text('{"format": 2}') -> its index is damaged
shutil.rmtree(copy) -> cannot be read (No such file or directory); accepted as CUTE_ATTN_BUNDLE: a folder
archive(copy).write_bytes(b"other") -> is damaged: its SHA-256 begins with
archive(copy).unlink() -> whose file cannot be read (No such
shutil.copy(archive(copy, 1), archive(copy)) -> append-sm80-bf16-d64 in the bundle
"""


@refusals.each(DAMAGES)
def test_a_damaged_or_foreign_bundle_is_refused(call, sentence, copy, monkeypatch, no_dsl):
    eval(call, globals() | {"copy": copy})
    monkeypatch.setenv(bundle.VARIABLE, str(copy))
    assert str(copy) in refusals.check("build()", f"BundleUnusable: {sentence}", globals())


def test_a_compiler_builds_what_a_bundle_cannot_give_and_says_so(copy, monkeypatch):
    monkeypatch.setenv(bundle.VARIABLE, str(copy))
    archive(copy).write_bytes(b"other")
    with pytest.warns(UserWarning, match="kernels are built here: the file of append-sm80-bf16-d64 in the"):
        assert build().how_built != "from a bundle"
    assert build(FORWARD).how_built == "from a bundle"


def test_without_a_bundle_and_a_compiler(no_dsl, monkeypatch, made):
    monkeypatch.setenv(bundle.VARIABLE, str(made))
    assert compiled.why_no_kernels() is None
    monkeypatch.setenv(bundle.VARIABLE, "/none")
    assert "cannot be read" in compiled.why_no_kernels()
    monkeypatch.setenv(bundle.VARIABLE, "0")
    assert compiled.why_no_kernels().startswith("there is no bundle of kernels, and building kernels needs")
    with pytest.raises(
        BundleUnusable, match="cannot be loaded: CUTE_ATTN_BUNDLE names no bundle, and building"
    ):
        build()


def test_an_older_driver_is_refused(monkeypatch):
    import torch

    bundle._check_driver.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(bundle, "_driver_cuda_major", lambda: 12)
    with pytest.raises(BundleUnusable, match=r"built by CUDA 13\.4, and the GPU's driver is of CUDA 12"):
        bundle._check_driver("13.4")
    bundle._check_driver("12.9")


# ---- making one ----


@pytest.mark.slow
def test_a_wheel_installs_and_is_found(tmp_path, monkeypatch):
    wheel, site = tmp_path / bundles.wheel_name(), tmp_path / "site"
    list(bundles.make_bundle(REQUESTS[:1], wheel))
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(
        [sys.executable, *pip], check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("dist-info/LICENSE") for name in archive.namelist())
    monkeypatch.syspath_prepend(site)
    bundle._installed.cache_clear()
    try:
        found = bundle.find_bundle()
        assert found.root == site / "cute_attn_bundle" and list(found.kernels) == [key()]
        assert build().how_built == "from a bundle"
    finally:
        bundle._installed.cache_clear()


def test_a_bundle_is_replaced_and_nothing_else_is(copy):
    stale = archive(copy, 1)
    list(bundles.make_bundle(REQUESTS[:1], copy))
    assert not stale.exists() and list(open_bundle(str(copy)).kernels) == [key()]


@pytest.mark.parametrize("name", ["made.whl", "made.zip", ".", "/proc/none"])
def test_wrong_outputs(tmp_path, name):
    """Refused before kernels are built."""
    (tmp_path / "something").touch()
    with pytest.raises(ValueError, match=r"-o is .*; accepted: a"):
        bundles.make_bundle(REQUESTS, tmp_path / name)


def test_no_c_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(ValueError, match="linked by 'no-such-compiler', which cannot be run"):
        bundles.make_bundle(REQUESTS, tmp_path / "made")


def test_a_backward_comes_with_the_kernels_beside_it():
    found = bundles.named_requests(["backward-sm80-bf16-d64-causal"], "", ["sm80", "sm90"])
    names = {traits.name for traits, _, target in found if target == "sm80"}
    assert names == {
        "backward-sm80-bf16-d64-causal",
        "backward_preprocess-sm80-bf16-d64",
        "backward_preprocess-sm80-bf16-d64-lse_grad",
        "backward_convert-sm80-bf16-d64",
    }
    assert len(found) == 2 * len(names)
    assert {
        target for _, _, target in bundles.named_requests(["append-sm90-bf16-d64"], "", ["sm80", "sm90"])
    } == {"sm90"}


@pytest.mark.slow
def test_a_programs_kernels_are_listed_and_bundled(tmp_path, made):
    program = tmp_path / "program.py"
    program.write_text(
        f"import torch, cute_attn\ncute_attn.compile({APPEND.name!r}, 'num_threads=64', 'sm80')\n"
    )
    listed = tmp_path / "run.json"
    done = processes.run(
        *("-m", "cute_attn", "run", "--json", str(listed), str(program)), environment={bundle.VARIABLE: "0"}
    )
    assert done.returncode == 0, done.stderr
    tile = lookup(APPEND, "num_threads=64").tile
    assert bundles.like([listed, listed]) == [(APPEND, tile, "sm80")]
    for command, text in (
        (("bundle", "-o", str(tmp_path / "made")), "1 kernel: 1 append\n"),
        (("cache", "prebuild"), "1/1"),
    ):
        done = processes.run("-m", "cute_attn", *command, "--like", str(listed))
        assert done.returncode == 0 and text in done.stdout, done.stderr
    (meta,) = open_bundle(str(tmp_path / "made")).kernels.values()
    assert meta["tile"] == {"num_threads": 64}

    own = {"name": "forward-sm80-bf16-d64-traced_0123", "tile": "", "target": "sm80"}
    listed.write_text(
        json.dumps({"kernels": [own, {"name": APPEND.name, "tile": tile.text, "target": "sm80"}]})
    )
    with pytest.warns(UserWarning, match=f"left out: {own['name']}, whose function has no name"):
        assert bundles.like([listed]) == [(APPEND, tile, "sm80")]


FUNCTION = """
import torch
from cute_attn import score_mod


@score_mod("distance", example=lambda batch, nheads, *_: (torch.randn(nheads, 129),))
def distance(score, b, h, q_idx, kv_idx, table):
    return score + table[h, (q_idx - kv_idx).clamp(0, 128)]
"""
WITHOUT_COMPILER = """
import sys
sys.path[:] = [path for path in sys.path if "nvidia_cutlass_dsl" not in path]
import cute_attn, own_function
print(cute_attn.compile("forward-sm80-bf16-d64-distance", target="sm80").how_built)
"""


@pytest.mark.slow
def test_users_functions_and_kernels_are_bundled_and_exported(tmp_path, monkeypatch):
    (tmp_path / "own_function.py").write_text(FUNCTION)
    loaded = ("-m", "cute_attn", "--load", str(tmp_path / "own_function.py"), "--load", "tests/toy.py")
    names = ("forward-sm80-bf16-d64-distance", "forward-sm80:toy-bf16-d64", "--target", "sm80")
    for command in ("bundle", "export"):
        done = processes.run(*loaded, command, *names, "-o", str(tmp_path / command))
        assert done.returncode == 0 and "2 kernels" in done.stdout, done.stderr
    assert (tmp_path / "export/forward_sm80_toy_bf16_d64.o").exists()
    monkeypatch.setenv(bundle.VARIABLE, str(tmp_path / "bundle"))
    assert build(Traits.parse("forward-sm80:toy-bf16-d64")).how_built == "from a bundle"
    path = {"PYTHONPATH": f"{processes.ROOT}:{tmp_path}"}
    done = processes.alone("-c", WITHOUT_COMPILER, environment=path)
    assert done.stdout == "from a bundle\n", done.stderr
