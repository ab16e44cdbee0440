"""The command line: output, and one sentence with status 2 for a wrong call."""

import json
import re

import pytest

from cute_attn import __version__, defaults, lookup
from cute_attn.compiler import registry
from cute_attn.traits import FEATURES
from tests import processes, refusals, toy  # noqa: F401  # registers the kernel

TOY = "forward-sm80:toy-bf16-d64"
LOAD = ("--load", "tests/toy.py")


@pytest.fixture
def run(tmp_path):
    """Run the command with an empty cache, or with ``cache`` as CUTE_ATTN_CACHE."""

    def run(*arguments, cache="1"):
        environment = {
            "CUTE_ATTN_CACHE_DIR": str(tmp_path / "cache"),
            "CUTE_ATTN_CACHE": cache,
            "COLUMNS": "120",
        }
        return processes.run("-m", "cute_attn", *arguments, environment=environment)

    return run


def ok(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


LOADED = """
import gc, sys
from cute_attn.__main__ import main
try:
    main()
finally:
    heavy = "torch", "cutlass", "matplotlib", "networkx", "cute_attn.lab.verdict"
    print(*(name for name in heavy if name in sys.modules), file=sys.stderr)
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, file=sys.stderr)
"""


def loading(*command, **environment):
    """Run a command in a new process, which prints the modules that it has loaded."""
    return processes.alone("-c", LOADED, *command, environment=environment)


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (["--help"], ""),
        (["list"], ""),
        (["list", "forward-sm80"], ""),
        (["explain", "backward-sm90-bf16-d64", "tile_n"], ""),
        (["explain", "causal", "bound", "fits"], ""),
        ([*LOAD, "verdict", TOY, "--target", "sm80"], "cutlass networkx cute_attn.lab.verdict"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_loads_what_it_needs(command, loaded, tmp_path):
    """A verdict, of a kernel that is built already. The kernels' objects are none that garbage is looked for among."""
    if "verdict" in command:
        ok(processes.run("-m", "cute_attn", *command, environment={"CUTE_ATTN_CACHE_DIR": str(tmp_path)}))
    done = loading(*command, CUTE_ATTN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and done.stderr == f"{loaded}\nTrue {'cutlass' in loaded}\n", done.stderr


def test_list(run):
    text = ok(run("list"))
    assert text.count("\n") < 40 and "--all" in text
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith("│")}
    own = {key for key, cls in registry.KERNELS.items() if cls.__module__.startswith("cute_attn.")}
    assert set(rows) == {registry.label(key) for key in own}  # other tests register theirs
    own = [(traits, on) for traits, on in defaults() if (traits.op, traits.arch) == ("forward", "sm80")]
    tiles = {lookup(traits, None, on).tile.text for traits, on in own}
    assert rows["forward-sm80"][-4:-1] == [str(len(tiles)), "│", "forward-sm80-bf16-d128"]
    # Blackwell has the defaults of the Ampere kernels.
    rows = json.loads(ok(run("list", "kvcache-sm80", "--target", "sm120", "--json")))
    assert len(rows) > 5 and all(row["tile"] and row["target"] == "sm120" for row in rows)
    assert not [traits for traits, _ in registry.defaults_on("sm100") if traits.arch == "sm90"]


def test_list_gives_reasons(run):
    rows = json.loads(ok(run(*LOAD, "list", "forward-sm80:toy-bf16-d128", TOY, "--target", "sm80", "--json")))
    assert "head_dim is 128; accepted: 64" in rows[0]["reason"] and rows[0]["tile"] is None
    named = {"name": TOY, "target": "sm80", "tile": "values=8,staged=true", "reason": None}
    assert rows[1] == named | {"shared_memory_bytes": 512, "registers": 24, "other_tiles": []}
    assert "forward-sm80 runs on" not in ok(run("list", "forward-sm80-bf16-d256", "--target", "sm86"))
    # Traits do not say whether TMA can read the bias: then another tile is taken.
    name = "backward-sm90-bf16-d64-bias_bf16-bias_grad"
    (row,) = json.loads(ok(run("list", name, "--target", "sm90", "--json")))
    ((other),) = row["other_tiles"]
    assert other["for"] == "a bias of one row, or that TMA cannot read or whose gradient it cannot store"
    assert "bias_stages=2" in row["tile"] and "bias_stages=0" in other["tile"]
    assert "for a bias of one row, or that TMA" in ok(run("list", name, "--target", "sm90"))


def test_features_are_listed_and_explained(run):
    text = ok(run("list", "--features"))
    assert "dDIM[xDIM_V]" in text and all(f"│ {feature} " in text for feature in FEATURES)
    assert "score / cap" in ok(run("explain", "softcap"))
    text = " ".join(
        ok(run("explain", "forward-sm80-bf16-d64-causal", "qk_unroll", "one warp's stalls")).split()
    )
    for word in ("Ampere", "head dims", "swizzle_bits", "tune` tries 0, 1, 2, 4", "latency bounds the step"):
        assert word in text, word
    words = ("8-way", "d192x128", "exposed latency", "in the step", "local memory per thread", "fallback")
    assert len(ok(run("explain", *words)).splitlines()) >= 4 + len(words)
    text = ok(run("--load", "examples/custom_epilogue.py", "explain", "relative_position"))
    assert "relative_position" in text


def test_the_version(run):
    assert ok(run("--version")) == f"cute-attn {__version__}\n"


def test_doctor(run, tmp_path):
    text = ok(run("doctor"))
    assert "Nothing is broken." in text and "writable" in text
    (tmp_path / "file").touch()
    environment = {"CUTE_ATTN_CACHE_DIR": str(tmp_path / "file" / "cache")}
    done = processes.run("-m", "cute_attn", "doctor", "--json", environment=environment)
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert {"cute_attn", "CUTLASS DSL", "nvdisasm", "GPU", "bundle"} < set(found)
    assert found["attention"]["found"].startswith("right")
    assert (
        found["cache"]["broken"] and "CUTE_ATTN_CACHE_DIR" in found["cache"]["fix"] and done.returncode == 1
    )


def test_compile_as_json(run):
    done = json.loads(ok(run(*LOAD, "compile", TOY, "--tile", "values=4", "--target", "sm90", "--json")))
    assert list(done) == ["name", "target", "tile", "resources", "instructions", "seconds"]
    assert (done["name"], done["target"], done["tile"]) == (TOY, "sm90", {"values": 4, "staged": True})
    assert set(done["resources"]) == {
        *("registers", "shared_memory_bytes", "spill_store_bytes", "spill_load_bytes", "local_bytes"),
    }
    assert done["instructions"]["FFMA"] >= 4 and done["seconds"] > 0


def test_check(run):
    text = ok(run(*LOAD, "check", TOY))
    assert "512 of 166,912 bytes" in text and "passed" not in text
    assert "built, not run: there is no GPU to compare it with the reference on" in text
    done = run(*LOAD, "check", TOY, "--tile", "values=256")
    assert done.returncode == 1 and "it spills registers" in done.stdout and "Traceback" not in done.stderr
    assert f"`cute-attn tune {TOY} --static` lists tiles that do not" in done.stdout
    assert done.stderr.count("bytes of each thread in local memory") == 1


def test_the_tour_is_a_command_and_a_module_to_load(run):
    lines = ok(run("tour")).splitlines()
    assert [line.split()[0] for line in lines] == [str(n) for n in range(1, 11)]
    assert "forward-sm90:tour7" in ok(run("--load", "tour.levels", "list"))
    done = run("tour", "11")
    assert done.returncode == 2 and "cute-attn tour: error: argument level: invalid choice" in done.stderr


def test_the_cache_commands(run, tmp_path):
    assert "0 kernels" in ok(run("cache", "list"))
    text = ok(run(*LOAD, "cache", "prebuild", TOY, "--target", "sm80", "--workers", "1"))
    assert f"{TOY}" in text and "1/1" in text
    (entry,) = json.loads(ok(run("cache", "list", "--json")))
    assert entry["name"] == TOY and entry["bytes"] > 1000
    assert TOY in ok(run("cache", "list", "--all"))
    (row,) = [line.split() for line in ok(run("cache", "list")).splitlines() if line.startswith("│")]
    assert row[1:5] == ["forward-sm80:toy", "│", "1", "│"]
    assert "removed 0 kernels" in ok(run("cache", "prune", "--older-than", "1"))
    assert "removed 1 kernel," in ok(run("cache", "prune", "--all"))


WRONG = """
compile nonsense -> name is 'nonsense'; accepted: OP-ARCH-DTYPE-dDIM
compile forward-sm80:mine-bf16-d64
    -> no kernel computes ...: none is registered as forward-sm80:mine (did you mean 'forward-sm80'?); accepted: forward
compile forward-sm80-bf16-d128 --tile tile_n=2048 -> bytes of shared memory
list --target sm75 -> target is 'sm75'; accepted: sm80
bench combine-sm80-bf16-d64 -> is neither a forward nor a backward; accepted
explain forward-sm80-bf16-d64-foo -> no feature or epilogue is named 'foo'
explain qk_unrol -> (did you mean 'qk_unroll'?); accepted: a kernel's name
explain forwrad-sm80 -> (did you mean 'forward-sm80'?); accepted: a kernel's name
explain casual -> (did you mean 'causal'?); accepted: a kernel's name
show backward_preprocess-sm80-bf16-d64 -> states no layout and no MMA to draw
list forward-sm80:terms -> forward-sm80:terms is a variant, of which no name is listed; accepted: a name such as
list forward-sm90 --target sm100 -> no default kernel of forward-sm90 is for sm100
list nothing -> name is 'nothing'; accepted: a kernel's name or its beginning
list forwrad-sm80 -> name is 'forwrad-sm80' (did you mean 'forward-sm80'?); accepted
compile forwad-sm80-bf16-d64 -> op is 'forwad' (did you mean 'forward'?); accepted
ab forward-sm80-bf16-d64 forward-sm90-bf16-d64 -> there is no GPU
ab forward-sm90-bf16-d128 --tile a --tile b --peer fa4 -> B is given more than once; accepted: one of NAME2
tune forward-sm90-bf16-d128 -> there is no GPU; --static (static_only=True) ranks without one
tune forward-sm90-bf16-d128 num_stages=9|10 -> all 2 tiles were declined: 2 need more shared memory than sm90 has
tune forward-sm80-bf16-d64 --static -o tests/toy.py/x -> -o is '...'; accepted: a file that can be written (
tune forward-sm80-bf16-d64 --static --timings tests/toy.py/x -> --timings is '...that can be written (
tour 4 --check -> there is no GPU; checking and timing a level need one
verdict forward-sm80-bf16-d64 --tile tile_n=33 --tile tile_n=-16 -> tile_n is -16; accepted
verdict forward-sm80-bf16-d64 --html tests/toy.py/x -> --html is '...'; accepted: a file that can be written (
bundle append-sm80-bf16-d64 --all -o build/none -> given: NAMEs and --all; accepted: NAMEs, --all or --like
bundle append-sm80-bf16-d64 --target sm80,sm70 -o build/none
    -> --target is 'sm80,sm70'; accepted: some of sm80, sm86
bundle append-sm90-bf16-d64 --target sm80 -o build/none -> append-sm90 runs on sm90, not on sm80
bundle --all --tile tile_n=64 -o build/none -> --tile is 'tile_n=64'; accepted with NAMEs only
bundle forward-sm80:toy-bf16-d64 -o build/none
    -> a variant is registered by the file that defines it (--load FILE)
run -m nosuchmodule -> the module is 'nosuchmodule'; accepted after -m: one that can be imported
run nothing.py -> the program is 'nothing.py'; accepted: a Python file, a folder or zip file
run tests/cpu -> the program is 'tests/cpu'; accepted: a Python file, a folder or zip file with a __main__
run --backends flash,math tests/toy.py
    -> --backends is 'flash,math'; accepted: some of flash, efficient, cudnn, with commas
hub tests/toy.py -> a file; accepted: a folder
hub /proc/none -> FOLDER is '/proc/none'; accepted: a folder that can be written (
hub build/a=b -> accepted: a path without ':' and '='
table --op x -> op is 'x'; accepted:
table --arch x -> arch is 'x'; accepted:
table --like x -> like is 'x'; accepted:
table --target x -> target is 'x'; accepted:
"""
EARLY = """
compile forward-sm80-bf16-d64 --tile tilen=32 -> tile has 'tilen=32' (did you mean 'tile_n'?); accepted
check kvcache-sm90-bf16-d512 --tile num_stage=9 -> tile has 'num_stage=9' (did you mean 'num_stages'?); accepted
bench forward-sm80-bf16-d64 --tile tile_n=7 -> tile_n is 7; accepted
verdict backward-sm90-bf16-d128 --target sm80 -> backward-sm90 runs on sm90, not on sm80
ab forward-sm90-bf16-d128 --peer fa9 -> --peer is 'fa9'; accepted: fa2, mem_efficient
ab forward-sm90-bf16-d128 --peer fa4 --workload xx -> workload has 'xx'; accepted: bBATCH
tune forward-sm90-bf16-d128 tilen=64|96 -> space has 'tilen'; accepted: fields of ForwardSm90Tile (tile_m, tile_n,
cache prebuild forward-sm80-bf16-d64 --tile tile_n=3 -> tile_n is 3; accepted
cache prebuild --like absent.json -> --like is 'absent.json', which cannot be read as one (No such file
bundle --like pyproject.toml -o build/none -> --like is 'pyproject.toml', which cannot be read as one (
--load absent.py list -> --load is 'absent.py'
export forward-sm80-bf16-d64 --tile tile_n=3 -o build -> tile_n is 3; accepted
"""


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    check_wrong(processes.run("-m", "cute_attn", *call.split()), sentence)


@refusals.each(EARLY)
def test_wrong_calls_are_refused_before_torch_and_the_dsl_are_loaded(call, sentence):
    done = loading(*call.split())
    assert done.stderr.endswith("\n\nTrue False\n")
    done.stderr = done.stderr.removesuffix("\nTrue False\n")
    check_wrong(done, sentence)


def check_wrong(done, sentence):
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: "), done
    refusals.check_sentence(done.stderr.removesuffix("\n"), sentence)
    assert not (processes.ROOT / "build/none").exists()


IN_A_FILE = """import cute_attn


@cute_attn.register_epilogue("broken")
class Broken(cute_attn.Epilogue):
    def forward(self, state, tile, loaded):
        tile.acc[0] = {}["missing"]
"""


def test_an_error_in_a_loaded_file_has_its_line(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(IN_A_FILE)
    done = run("--load", str(file), "compile", "forward-sm80-bf16-d64-broken")
    assert done.returncode == 2 and done.stdout == ""
    shown = done.stderr.splitlines()
    (place,) = [text for text in shown if " File " in text]
    assert f'"{file}", line 7' in place and place.endswith('tile.acc[0] = {}["missing"]')
    assert "KeyError: 'missing'" in shown
    assert "frames of installed packages are hidden; -v shows them" in shown[-1]
    assert "cli/main.py" in run("-v", "--load", str(file), "compile", "forward-sm80-bf16-d64-broken").stderr
    file.write_text("x = 1 +\n")
    done = run("--load", str(file), "list")
    assert done.returncode == 2 and done.stderr.endswith("SyntaxError: invalid syntax\n")
    assert done.stderr.startswith(f'error in a loaded file:\n  File "{file}", line 1')


@pytest.mark.slow
def test_a_verdict_says_what_a_function_costs(run, tmp_path):
    file = tmp_path / "mine.py"
    head = "from cute_attn import score_mod\n@score_mod('plus', example=lambda *_: ())\n"
    file.write_text(head + "def plus(score, b, h, q, k):\n    return score + 0.001 * (q - k)\n")
    done = run("--load", str(file), "verdict", "forward-sm80-bf16-d32-plus", "--target", "sm90")
    assert re.search(
        r"^plus costs \d\.\d\d of the \d+\.\d\d instructions per element\. By its code", ok(done), re.M
    )


def test_the_cache_switched_off(run):
    for word in ("0", "no"):
        done = run("cache", "list", cache=word)
        assert done.returncode == 2 and f"CUTE_ATTN_CACHE is '{word}'; the cache commands need" in done.stderr


WITHOUT = (
    "import importlib.util, sys\n"
    "gone, find = ('matplotlib', 'networkx', 'rich', 'typer'), importlib.util.find_spec\n"
    "sys.modules.update(dict.fromkeys(gone))\n"
    "importlib.util.find_spec = lambda name, *of: None if name in gone else find(name, *of)\n"
)
"""Hides the packages that only the laboratory and the commands need."""


def test_attention_needs_nothing_of_the_laboratory():
    code = """
import torch, cute_attn, cute_attn.flash_attn, cute_attn.sdpa, layouts
q = torch.randn(1, 4, 2, 8)
cute_attn.sdpa.activate()
print(cute_attn.attention(q, q, q).shape, cute_attn.lookup(cute_attn.Traits.parse("forward-sm80-bf16-d64")))
"""
    done = processes.alone("-c", WITHOUT + code)
    assert done.returncode == 0 and "torch.Size([1, 4, 2, 8]) ForwardSm80" in done.stdout, done.stderr


NO_LAB = "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'networkx')))"
NO_DSL = "import sys; sys.path[:] = [path for path in sys.path if 'nvidia_cutlass_dsl' not in path]"
NO_COMPILER = "error: building kernels needs nvidia-cutlass-dsl, which is not installed\n"
LACKING = [
    (NO_LAB, "list forward-sm80-bf16-d64", 0, ""),
    (NO_LAB, "verdict forward-sm80-bf16-d64", 2, "error: reading machine code needs networkx; pip install networkx\n"),
    (NO_LAB, "show forward-sm80-bf16-d64", 2, "error: pictures need matplotlib; pip install matplotlib\n"),
    (NO_DSL, "list forward-sm80-bf16-d64", 0, ""),
    (NO_DSL, "tour 1", 2, NO_COMPILER),
    (NO_DSL, "cache prebuild forward-sm80-bf16-d64", 2, NO_COMPILER),
    (NO_DSL, "tune --static forward-sm80-bf16-d64", 2, NO_COMPILER),
    (NO_DSL, "--load tour.levels list", 2, "ModuleNotFoundError: No module named 'cutlass'\n"),
    (WITHOUT, "list", 1, "error: the command needs rich and typer; pip install rich typer\n"),
]  # fmt: skip


@pytest.mark.parametrize(("lacking", "command", "status", "said"), LACKING, ids=[row[1] for row in LACKING])
def test_commands_need_no_packages_of_other_commands(lacking, command, status, said):
    """A command that needs the package names it in one sentence; an error in a loaded file also has its location."""
    done = processes.alone("-c", f"{lacking}\nfrom cute_attn.__main__ import main\nmain()", *command.split())
    assert done.returncode == status and "Traceback" not in done.stdout
    assert said in done.stderr if "--load" in command else done.stderr == said


def test_calls_planned_without_a_gpu_need_pytest():
    code = WITHOUT.replace("'rich'", "'pytest'") + "from bench import run\nrun.machine_of_tests()\n"
    done = processes.alone("-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: planning calls without a GPU needs pytest; pip install pytest\n"
