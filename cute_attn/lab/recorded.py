"""Read the kernels that a program's calls needed from a file of ``cute-attn run --json``, without torch."""

import json
from pathlib import Path

from cute_attn.traits import Traits


def listed(path: Path) -> list[tuple[Traits, str, str]]:
    """(traits, tile, target) of each kernel. Raises ValueError if the file is not such a file or lists no kernel."""
    accepted = "accepted: a file of `cute-attn run --json` from a machine with a GPU"
    try:
        rows = json.loads(Path(path).read_bytes())["kernels"]
        found = [(Traits.parse(row["name"]), row["tile"], row["target"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--like is {str(path)!r}, which cannot be read as one ({reason}); {accepted}"
        ) from None
    if not found:
        raise ValueError(f"--like is {str(path)!r}, which lists no kernel; {accepted}")
    return found
