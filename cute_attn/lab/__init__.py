"""The laboratory: what a tile costs, whether it is faster, which one is best.

Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with ``static_only``. With one: ``race.ab`` and ``tune``.
``ledger`` keeps predictions and what came of them; ``report`` writes one page of any of it.
"""
