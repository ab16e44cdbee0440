"""The laboratory: what a tile costs, whether it is faster, which one is best.

Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with ``static_only``. With one: ``race.ab`` and ``tune``.
``ledger`` keeps predictions and what came of them; ``report`` writes one page of any of it.
"""

from importlib.util import find_spec

missing = [name for name in ("jinja2", "matplotlib", "networkx", "rich", "typer") if find_spec(name) is None]
if missing:
    raise ImportError(
        f"the laboratory and the commands need {', '.join(missing)}; pip install 'cute-attn[lab]' brings them"
    )
