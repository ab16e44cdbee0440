"""What scripts generate of the documents is what they generate today: the package's picture, the support tables."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import cute_attn
import layouts
from docs import architecture, site
from tests import processes

ROOT = processes.ROOT


@pytest.fixture(scope="module")
def drawn():
    return json.loads((ROOT / architecture.DATA).read_text())


def test_the_picture_is_of_todays_imports(drawn):
    assert drawn == architecture.imports(), "python -m docs.architecture --write"


def test_imports_point_down(drawn):
    """No cycle, and kernels import nothing of the host, nor the host anything of a door."""
    assert set(architecture.levels(drawn)) == set(drawn)
    assert not {"compiler", "host", "api"} & set(drawn["kernels"])
    assert not {"api", "sdpa", "flash_attn", "transformers", "lab", "cli"} & set(drawn["host"])


def test_the_support_tables_are_the_registrys():
    done = processes.run("-m", "docs.support")
    assert done.returncode == 0, done.stderr
    assert done.stdout in (ROOT / Path("docs/support.md")).read_text(), "python -m docs.support --write"
    lines = [line for line in done.stdout.splitlines() if line.startswith("| `causal`")]
    assert lines == ["| `causal` | 576 | 512 | 576 | 512 | 512 | 512 |"]


ENTRIES = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
"""What docs/api.md has the docstrings of."""


def test_the_page_of_functions_has_every_public_name_once():
    public = {f"cute_attn.{name}" for name in cute_attn.__all__ if name != "__version__"}
    public |= {f"layouts.{name}" for name in layouts.__all__ if name != "BANKS"}
    assert public <= set(ENTRIES) and len(ENTRIES) == len(set(ENTRIES))
    assert not [name for name in ENTRIES if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_page_of_functions_names_has_a_docstring(name):
    module, _, last = name.rpartition(".")
    assert len(inspect.getdoc(getattr(importlib.import_module(module), last))) > 40


def test_links_into_the_page_of_functions_are_its_entries():
    pages = [path for path in site.files() if path.suffix == ".md"]
    links = [link for path in pages for link in re.findall(r"api\.md#([\w.]+)", (ROOT / path).read_text())]
    assert links and set(links) <= set(ENTRIES)


def test_a_notebook_is_a_page_with_its_outputs(tmp_path):
    site.copy(tmp_path)
    page = (tmp_path / "examples/tour/level3.md").read_text()
    assert "\n# Level 3: " in page and page.count("```python\n") == 6 and page.count("</pre>") == 2
    assert page.count("<img") == 1 and "```text\n'No GPU here: nothing was compared.'\n```" in page
    linking = [path for path in tmp_path.rglob("*.md") if ".ipynb)" in path.read_text()]
    assert not linking and "](../examples/tour/level3.md)" in (tmp_path / "docs/tour.md").read_text()
