"""What scripts generate of the documents is what they generate today: the package's picture, the support tables."""

import inspect
import json
import pkgutil
import re

import cute_attn
import layouts
from docs import architecture, site
from tests import processes

ROOT = processes.ROOT


def test_the_picture_is_of_todays_imports_which_point_down():
    """No cycle, and kernels import nothing of the host, nor the host anything of a door."""
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
