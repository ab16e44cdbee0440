"""The ``cute-attn`` command, and ``python -m cute_attn``."""

import sys


def main() -> None:
    """Run the command of the command line."""
    try:
        import cute_attn.cli
    except ImportError as error:  # what the laboratory needs
        sys.exit(str(error))
    cute_attn.cli.run_command_line()


if __name__ == "__main__":
    main()
