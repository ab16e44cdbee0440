"""Building without a GPU, reports of builds, and the cache's key."""

import ast
import builtins
import copy
import dataclasses
import gc
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import pytest

from cute_attn import compiler, lookup
from cute_attn.compiler import cache, compile, compiled, cubin, fingerprint, registry, workers
from cute_attn.lab.card import Contender
from cute_attn.lab.pictures import pictures
from cute_attn.lab.verdict import verdict
from cute_attn.traits import Traits
from tests import processes, refusals, toy
from tests.conftest import forget

ROOT = Path(__file__).parents[2]
TRAITS = Traits.parse(toy.NAME)


# ---- what a build reports ----


@pytest.mark.parametrize(
    "target, arch", [("sm80", "sm_80"), ("sm90", "sm_90a"), ("sm100", "sm_100f"), ("sm120", "sm_120f")]
)
def test_builds_for_a_target_without_a_gpu(fresh_cache, target, arch):
    compiled = compile(toy.NAME, target=target)
    assert f".target {arch}" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert arch.rstrip("f") in compiled.sass.splitlines()[0]  # a family's oldest target
    assert compiled.instructions["FFMA"] >= compiled.tile.values
    assert sum(compiled.instructions.values()) == len(re.findall(r"/\*[0-9a-f]{4,}\*/", compiled.sass))
    assert not compiled.from_cache and compiled.seconds > 0


def test_a_temporary_folder_with_a_space(fresh_cache, tmp_path, monkeypatch):
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert compile(toy.NAME, target="sm80").resources.registers > 0


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("tile", ["values=8", "values=256", "values=8,staged=false"])
@pytest.mark.filterwarnings("ignore::cute_attn.SpillWarning")
def test_resources_equal_cuobjdump(fresh_cache, tmp_path, target, tile):
    compiled = compile(toy.NAME, tile, target)
    (tmp_path / "kernel.cubin").write_bytes(compiled.cubin)
    command = [cubin.cuda_tool("cuobjdump"), "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = ("REG", "STACK", "LOCAL")
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in words)
    resources = compiled.resources
    assert (resources.registers, resources.local_bytes) == (registers, stack + local)
    assert resources.shared_memory_bytes == compiled.tile.smem_bytes(TRAITS)


def test_a_kernel_that_spills_reports_it_and_warns_once(fresh_cache, monkeypatch):
    text = (
        f"{toy.NAME} for sm80 keeps [0-9]+ bytes of each thread in local memory, .* tile values=256; no tile without "
        f"spills is known, and `cute-attn tune {toy.NAME} --static` lists some"
    )
    with pytest.warns(compiler.SpillWarning, match=text) as warned:
        built = compile(toy.NAME, "values=256", "sm80")
    assert [x.filename for x in warned if x.category is compiler.SpillWarning] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile(toy.NAME, "values=256", "sm80") is built
        lean = compile(toy.NAME, target="sm80")
    assert built.resources.spill_store_bytes > 0 and built.instructions["STL"] > 0
    assert built.resources.spill_load_bytes > 0 and built.instructions["LDL"] > 0
    assert lean.resources.spill_store_bytes == lean.resources.spill_load_bytes == 0
    assert not lean.instructions.keys() & {"STL", "LDL"}
    forget(monkeypatch)
    with pytest.warns(compiler.SpillWarning, match=text):  # like an operator in a new process
        found = compiler.build(registry.lookup(TRAITS, "values=256", "sm80"), "sm80")
    assert found.from_cache


ANOTHER = "tile_n=80"
WITHOUT_SPILLS = {
    "forward-sm80-bf16-d64-causal": "its default tile, tile_m=128,tile_n=96,num_stages=2, does without$",
    "forward-sm80-bf16-d64-causal-rational": "`cute-attn tune forward-sm80-bf16-d64-causal-rational --static` lists",
    "forward-sm80-bf16-d64-traced_0": "no tile without spills is known, .* NAME --static` lists some of a function",
}


@pytest.mark.parametrize("name", WITHOUT_SPILLS)
def test_the_warning_names_a_tile_that_does_not_spill(name, monkeypatch):
    forget(monkeypatch)
    traits = Traits.parse(name)
    tile = registry.lookup(dataclasses.replace(traits, epilogues=()), ANOTHER, "sm80").tile
    used = compiler.Resources(255, 1024, 8, 8, 16)
    kernel = types.SimpleNamespace(name=name, traits=traits, tile=tile, target="sm80", resources=used)
    with pytest.warns(compiler.SpillWarning, match=WITHOUT_SPILLS[name]):
        compiled._warn_of_spills(kernel)


def test_serialised_wgmma_is_reported(fresh_cache):
    waiting, careless = compile(toy.WGMMA_NAME), compile(toy.WGMMA_NAME, "staged=false")
    assert waiting.warnings == () and waiting.instructions["HGMMA"] == 4
    (warning,) = careless.warnings
    assert warning.startswith("(C7517) wgmma.wait_group is injected") and warning.endswith("defined by GMMA")


def test_remarks_with_colours_and_line_breaks_are_parsed():
    remarks = (
        "\x1b[96mremark\x1b[0m ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async\n"
        "          instructions are serialized due to insufficient register\n          resources in function 'f'\n"
        "ptxas . 72 bytes stack frame, 148 bytes spill\n          stores, 140 bytes spill loads\n"
        "ptxas warning : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\nptxas info : Used 9 registers\n"
    )
    assert cubin.read_warnings(remarks) == (
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register "
        "resources",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored",
    )
    assert cubin.read_warnings("(C7000) something else") == ()
    with pytest.raises(ValueError, match="no spill counts"):
        cubin.read_resources(b"", "nothing of the kind", "")


def test_the_target_is_the_kernels_own_without_a_gpu(fresh_cache, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compile(toy.NAME).target == "sm80"


@pytest.mark.parametrize(
    "capability, target",
    [((8, 0), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 3), "sm100"), ((12, 1), "sm120")],
)
def test_the_target_is_the_gpu_that_is_present(monkeypatch, capability, target):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert compiler.default_target("sm80") == target


def test_wrong_arguments_are_refused_before_a_launch(fresh_cache):
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        compile(toy.NAME)(1, 2)


def test_a_launch_is_bound_by_name(fresh_cache):
    compiled = compile(toy.NAME)
    assert compiled.bind(scale=2.0, mY="y", mX="x") == (compiled.function, "x", "y", 2.0)
    for given in ({"mX": 1, "mY": 2}, {"mX": 1, "mY": 2, "scale": 3.0, "mZ": 4}):
        names = f"{toy.NAME} is launched with {', '.join(given)}; accepted: mX, mY, scale$"
        with pytest.raises(TypeError, match=names):
            compiled.bind(**given)


def test_an_argument_that_cannot_be_faked_is_named(fresh_cache, monkeypatch):
    monkeypatch.setitem(toy.Toy.__call__.__wrapped__.__annotations__, "mY", float)
    with pytest.raises(TypeError, match=r"mY of Toy.__call__ is annotated .*float.*; accepted: a number's"):
        compile(toy.NAME)


def test_what_others_write_during_a_build_is_not_lost(fresh_cache, monkeypatch, capsys):
    fakes = compiled.fakes

    def noisy(kernel):
        thread = threading.Thread(target=print, args=("of another thread",), kwargs={"file": sys.stderr})
        thread.start()
        thread.join()
        return fakes(kernel)

    monkeypatch.setattr(compiled, "fakes", noisy)
    assert compile(toy.NAME, target="sm80").resources.registers > 0
    assert capsys.readouterr().err == "of another thread\n"


# ---- the cache ----


def test_found_in_memory_and_on_disk(fresh_cache, monkeypatch):
    built = compile(toy.NAME, target="sm80")
    assert compile(TRAITS, toy.ToyTile(), "sm80") is built
    forget(monkeypatch)
    monkeypatch.setattr("cutlass.cute.compile", None)  # a warm load builds nothing
    found = compile(toy.NAME, target="sm80")
    assert found.from_cache and found.key == built.key and found.seconds == built.seconds
    assert (found.ptx, found.cubin, found.resources) == (built.ptx, built.cubin, built.resources)
    cache.default_cache().prune()  # a kernel outlives its file: what was checked is what is loaded, later
    assert callable(found.function) and compile(toy.NAME, target="sm80") is found


def test_nothing_on_disk_when_switched_off(fresh_cache, monkeypatch):
    monkeypatch.setenv("CUTE_ATTN_CACHE", "0")
    compiled = compile(toy.NAME, target="sm80")
    assert callable(compiled.function) and compiled.ptx and not fresh_cache.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped in the middle", "flipped last", "empty", "gone"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(fresh_cache, monkeypatch, damage):
    key = compile(toy.NAME, target="sm80").key
    path = fresh_cache / "kernels" / key
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        if "flipped" in damage:
            content[len(content) // 2 if "middle" in damage else -1] ^= 1
        path.write_bytes({"truncated": content[:-1], "empty": b""}.get(damage, content))
    forget(monkeypatch)
    assert not compile(toy.NAME, target="sm80").from_cache
    forget(monkeypatch)
    assert compile(toy.NAME, target="sm80").from_cache


def test_prune_by_last_use(fresh_cache):
    store = cache.default_cache()
    old, new = compile(toy.NAME, target="sm80").key, compile(toy.NAME, target="sm90").key
    a_day_ago = time.time() - 86400
    os.utime(fresh_cache / "kernels" / old, (a_day_ago, a_day_ago))
    (fresh_cache / "kernels" / "broken").mkdir()
    count, size = store.prune(older_than=3600)
    assert count == 2 and size > 0
    assert [entry.key for entry in store.entries()] == [new]
    assert store.prune()[0] == 1 and store.entries() == []


COLD = """
import sys
from tests import processes, toy
from cute_attn.compiler import compile
compiled = compile(toy.NAME, target="sm80")
compiled.function
print(compiled.from_cache, compiled.key)
"""


def test_eight_cold_processes_build_once(fresh_cache, tmp_path):
    script = tmp_path / "cold.py"
    script.write_text(COLD)
    done = processes.run_at_once([(str(script),)] * 8)
    assert [(process.returncode, process.stderr) for process in done] == [(0, "")] * 8
    results = [process.stdout.split() for process in done]
    assert sorted(found for found, _ in results) == ["False"] + 7 * ["True"]
    assert len({key for _, key in results}) == 1
    assert len(list((fresh_cache / "kernels").iterdir())) == 1


GUARDLESS = """
import sys
from dataclasses import dataclass
from cute_attn import Traits, prebuild, register
from cute_attn.compiler import compile
from my_kernels import Mine

print("script")

@dataclass(frozen=True)
class Own(Mine):
    pass

register(Own, variant="own")
names = ["forward-sm80:mine-bf16-d64", "forward-sm80:own-bf16-d64", "forward-sm80:test-bf16-d64"]
requests = [(Traits.parse(name), None, "sm80") for name in names]
print(sorted((built.traits.variant, built.error, built.seconds > 0) for built in prebuild(requests, 1)))
print([compile(*request).from_cache for request in requests])
"""
REGISTERING = """
from dataclasses import dataclass
from cute_attn import register
from tests.toy import Toy

@dataclass(frozen=True)
class Mine(Toy):
    pass

register(Mine, variant="mine")
"""
NAMED_AS_ANOTHER = REGISTERING.replace('"mine"', '"test"')


@pytest.mark.slow
def test_prebuild_in_a_script_without_a_guard(fresh_cache, tmp_path):
    """The script runs once; kernels that it registers are built too, even from modules outside sys.path."""
    (tmp_path / "script.py").write_text(GUARDLESS)
    (tmp_path / "my_kernels.py").write_text(REGISTERING + "import test_support_kernels\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "test.py").write_text(NAMED_AS_ANOTHER)  # Python has a module of that name
    (tmp_path / "test_support_kernels.py").write_text(
        f"from cute_attn.cli.main import _load\nfrom pathlib import Path\n_load(Path({str(elsewhere / 'test.py')!r}))\n"
    )
    done = processes.alone("script.py", folder=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    expected = [(name, None, True) for name in ("mine", "own", "test")]
    found = [True, False, True]  # the script's process built the script's kernel
    assert done.stdout == f"script\n{expected}\n{found}\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["compiler.prebuild_worker", "lab.tune_worker"])
def test_a_worker_whose_caller_has_ended_ends_without_a_word(module):
    done = processes.alone("-m", f"cute_attn.{module}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_module_that_prebuilds_when_imported_terminates(fresh_cache, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    call = "from cute_attn import Traits, prebuild\nfor _ in prebuild([(Traits.parse('forward-sm80:test-bf16-d64'),"
    call += " None, 'sm80')], 1):\n    print(_.error)\n"
    (tmp_path / "prebuilding_module.py").write_text(NAMED_AS_ANOTHER + call)
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = processes.alone("-c", "import prebuilding_module", environment=path)
    assert "a module that registers kernels calls prebuild when it is imported" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("error")  # for example about a pipe left open
def test_each_prebuilt_kernel_has_a_result(fresh_cache, tmp_path, monkeypatch):
    """One is found on disk, one built, one refused, and one ends its process, which another process replaces."""
    monkeypatch.syspath_prepend(tmp_path)
    call = "    def __call__(self, x: \"__import__('os')._exit(3)\", stream): ..."
    source = NAMED_AS_ANOTHER.replace("    pass", call).replace('"test"', '"deadly"')
    (tmp_path / "deadly_kernels.py").write_text(source)
    import deadly_kernels  # noqa: F401

    deadly = Traits.parse("forward-sm80:deadly-bf16-d64")
    wrong = dataclasses.replace(TRAITS, head_dim=128, head_dim_v=128)
    requests = [(deadly, None, "sm80"), TRAITS.name, (TRAITS.name, "values=4", "sm80"), (wrong, None, "sm80")]
    compile(TRAITS, None, "sm80")
    try:
        built = compiler.prebuild(requests, 1)
        done = {(one.traits, one.tile): one for one in built}
    finally:
        del registry.KERNELS["forward", "sm80", "deadly"]
    assert done[deadly, None].error == "the process that built it ended with status 3"
    on_disk, new = done[TRAITS, None], done[TRAITS, "values=4"]
    assert on_disk.error is None and on_disk.seconds == 0
    assert new.error is None and new.seconds > 0 and compile(TRAITS, "values=4", "sm80").from_cache
    assert "head_dim is 128" in done[wrong, None].error
    gc.collect()


def test_closing_the_iterator_stops_the_processes(fresh_cache, monkeypatch):
    """The second build runs until its process is stopped, and no build starts after it."""
    asked, stopped = [], threading.Event()

    def ask(message):
        asked.append(message)
        if len(asked) > 1:
            stopped.wait()
        return {"error": None}

    monkeypatch.setattr(workers, "Worker", lambda module: types.SimpleNamespace(ask=ask, stop=stopped.set))
    built = compiler.prebuild([(TRAITS, f"values={n}", "sm80") for n in (1, 2, 3, 4)], 1)
    next(built)
    built.close()
    assert stopped.is_set() and len(asked) <= 2


# ---- the key ----


def key(traits=TRAITS, tile=None, target="sm80", options="", classes=(toy.Toy,)):
    return fingerprint.cache_key(traits, tile or toy.ToyTile(), target, options, classes)


def test_every_field_of_traits_and_of_a_tile_changes_the_key():
    tile = registry.lookup(Traits.parse("forward-sm80-bf16-d64")).tile
    for what, plain in {"traits": TRAITS, "tile": tile}.items():
        keys = {key(**{what: plain})}
        for field in dataclasses.fields(plain):
            changed = copy.copy(plain)
            object.__setattr__(changed, field.name, "another")  # bypasses the class's checks
            keys.add(key(**{what: changed}))
        assert len(keys) == 1 + len(dataclasses.fields(plain))


def test_target_options_environment_and_toolchain_change_the_key(monkeypatch):
    keys, versions = [key(), key(target="sm90"), key(options="-O1")], dict(fingerprint.toolchain())
    for name in ("cutlass_dsl", "tvm_ffi", "ptx_toolkit", "python", "platform"):
        monkeypatch.setattr(fingerprint, "toolchain", lambda name=name: versions | {name: "other"})
        keys.append(key())
    monkeypatch.setattr(fingerprint, "toolchain", lambda: versions)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_packages_sources_change_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path / "cute_attn")
    monkeypatch.setattr(fingerprint, "_LAYOUTS", tmp_path / "layouts")
    digest = fingerprint.package_sources.__wrapped__
    places = [name if name.endswith(".py") else f"{name}/a.py" for name in fingerprint._SHAPING]
    shaping = [f"cute_attn/{name}" for name in (*places, "kernels/b/tiles.csv")] + ["layouts/a.py"]
    assert "cute_attn/kernels/a.py" in shaping  # and what these import: see the next test

    def change(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.exists()}\n")
        return digest()

    monkeypatch.setattr(fingerprint, "_imported_at", float("inf"))
    keys = [change(name) for name in shaping * 2]  # each is made, then changed
    assert len(set(keys)) == len(keys)
    assert change("cute_attn/host/a.py") == change("cute_attn/lab/a.py") == keys[-1]
    monkeypatch.setattr(fingerprint, "_imported_at", 0.0)  # sources that changed later give unique keys
    assert digest() != digest()


def package_imports(root):
    """(file, imported module as words, the import) of each import from the package in a folder or a file."""
    for path in root.rglob("*.py") if root.is_dir() else [root]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cute_attn"):
                yield path, node.module.split(".")[1:], node


def test_what_shapes_a_kernel_imports_only_that():
    shaping = {name.removesuffix(".py") for name in fingerprint._SHAPING} | {"_imported_at", "_without_dsl"}
    for name in fingerprint._SHAPING:
        for path, places, node in package_imports(ROOT / "cute_attn" / name):
            names = places[:1] or [alias.name for alias in node.names]
            assert set(names) <= shaping, f"{path}: {ast.unparse(node)}"


def test_a_kernel_imports_no_other_one_than_that_which_it_extends():
    shared = {"base", "copies", "dq_order", "fakes"}
    extended: dict[str, set[str]] = {}
    for place in (*registry._OWN.values(), *registry._LARGE.values()):
        own = extended.setdefault(place.partition(".")[0], set())
        bases = [base.__module__.split(".") for base in registry._loaded(place).__mro__]
        own |= {words[2] for words in bases if words[:2] == ["cute_attn", "kernels"]}
    kernels = ROOT / "cute_attn" / "kernels"
    for path, places, node in package_imports(kernels):
        own = path.relative_to(kernels).parts[0].removesuffix(".py")
        if places[:1] == ["kernels"] and len(places) > 1:
            other = {own, *shared, *extended.get(own, ())}
            assert places[1] in other, f"{path}: {ast.unparse(node)}"


def test_a_users_sources_change_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_helper.py").write_text("FACTOR = 2\n")
    (tmp_path / "user_kernel.py").write_text(
        "from tests.toy import Toy\nfrom user_helper import FACTOR\n\nclass Mine(Toy):\n    factor = FACTOR\n"
    )
    import user_kernel

    def digest():
        return fingerprint.user_sources((user_kernel.Mine,))

    first = digest()
    (tmp_path / "user_helper.py").write_text("FACTOR = 3\n")
    second = digest()
    with (tmp_path / "user_kernel.py").open("a") as file:
        file.write("    other = 1\n")
    assert len({first, second, digest()}) == 3
    packages = registry.KERNELS["forward", "sm80", ""]
    assert fingerprint.user_sources((dict,)) == fingerprint.user_sources((packages,))


# ---- classes that no file has ----

CELL = """
from typing import Annotated
import layouts
from tests import toy

{constant}

def helper(x):
    return x * {factor}

class Mine:
    {attribute}

    def smem_layout(self, rows: {annotation}):
        return [helper(row) for row in range(rows)], WIDTH, layouts.BANKS

    @staticmethod
    def kernel():
        return toy.NAME in {{"a", "b", "c"}}
"""


def key_of_a_cell(
    monkeypatch, before="", constant="WIDTH = 8", factor=2, attribute="stages = 3", annotation="int | None"
):
    """Key of a kernel whose class a notebook's cell defines, in a module without a file."""
    module = types.ModuleType("typed_in_a_cell")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = before + CELL.format(constant=constant, factor=factor, attribute=attribute, annotation=annotation)
    exec(builtins.compile(text, f"<cell {len(text)}>", "exec"), module.__dict__)
    return fingerprint.user_sources([module.Mine])


def test_a_typed_class_is_known_by_its_code_and_what_that_names(monkeypatch):
    first = key_of_a_cell(monkeypatch)
    assert key_of_a_cell(monkeypatch, before="# the same cell, further down\n\n") == first
    changes = [
        {"constant": "WIDTH = 9"},
        {"constant": "WIDTH = (8, 1.5)"},
        {"factor": 3},
        {"attribute": "stages = 4"},
        {"attribute": "@property\n    def stages(self):\n        return 3"},
        {"constant": "from tests import processes as WIDTH"},
        {"annotation": "float | None"},
        *({"annotation": f"Annotated[int, lambda kernel: {i}]"} for i in (2, 3)),
    ]
    keys = {first, *(key_of_a_cell(monkeypatch, **change) for change in changes)}
    assert len(keys) == 1 + len(changes)
    with_an_object = [key_of_a_cell(monkeypatch, constant="WIDTH = object()") for _ in range(2)]
    assert len({*keys, *with_an_object}) == len(keys) + 2  # an object never equals another one


def test_a_typed_classes_key_is_that_of_another_process(monkeypatch):
    code = (
        "import pytest\nfrom tests.cpu import test_compiler\n"
        "with pytest.MonkeyPatch.context() as patch: print(test_compiler.key_of_a_cell(patch))"
    )
    done = processes.alone("-c", code, environment={"PYTHONHASHSEED": "1"})
    assert done.stdout == key_of_a_cell(monkeypatch) + "\n", done.stderr


# ---- wrong calls ----

NAME = "forward-sm80-bf16-d64"
NO_TRAITS = "accepted: Traits, or a name such as 'forward-sm80-bf16-d128-causal'"
NO_TILE = "accepted: a Tile, text such as 'tile_n=32', or None"
TARGETS = "accepted: sm80, sm86, sm89, sm90, sm100, sm120"
ASKED = "accepted: kernels' names such as 'forward-sm80-bf16-d128', or tuples"
WRONG = f"""
compile("forward-sm80") -> ValueError: name is 'forward-sm80'
compile(toy.NAME, "rows=3") -> ValueError: tile has 'rows=3'
compile(toy.NAME, "values=0") -> Unsupported: values is 0
compile("forward-sm80:toy-bf16-d128") -> Unsupported: head_dim is 128; accepted: 64
lookup("forward-sm90-bf16-d128", None, "sm100") -> Unsupported: forward-sm90 runs on sm90, not on sm100
lookup("forward-sm90-fp32-d64") -> Unsupported: forward-sm90-fp32-d64:
lookup("forward-sm80-bf16-d64", "tile_n=1024", "sm80")
    -> Unsupported: tile tile_m=128,tile_n=1024,num_stages=2 needs
compiled._device_target(7, 5) -> ValueError: 7.5; accepted
compile(3) -> TypeError: traits is 3; {NO_TRAITS}
lookup(None) -> TypeError: traits is None; {NO_TRAITS}
pictures(3) -> TypeError: kernel is 3; {NO_TRAITS}
Contender.of(3) -> TypeError: kernel is 3; {NO_TRAITS}
verdict(torch.ones(9, 9)) -> TypeError: kernel is a Tensor; {NO_TRAITS}
compiler.prebuild({NAME!r}) -> TypeError: requests is '{NAME}'; accepted: a list of kernels' names such as
compiler.prebuild(3) -> TypeError: requests is 3; accepted: a list of kernels' names such as
compiler.prebuild([3]) -> TypeError: requests has 3; {ASKED}
compiler.prebuild([(NAME, None, None, None)]) -> TypeError: requests has ('{NAME}', None, None, None); {ASKED}
compiler.prebuild([(NAME, 3)]) -> TypeError: tile is 3; {NO_TILE}
compiler.prebuild(["nonsense"]) -> ValueError: name is 'nonsense'; accepted
compiler.prebuild([NAME], 0) -> ValueError: workers is 0; accepted: 1 or more, or None for one a core
compiler.prebuild([NAME], "2") -> ValueError: workers is '2'; accepted: 1 or more, or None for one a core
Traits.parse(5) -> TypeError: name is an int; accepted: text such as 'forward-sm80-bf16-d128-causal'
lookup("forward-sm100-bf16-d64") -> ValueError: arch is 'sm100', a target (--target); accepted: 'sm80', 'sm90'
lookup("forward-sm90-bfloat16-d64") -> ValueError: dtype is 'bfloat16' (did you mean 'bf16'?); accepted: 'fp16'
lookup(f"{{NAME}}-causl") -> ValueError: no feature or epilogue is named 'causl' (did you mean 'causal'?); accepted:
compile(NAME, 3) -> TypeError: tile is 3; {NO_TILE}
lookup(NAME, ["tile_n=32"]) -> TypeError: tile is ['tile_n=32']; {NO_TILE}
lookup(NAME, lookup("backward-sm80-bf16-d64").tile)
    -> TypeError: tile is a BackwardSm80Tile; accepted for forward-sm80: a ForwardSm80Tile
verdict(NAME, b"tile_n=32") -> TypeError: tile is b'tile_n=32'; {NO_TILE}
pictures(NAME, {{"tile_n": 32}}) -> TypeError: tile is {{'tile_n': 32}}; {NO_TILE}
compile(NAME, None, ["sm80"]) -> ValueError: target is ['sm80']; {TARGETS}
lookup(NAME, None, "sm75") -> ValueError: target is 'sm75'; {TARGETS}
verdict(NAME, None, 80) -> ValueError: target is 80; {TARGETS}
pictures(NAME, None, "sm75") -> ValueError: target is 'sm75'; {TARGETS}
"""


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    names = {"verdict": verdict, "pictures": pictures, "Contender": Contender}
    refusals.check(call, sentence, globals() | names)


def test_a_lookup_takes_a_name():
    assert lookup(NAME) == lookup(Traits.parse(NAME))
    assert Contender.of(Traits.parse(NAME)) == Contender.of(NAME)
