"""The ``cute-attn`` command."""

import cute_attn.lab  # noqa: F401  # says which packages are missing


def run_command_line() -> None:
    """Run the command of the command line."""
    from cute_attn.cli.main import main

    main()
