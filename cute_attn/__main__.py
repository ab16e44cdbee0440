"""The ``cute-attn`` command, and ``python -m cute_attn``."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run ``cute-attn`` with the arguments in ``sys.argv``."""
    missing = [name for name in ("rich", "typer") if find_spec(name) is None]
    if missing:
        sys.exit(f"error: the command needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    from cute_attn.cli import options  # imports these packages
    from cute_attn.cli.main import main

    options.ends_with_command = True
    main()


if __name__ == "__main__":
    main()
