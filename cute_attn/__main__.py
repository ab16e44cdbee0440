"""``python -m cute_attn``: the same as the ``cute-attn`` command."""

from cute_attn.cli.main import main

if __name__ == "__main__":
    main()
