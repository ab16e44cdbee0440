"""A static site of the documents: every page with what it links to, at the same place, so that links stay as they are.
Notebooks become pages, with their stored outputs.

python -m docs.site            copy the pages to build/pages and build build/site, by mkdocs.yml; or: make docs
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START, STYLE = Path("README.md"), Path("docs/site.css")  # the site's first page; what mkdocs.yml names
PAGES, SITE = Path("build/pages"), Path("build/site")
_LINK = re.compile(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")


def linked(page: Path) -> list[Path]:
    """The files that a page links to, relative to the repository."""
    found = _LINK.findall((ROOT / page).read_text())
    return [(ROOT / page.parent / link).resolve().relative_to(ROOT.resolve()) for link in found]


def files() -> list[Path]:
    """All pages that lead from the README to each other, and what they link to."""
    found, pending = {START}, [START]
    while pending:
        page = pending.pop()
        if page.suffix == ".md":
            new = [path for path in linked(page) if path not in found and (ROOT / path).is_file()]
            found.update(new)
            pending += new
    return sorted(found)


def copy(folder: Path) -> None:
    """The files, in a folder that has nothing else; a notebook as a page of its name."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in (*files(), STYLE):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (folder / path).write_text((ROOT / path).read_text().replace(".ipynb)", ".md)"))
        elif path.suffix == ".ipynb":
            (folder / path).with_suffix(".md").write_text(page_of(json.loads((ROOT / path).read_text())))
        else:
            shutil.copyfile(ROOT / path, folder / path)


def page_of(notebook: dict[str, Any]) -> str:
    """A notebook with its outputs, as a page that has the width of its table of contents too."""
    parts = ["---\nhide: [toc]\n---"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(_output, cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"]}">'
    if "text/html" in data:
        return "".join(data["text/html"])
    return "```text\n" + "".join(output.get("text") or data["text/plain"]) + "\n```"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    copy(ROOT / PAGES)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's notice of another generator
    done = subprocess.run(command, cwd=ROOT, env=quiet, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print(f"{SITE}/index.html")


if __name__ == "__main__":
    main()
