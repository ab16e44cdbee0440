"""Build a kernel with the sources on PYTHONPATH, which may be older than this file: a process of :mod:`.revision`.

The process runs this file by its path, so it imports the package on PYTHONPATH and not the one around this file. It
uses only names that all revisions have (Traits, ``lookup``, ``compile``) and, if present, the module that counts bank
conflicts.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main(name: str, tile: str, target: str, folder: str) -> None:
    """Build the kernel, and write kernel.cubin, kernel.ptx and kernel.json to ``folder``."""
    from cute_attn import compile, lookup
    from cute_attn.traits import Traits

    traits = Traits.parse(name)
    kernel = lookup(traits, tile or None, target or None)
    compiled = compile(traits, tile or None, target or None)
    content = getattr(kernel, "step_content", None)
    try:
        from cute_attn.lab.copies import conflicts

        copies = [asdict(one) for one in conflicts(kernel)]
    except (ImportError, AttributeError, TypeError):  # an older one counts them in another way, or not
        copies = []
    facts = {
        "name": compiled.name,
        "target": compiled.target,
        "tile": getattr(compiled.tile, "text", str(compiled.tile)),
        "resources": asdict(compiled.resources),
        "warnings": list(compiled.warnings),
        "copies": copies,
        "content": None if content is None else asdict(content()),
    }
    files = Path(folder)
    (files / "kernel.cubin").write_bytes(compiled.cubin)
    (files / "kernel.ptx").write_text(compiled.ptx)
    (files / "kernel.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, KeyError) as error:
        sys.exit(str(error.args[0] if error.args else error))
