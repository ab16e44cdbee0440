"""The package as others meet it: names, types, completion, metadata."""

import ast
import importlib
import json
import re
import sys
import tomllib

import pytest
import torch

import cute_attn
import layouts
from cute_attn.compiler import registry
from cute_attn.kernels.forward_sm80 import ForwardSm80
from tests import processes, refusals, toy

ROOT = processes.ROOT


def in_a_new_process(code):
    done = processes.alone("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_listed_and_loaded_on_first_use():
    assert {*cute_attn.__all__, "lab", "sdpa", "flex", "flash_attn", "transformers"} <= set(dir(cute_attn))
    assert set(cute_attn._HOME) == {*cute_attn.__all__} - {"__version__"}
    text = in_a_new_process(
        "import sys, cute_attn\n"
        "print(*({'torch', 'cutlass', 'rich', 'matplotlib'} & set(sys.modules)))\n"
        "cute_attn.sdpa.served, cute_attn.flash_attn.flash_attn_func, cute_attn.transformers.register\n"
        "assert not {'transformers', 'cutlass'} & set(sys.modules)\n"
        "print(cute_attn.lab.verdict.__name__, cute_attn.lab.statistics.__name__, 'race' in dir(cute_attn.lab))\n"
    )
    assert text == "\ncute_attn.lab.verdict cute_attn.lab.statistics True\n"
    assert {*layouts.__all__} <= {*dir(layouts)}


@pytest.mark.parametrize("package", [cute_attn.lab, layouts], ids=lambda package: package.__name__)
def test_a_package_says_where_a_function_of_a_module_is(package):
    for name, place in package._PLACES.items():
        with pytest.raises(AttributeError, match=f"it is {package.__name__}.{place}$"):
            getattr(package, name)
        module, function = place.split(".")
        assert callable(getattr(importlib.import_module(f"{package.__name__}.{module}"), function))


ELSEWHERE = """
cute_attn.atention -> AttributeError: no attribute 'atention'
cute_attn.lab.verdct -> AttributeError: no attribute 'verdct'
cute_attn.lab.verdict("forward-sm80-bf16-d64") -> TypeError: its function is cute_attn.lab.verdict.verdict
cute_attn.lab.race() -> TypeError: cute_attn.lab.race is a module
importlib.import_module("layouts.show")(lambda: None, "mma.png") -> TypeError: its function is layouts.show.show
"""


@refusals.each(ELSEWHERE)
def test_what_is_no_name_or_a_module_is_said(call, sentence):
    refusals.check(call, sentence, globals())


@pytest.mark.parametrize("package", [cute_attn, layouts], ids=lambda package: package.__name__)
def test_type_checkers_see_every_name_where_it_is(package):
    own = package.__name__
    tree = ast.parse((ROOT / own / "__init__.pyi").read_text())
    imports = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names if node.module != own}
    stated = {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}
    assert {name: seen.get(name, f"{own}.{module}") for name, module in package._HOME.items()} == {
        name: f"{own}.{module}" for name, module in package._HOME.items()
    }
    assert stated | set(seen) >= set(package._HOME) and not stated & set(seen)
    modules = {alias.name for node in imports for alias in node.names if node.module == own}
    assert modules == set(getattr(package, "_MODULES", ()))
    (names,) = (x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__")
    assert ast.literal_eval(names.value) == sorted(package.__all__)


STATED = {"attention": "_AttentionOptions", "attention_varlen": "_VarlenOptions"}
STATED["attention_with_kvcache"] = "_KvcacheOptions"


@pytest.mark.parametrize("name", STATED)
def test_overloads_have_the_arguments_of_their_function(name):
    """Names and types are compared as text."""
    stub = ast.parse((ROOT / "cute_attn/__init__.pyi").read_text()).body
    module = ROOT / "cute_attn" / (cute_attn._HOME[name].replace(".", "/") + ".py")
    (real,) = (x for x in ast.parse(module.read_text()).body if getattr(x, "name", "") == name)

    def texts(arguments):
        return {one.arg: ast.unparse(one.annotation) for one in arguments}

    classes = {x.name: x for x in stub if isinstance(x, ast.ClassDef)}
    options = [classes[STATED[name]]]
    options += [classes[base.id] for base in options[0].bases if base.id in classes]
    fields = {x.target.id: ast.unparse(x.annotation) for one in options for x in one.body}
    returned = {one for one in texts(real.args.kwonlyargs) if one.startswith("return_")}
    assert fields == {n: t for n, t in texts(real.args.kwonlyargs).items() if n not in returned}
    overloads = [x for x in stub if getattr(x, "name", "") == name]
    both = {"return_softmax", "return_max_scores"} <= returned  # which exclude each other
    assert len(overloads) == 1 + 2 ** len(returned) * 3 // (4 if both else 3)
    for one in overloads:
        assert texts(one.args.args) == texts(real.args.args)
        assert {x.arg for x in one.args.kwonlyargs} == returned


# That mypy knows it, too, is checked by `make types`.
USERS_FILE = re.sub(r"# type: ignore.*", "# wrong", (ROOT / "tests/users.py").read_text())
WRONG_LINES = [n for n, line in enumerate(USERS_FILE.splitlines(), 1) if "# wrong" in line]


@pytest.mark.doors("basedpyright")
def test_an_editor_knows_what_a_users_call_returns(tmp_path):
    """Editors use pyright, or basedpyright, which is derived from it."""
    (tmp_path / "users.py").write_text(USERS_FILE)
    options = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "include": ["users.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = ("-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    done = processes.alone(*command, folder=tmp_path)
    said = json.loads(done.stdout)
    errors = [one for one in said["generalDiagnostics"] if one["severity"] == "error"]
    assert sorted({one["range"]["start"]["line"] + 1 for one in errors}) == WRONG_LINES, done.stdout


def test_every_file_of_a_package_is_installed():
    """Python files by the packages that are found, all others by a pattern."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "."}
    packages = ("cute_attn", "layouts", "tour")
    assert setuptools["packages"]["find"]["include"] == [f"{name}*" for name in packages]
    data = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = [path for name in packages for path in (ROOT / name).rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    assert {path for path in files if path.suffix != ".py"} == data
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_source_distribution_has_what_its_tests_read():
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    named = {name for line in lines if line.startswith(("graft", "include")) for name in line.split()[1:]}
    assert {"bench", "docs", "examples", "tests", "constraints.txt", "Makefile"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "tests/gpu").glob("test_*.py")))
def test_gpu_tests_can_be_collected_without_a_gpu(module):
    if module == "test_transformers":
        pytest.importorskip("transformers")
    importlib.import_module(f"tests.gpu.{module}")


def test_another_system_is_refused_in_one_sentence():
    code = "import sys\nsys.platform = 'win32'\n"
    code += "try:\n    import cute_attn\nexcept ImportError as error:\n    print(error)\n"
    text = "cute_attn runs on Linux, as its compiler does; this system is win32\n"
    assert in_a_new_process(code) == text


def test_shells_complete_commands_and_names():
    def offered(line):
        asked = {
            "_CUTE_ATTN_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        return processes.run("-m", "cute_attn", environment=asked).stdout.split()

    assert offered("cute-attn ver") == ["verdict"]
    assert offered("cute-attn verdict backward-sm") == ["backward-sm80", "backward-sm90"]
    assert "forward-sm80-bf16-d128-causal" in offered("cute-attn check forward-sm80-bf16-d128-ca")
    assert offered("cute-attn verdict forward-sm80-bf16-d128 --target sm9") == ["sm90"]
    tile = "cute-attn verdict forward-sm80-bf16-d64 --tile "
    assert offered(tile + "tile_n=64,qk_") == ["tile_n=64,qk_unroll="]
    assert offered(tile + "num_stages=2,num_st") == []


def test_a_variant_of_a_class_for_two_generations_says_which(monkeypatch):
    monkeypatch.setattr(registry, "KERNELS", dict(registry.KERNELS))
    mine = extending("combine", "sm90")
    cute_attn.register(mine, variant="mine", arch="sm90")
    assert registry.KERNELS["combine", "sm90", "mine"] is mine
    other = type("Other", (), dict.fromkeys(("supports", "default_tile", "__call__"), print))
    cute_attn.register(other, variant="other")
    assert registry.KERNELS["forward", "sm80", "other"] is other


def extending(op, arch):
    return type("Mine", (registry.KERNELS[op, arch, ""],), {})


NO_KERNELS = """
register(3, variant="x")
    -> TypeError: kernel is 3; accepted: a class that extends one of the package's kernels, such as ForwardSm80
register(None, variant="x") -> TypeError: kernel is None; accepted: a class that extends
register(type("X", (), {}), variant="x")
    -> TypeError: kernel is X, without supports, __call__, default_tile; accepted: ...ForwardSm80, or has its methods
register(dict, variant="x") -> TypeError: kernel is dict, without supports, ...; accepted: a class that extends
register(ForwardSm80, variant="my variant-2") -> ValueError: variant is 'my variant-2'; accepted: a lower-case word
register(ForwardSm80, variant="") -> ValueError: variant is ''; accepted: a lower-case word
register(ForwardSm80, variant=3) -> ValueError: variant is 3; accepted: a lower-case word
register(toy.Toy, variant="x", op="sideways") -> ValueError: op is 'sideways'; accepted: forward, backward,
register(toy.Toy, variant="x", arch="sm75") -> ValueError: arch is 'sm75'; accepted: sm80, sm90
register(registry.KERNELS["append", "sm80", ""], variant="x", op="forward")
    -> ValueError: op is 'forward' ... 'append' and 'sm80'
register(extending("forward", "sm90"), variant="x", arch="sm75")
    -> ValueError: arch 'sm75' for Mine; accepted of what it extends: 'forward' and
register(extending("combine", "sm90"), variant="x")
    -> ValueError: accepted of what it extends: 'combine' and 'sm80' or 'combine' and 'sm90'
"""


@refusals.each(NO_KERNELS)
def test_what_is_no_kernel_is_not_registered(call, sentence):
    before = dict(registry.KERNELS)
    refusals.check(call, sentence, {**globals(), "register": cute_attn.register})
    assert before == registry.KERNELS


class Narrower(ForwardSm80):
    """A kernel with different layouts and tile and an unknown name, but the same definition."""

    PAD = 8

    def smem_layout(self, rows, head_dim, stages=1):
        return super().smem_layout(rows, head_dim, stages)

    @classmethod
    def default_tile(cls, traits, target):
        return super().default_tile(traits, target)


Kvcache, ForwardSm90 = registry.KERNELS["kvcache", "sm80", ""], registry.KERNELS["forward", "sm90", ""]


def changed(name, base, *attributes):
    return type(name, (base,), dict.fromkeys(attributes))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Narrower, None),
        (type("Copied", (Kvcache,), {"gmem_load": ForwardSm80.gmem_load}), None),
        (changed("Capped", Narrower, "score_args"), "Capped overrides score_args"),
        (changed("Called", ForwardSm80, "__call__"), "Called overrides __call__"),
        (changed("Typed", ForwardSm80, "dtype", "kernel"), "Typed overrides dtype, kernel"),
        (changed("Produced", ForwardSm90, "run_roles"), "Produced overrides run_roles"),
        (toy.Toy, "Toy extends no kernel of the package"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_variant_computes_on_the_cpu_what_it_means_or_is_refused(monkeypatch, kernel, reason):
    monkeypatch.setattr(registry, "KERNELS", dict(registry.KERNELS))
    cute_attn.register(kernel, variant="mine")
    ((op, arch, _),) = (key for key in registry.KERNELS if key[2] == "mine")
    q = torch.randn(1, 16, 2, 64)
    call = cute_attn.attention if op == "forward" else cute_attn.attention_with_kvcache
    if reason is None:
        assert torch.equal(call(q, q, q, kernel=f"{arch}:mine"), call(q, q, q))
        return
    with pytest.raises(
        ValueError, match=f"^kernel is '{arch}:mine', and {reason}; accepted on the CPU"
    ) as error:
        call(q, q, q, kernel=f"{arch}:mine")
    assert str(error.value).endswith("others need a GPU")
