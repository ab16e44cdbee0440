"""Commands, modules, files and names in README, CONTRIBUTING and docs exist, and commands run.

Commands that need no GPU run, on kernels that other tests build too. Others are refused in one sentence.
"""

import importlib.util
import inspect
import itertools
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import typer
import typer.core

import cute_attn
import layouts
from cute_attn.cli import options
from cute_attn.cli.main import app
from cute_attn.compiler import registry
from cute_attn.traits import Traits
from docs import architecture, site
from tests import processes
from tests.defaults import covering

ROOT = processes.ROOT
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)

NEED_GPU = {"bench", "ab", "tune"}
NEED_FILES = {"run", "hub", "bundle", "export", "--load"}
"""First words of commands on files that a reader would supply; these commands are only parsed."""


def quoted() -> list[str]:
    """Lines of shell commands, and all text between backticks, also where it continues on the next line."""
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.S | re.M)).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
    return [*shell.splitlines(), *(" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose))]


def words_after(*start: str) -> dict[str, list[str]]:
    """Quoted commands that begin with these words -> the words that follow."""
    found = {}
    for text in quoted():
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # an apostrophe: not a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # a variable of the environment
            del words[0]
        if words[: len(start)] == [*start] and len(words) > len(start):
            found[shlex.join(words)] = words[len(start) :]
    return found


def command_of(words: list[str]) -> str:
    """The command's name, after ``--load FILE``."""
    return next((a for before, a in itertools.pairwise(("", *words)) if "--load" not in (before, a)), "")


COMMANDS = {
    command: words if len(words) > 1 else [*words, "--help"]
    for command, words in words_after("cute-attn").items()
}
"""Commands -> their words. A command without arguments gets ``--help``, so that it can run."""


def parse(words: list[str]) -> None:
    """Parse the words like the command line does, without running the command."""
    command = typer.main.get_command(app)
    context = command.make_context("cute-attn", list(words))
    while isinstance(command, typer.core.TyperGroup):
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(command.name, rest, parent=context)


def kernels_of(words: list[str]) -> list[tuple[Traits, str | None]]:
    """The kernels that a command names, with their tiles as text."""
    tiles = [tile for option, tile in itertools.pairwise(words) if option == "--tile"] or [None]
    names = [word for word in words if re.match(r"(forward|backward|kvcache)-sm\d\d(:\w+)?-\w+-d\d", word)]
    return [(Traits.parse(name), tile) for name in names for tile in tiles if "=" in (tile or "=")]


@pytest.mark.parametrize("command", [c for c, words in COMMANDS.items() if "--help" not in words])
def test_a_command_parses_and_its_kernels_exist(command, tmp_path, monkeypatch):
    for name in ("examples", "tour", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)  # a folder to write to is made before the work
    monkeypatch.setattr(options, "user_epilogue", lambda name: None)  # files of --load are not run
    words = COMMANDS[command]
    parse(words)
    for traits, tile in kernels_of(words):
        target = words[words.index("--target") + 1] if "--target" in words else traits.arch
        if not traits.variant and not traits.epilogues:  # otherwise a reader's kernel
            assert registry.lookup(traits, tile, target)


def has_its_file(words: list[str]) -> bool:
    """True if the file that the command loads is one of the examples."""
    return words[0] == "--load" and ((ROOT / words[1]).exists() or words[1] == "tour.levels")


def to_run() -> list[str]:
    """Commands that have every option of every command, and every feature; others differ in tiles and head dims."""
    usable = [
        command for command, words in COMMANDS.items() if words[0] not in NEED_FILES or has_its_file(words)
    ]

    def options(command: str) -> set[tuple[str, str | bool]]:
        words = COMMANDS[command]
        features = {part for traits, _ in kernels_of(words) for part in traits.name.split("-")[4:]}
        named = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--load"}
        return {("", words[0] == "--load"), *((command_of(words), what) for what in ("", *named, *features))}

    return covering(usable, options, cost=lambda command: 1 + len(kernels_of(COMMANDS[command])))


def smaller(text: str) -> str:
    """The command with kernels of a small head dim, which build in half the time."""
    return re.sub(r"\b(forward-sm80-bf16)-d(64|128)(-causal|\")", r"\1-d32\3", text)


@pytest.mark.slow
@pytest.mark.parametrize("command", to_run())
def test_a_command_runs_or_says_that_it_needs_a_gpu(command, tmp_path):
    words = list(map(smaller, COMMANDS[command]))
    for i, word in enumerate(words[:-1]):
        if word in ("-o", "--html"):
            words[i + 1] = str(tmp_path / words[i + 1])
    done = processes.run("-m", "cute_attn", *words)
    needs_gpu = command_of(words) in NEED_GPU or "--measure" in words
    if needs_gpu and not {"--static", "--help"} & set(words):
        assert done.returncode == 2 and "GPU" in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout


# ---- modules, targets of make, files and names ----


MODULES = {command: words for command, words in words_after("python", "-m").items() if words != ["build"]}
"""Modules to run with ``python -m``, except ``build``, which readers have to install first."""


@pytest.mark.parametrize("command", MODULES)
def test_a_module_exists_and_has_its_options(command):
    module, *rest = MODULES[command]
    assert importlib.util.find_spec(module) is not None
    options = {word.partition("=")[0] for word in rest if word.startswith("-")}
    if options:
        text = processes.run("-m", module, "--help").stdout
        assert options <= set(re.findall(r"--?[\w-]+", text)), text


def test_make_has_its_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = words_after("make")
    assert {words[0] for words in named.values()} <= targets and len(named) > 5


def test_files_exist():
    named = set(map(Path, re.findall(r"[(`]((?:bench|docs|examples|tests)/[\w./-]+\.\w+)[)`]", TEXT)))
    pages = [(page, re.findall(r"\]\(([\w./-]+)\)", page.read_text())) for page in PAGES]
    links = [page.parent / link for page, found in pages for link in found]
    assert len(named) > 10 and len(links) > 30
    assert [path for path in (*sorted(named), *links) if not (ROOT / path).exists()] == []


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_a_pages_python_runs(page, tmp_path):
    """Blocks run in order, like a reader types them; on the CPU, and without packages that only some readers have."""
    found = [block for block in blocks(page, "python") if "transformers" not in block]
    assert found, page
    script = tmp_path / "page.py"
    script.write_text("\n".join(["import warnings", "warnings.simplefilter('ignore')", *map(smaller, found)]))
    done = processes.run(str(script))
    assert done.returncode == 0 and "wrong" not in done.stdout, done.stdout + done.stderr


SAMPLES = [block.replace("\\\n", "") for page in PAGES for block in blocks(page, "console")]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.partition("\n")[0])
def test_a_printed_sample_is_what_the_command_prints(sample):
    command, _, expected = sample.partition("\n")
    assert command.startswith("$ cute-attn ")
    done = processes.run("-m", "cute_attn", *shlex.split(command)[2:], environment={"COLUMNS": "88"})
    assert done.returncode == 0, done.stderr
    found, wanted = ([line.rstrip() for line in text.splitlines()] for text in (done.stdout, expected))
    assert found == wanted


def test_dotted_names_exist():
    names = sorted(set(re.findall(r"\bcute_attn(?:\.[a-z]\w*)+", TEXT)))
    assert len(names) > 10
    for name in names:
        if not name.endswith((".py", ".md")):
            pkgutil.resolve_name(name)


# ---- what the first screen promises ----


def stored(file: str) -> list[dict]:
    return json.loads((ROOT / "bench/results" / file).read_text())["rows"]


def test_numbers_of_the_first_screen_are_stored_results():
    screen = (ROOT / "README.md").read_text().partition("![")[0]

    def value(file, workload, impl):
        rows = stored(f"2026-11-22-nvidia-h200-{file}.json")
        return next(row["value"] for row in rows if (row["workload"], row["impl"]) == (workload, impl))

    causal = "fwd-bf16-d128-b8-s2048-h16-causal"
    grad = "bwd-bf16-d128-b8-s2048-h16-bias_bf16-bias_grad"
    documents = {
        row["impl"]: 1000 * row["ms"]
        for row in stored("2026-11-26-nvidia-h200-masks.json")
        if (row["workload"], row["op"]) == ("d128-documents", "forward")
    }
    ours = ("cute_attn/forward-sm90", "cute_attn/backward-sm90")
    numbers = [value("forward", causal, impl) for impl in (ours[0], "fa4")]
    numbers += [documents[impl] for impl in ("cute", "flex")]
    numbers += [value("forward", f"{causal}-dropout", impl) for impl in (ours[0], "cudnn")]
    numbers += [value("backward", grad, impl) for impl in (ours[1], "mem_efficient")]
    promised = [int(n) for n in re.findall(r"(?<!head dim )(?<![\d,])\b(\d{3})\b", screen)]
    assert promised == [round(number) for number in numbers]


# ---- places in the sources ----

FOLDERS = [ROOT, ROOT / "cute_attn", ROOT / "cute_attn/kernels/forward_sm90"]
"""Folders that paths in documents are relative to."""


def defines(path: str, name: str) -> bool:
    """True if the file that a document names defines each name of a dotted one."""
    found = [(folder / path).read_text() for folder in FOLDERS if (folder / path).exists()]
    definition = r"^ *(?:class {0}|def {0}|{0}(?= ?[:=]))\b"
    return bool(found) and all(re.search(definition.format(x), found[0], re.M) for x in name.split("."))


def test_places_in_the_sources_exist():
    places = set(re.findall(r"`([\w/]+\.py)::([\w.]+)`", TEXT))
    assert len(places) > 60
    assert [place for place in places if not defines(*place)] == []


# ---- what scripts generate of the documents is what they generate today ----


def test_the_picture_is_of_todays_imports_which_point_down():
    """There is no cycle; kernels import nothing from the host, and the host imports nothing from the doors."""
    drawn = json.loads((ROOT / architecture.DATA).read_text())
    assert drawn == architecture.imports(), "python -m docs.architecture --write"
    assert set(architecture.levels(drawn)) == set(drawn)
    assert not {"compiler", "host", "api"} & set(drawn["kernels"])
    assert not {"api", "sdpa", "flash_attn", "transformers", "lab", "cli"} & set(drawn["host"])


def test_the_support_tables_are_the_registrys():
    done = processes.run("-m", "docs.support")
    assert done.returncode == 0, done.stderr
    assert done.stdout in (ROOT / "docs/support.md").read_text(), "python -m docs.support --write"
    lines = [line for line in done.stdout.splitlines() if line.startswith("| `causal`")]
    assert lines == ["| `causal` | 576 | 512 | 576 | 512 | 512 | 512 |"]


def test_the_page_of_functions_has_every_public_name_once_and_links_lead_to_it():
    entries = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
    public = {f"cute_attn.{name}" for name in cute_attn.__all__ if name != "__version__"}
    public |= {f"layouts.{name}" for name in layouts.__all__ if name != "BANKS"}
    assert public <= set(entries) and len(entries) == len(set(entries))
    assert not [name for name in entries if "._" in name]
    assert [name for name in entries if len(inspect.getdoc(pkgutil.resolve_name(name))) <= 40] == []
    pages = [path for path in site.files() if path.suffix == ".md"]
    links = [link for path in pages for link in re.findall(r"api\.md#([\w.]+)", (ROOT / path).read_text())]
    assert links and set(links) <= set(entries)


def test_a_notebook_is_a_page_with_its_outputs(tmp_path):
    site.copy(tmp_path)
    page = (tmp_path / "examples/tour/level3.md").read_text()
    assert "\n# Level 3: " in page and page.count("```python\n") == 6 and page.count("</pre>") == 2
    assert page.count("<img") == 1 and "```text\n'No GPU here: nothing was compared.'\n```" in page
    linking = [path for path in tmp_path.rglob("*.md") if ".ipynb)" in path.read_text()]
    assert not linking and "](../examples/tour/level3.md)" in (tmp_path / "docs/tour.md").read_text()
