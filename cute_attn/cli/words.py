"""The command ``cute-attn explain``, and the features that ``cute-attn list --features`` shows."""

from typing import Annotated

import typer

from cute_attn.cli.options import complete_name, import_kernels, show, working
from cute_attn.lab.tables import Table
from cute_attn.traits import FEATURES


def _complete_word(text: str) -> list[str]:
    return [*complete_name(text), *(feature for feature in FEATURES if feature.startswith(text))]


def explain_words(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORD...",
            autocompletion=_complete_word,
            help="forward-sm80, a kernel's name, a feature, a tile's field, or a row of a verdict.",
        ),
    ],
) -> None:
    """What a kernel's name, a field of its tile, or a row of its verdict means."""
    table = Table("word", "what it means")
    with working("reading docstrings"):
        from cute_attn.lab.explain import explain, listed_words

        if not listed_words().keys() >= set(words):
            import_kernels()
        for word in words:
            for name, text in explain(word):
                table.add_row(name, text)
    show(table)


def features_table() -> Table:
    """Every word that a kernel's name may have after its head dims."""
    from cute_attn.lab.explain import feature_text

    table = Table("feature", "what it means", title="OP-ARCH-DTYPE-dDIM[xDIM_V][-FEATURE...]")
    for feature in FEATURES:
        table.add_row(feature, feature_text(feature))
    return table
