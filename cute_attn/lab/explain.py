"""Explain the project's words, from ``words.ini`` and the docstrings of tiles.

    for word, text in explain("qk_unroll"): ...

Words are a kernel's name or its beginning (``forward-sm80``), a word of a name (``causal``), a field of a tile, or a
term in the output of ``verdict`` and ``list``.
"""

import configparser
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from importlib import resources

from cute_attn.compiler import registry
from cute_attn.epilogues.names import is_registered, user_epilogue
from cute_attn.tiles import Tile
from cute_attn.traits import DTYPES, FEATURES, OPS, Traits, did_you_mean, ops_of

# Only functions that need more than words.ini import the kernels, and with them the DSL.

_DIMS = re.compile(r"d\d+(x\d+)?")
_DIMS_TEXT = "the head dims: of q and k, and after an x of v where that is another"
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n(?:     .*|$))*)", re.M)


def attribute_docs(cls: type) -> dict[str, str]:
    """Attribute -> text, from the docstrings of a class and of its bases, the class's first."""
    found: dict[str, str] = {}
    for one in cls.__mro__:
        _, _, listed = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for names, text in _ENTRY.findall(listed.partition("\nRaises:")[0]):
            for name in names.split(", "):
                found.setdefault(name, _plain(text))
    return found


def explain(word: str) -> list[tuple[str, str]]:
    """(word, text) pairs for a word; for a kernel's name, of its words and its tile's fields.

    Raises:
        ValueError: the word is unknown; the message suggests a similar one.
    """
    if found := list(_listed(re.sub(r"^\d+-way$", "n-way", word))):
        return found
    for of in (_name, _epilogue, _field, _part):
        found = list(of(word))
        if found:
            return found
    known = [*listed_words(), *map(registry.label, registry.KERNELS), *OPS]
    known += [name for cls in tile_classes() for name in _fields(cls)]
    raise ValueError(
        f"the word is {word!r}{did_you_mean(word, known)}; accepted: a kernel's name or its beginning, such as "
        "forward-sm80, a feature of one, a field of a tile, a word of a verdict or a list"
    )


@functools.cache
def words(section: str) -> dict[str, str]:
    """Word -> text of a section of ``words.ini``: ``"features"``, the rows of a ``"verdict"``, or other ``"words"``."""
    read = configparser.ConfigParser(delimiters=(" = ",), interpolation=None)
    read.optionxform = str  # type: ignore[method-assign,assignment]
    read.read_string(resources.files("cute_attn.lab").joinpath("words.ini").read_text())
    return {word: _plain(text) for word, text in read[section].items()}


def feature_text(feature: str) -> str:
    """What a feature in a kernel's name means, and which operations have it, unless all do."""
    ops = ops_of(feature)
    return words("features")[feature] + (f" (names of {', '.join(ops)})" if len(ops) < len(OPS) else "")


def tile_classes(keys: Iterable[tuple[str, str, str]] | None = None) -> dict[type[Tile], list[str]]:
    """Tile class -> labels of the kernels that use it. keys: kernels to consider, by default all."""
    found: dict[type[Tile], list[str]] = {}
    for op, arch, variant in registry.KERNELS if keys is None else keys:
        for dtype, features in itertools.product(DTYPES, ({}, {"seqused_k": True})):
            with contextlib.suppress(ValueError):  # not this dtype's, or not without lengths
                tile = registry.lookup(Traits(op, arch, dtype, 64, variant=variant, **features)).tile  # type: ignore[arg-type]
                found.setdefault(type(tile), []).append(registry.label((op, arch, variant)))
                break
    return found


def _fields(cls: type[Tile]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def _name(word: str) -> Iterator[tuple[str, str]]:
    """Explain a kernel's name or its beginning: its words, then the fields of its tile."""
    op, *rest = word.split("-")
    arch, _, variant = rest[0].partition(":") if rest else (None, "", "")
    keys = [key for key in registry.KERNELS if key[0] == op and arch in (None, key[1]) and key[2] == variant]
    if not keys:
        return
    if len(rest) > 2:
        Traits.parse(word)
    kernel = registry.KERNELS[keys[0]]
    texts = (getattr(inspect.getmodule(one), "__doc__", None) or one.__doc__ for one in kernel.__mro__)
    yield op, _first_paragraph(next(filter(None, texts), ""))
    yield from ((one, words("words")[one]) for one in (arch, *rest[1:2]) if one in words("words"))
    if len(rest) > 2:
        yield rest[2], _DIMS_TEXT
    for one in rest[3:]:
        if one not in FEATURES:
            user_epilogue(one)  # raises for one that is not registered
        yield from _listed(one) if one in FEATURES else _epilogue(one)
    for cls, labels in tile_classes(keys).items():
        docs = attribute_docs(cls)
        yield f"tile of {', '.join(labels)}", _first_paragraph(cls.__doc__ or "")
        yield from ((f"  {name}", docs.get(name, "-")) for name in _fields(cls))


def listed_words() -> dict[str, str]:
    """Word -> text, of the words that are explained without importing kernels."""
    return {feature: feature_text(feature) for feature in FEATURES} | words("verdict") | words("words")


def _listed(word: str) -> Iterator[tuple[str, str]]:
    if text := _DIMS_TEXT if _DIMS.fullmatch(word) else listed_words().get(word):
        yield word, text


def _epilogue(word: str) -> Iterator[tuple[str, str]]:
    """Explain a registered epilogue, such as one of a loaded file."""
    if is_registered(word):
        found = user_epilogue(word)
        doc = getattr(found, "function", found).__doc__
        yield word, _first_paragraph(doc or "an epilogue that a file registers")


def _field(word: str) -> Iterator[tuple[str, str]]:
    """Explain a field of tiles; kernels whose text is the same are listed together."""
    texts: dict[str, list[str]] = {}
    for cls, kernels in tile_classes().items():
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if word in fields:
            values = dict.fromkeys(fields[word].metadata.get("values", ()))
            tried = f" `tune` tries {', '.join(map(str, values))}." if len(values) > 1 else ""
            text = attribute_docs(cls).get(word, "-").rstrip(".") + "." + tried
            texts.setdefault(text, []).extend(kernels)
    yield from ((f"{word} of {', '.join(kernels)}", text) for text, kernels in texts.items())


def _part(word: str) -> Iterator[tuple[str, str]]:
    """Explain known words that contain ``word``, or else known words whose texts contain it."""
    known, part = listed_words(), word.lower()
    named = {row: text for row, text in known.items() if part in row.lower()}
    told = {row: text for row, text in known.items() if re.search(rf"\b{re.escape(part)}\b", text.lower())}
    return iter((named or told).items() if part else ())


def _first_paragraph(text: str) -> str:
    return _plain(inspect.cleandoc(text).split("\n\n")[0])


def _plain(text: str) -> str:
    """The text on one line, without docstring markup."""
    return re.sub(r":\w+:`~?([\w.]+)`|``(.+?)``", lambda m: m[1] or m[2], " ".join(text.split()))
