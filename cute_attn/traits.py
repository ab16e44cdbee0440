"""Traits: *what* an attention kernel computes.

A :class:`Traits` is a frozen, hashable value with one short name that parses back::

    >>> t = Traits("forward", "sm80", "bf16", 128, mask="causal", dropout="flash")
    >>> t.name
    'forward-sm80-bf16-d128-causal-dropout'
    >>> Traits.parse(t.name) == t
    True

How it is computed (block sizes, warps, stages, ...) is a tile: see :mod:`cute_attn.tiles`.
"""

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

OPS = (
    *("forward", "backward", "backward_preprocess", "backward_convert", "jvp"),
    *("kvcache", "combine", "append", "forward_split", "backward_split"),
    *("forward_pad", "forward_unpad", "backward_pad", "backward_unpad"),
    *("block_kinds", "block_lists", "block_visits"),
)
PARTS = ("backward_preprocess", "backward_convert")
PART_FIELDS = ("arch", "dtype", "head_dim", "head_dim_v", "varlen", "seqused_q")
"""The fields on which the backward's preprocess and convert depend."""

SPLIT_TENSORS = {
    "forward_split": ("head_dim", "head_dim", "head_dim_v"),
    "backward_split": ("head_dim", "head_dim", "head_dim_v", "head_dim_v"),
}
"""The ops that split fp32 tensors into fp16 terms, and the trait with the head dim of each: q, k, v, and dO."""
MEASURED_TENSORS = {"forward_split": 1, "backward_split": 0}
"""Number of leading ``SPLIT_TENSORS`` that are only measured: the main kernel splits rows that only one CTA reads."""

PADDED_TENSORS = {
    "forward_pad": ("head_dim", "head_dim", "head_dim_v"),
    "forward_unpad": ("head_dim_v",),
    "backward_pad": ("head_dim", "head_dim", "head_dim_v", "head_dim_v", "head_dim_v"),
    "backward_unpad": ("head_dim", "head_dim", "head_dim_v"),
}
"""The ops that copy rows of any head dim and strides to padded rows or back, and the trait with the head dim of each
tensor: q, k, v (backward: also dO, O); O; dQ, dK, dV."""

BLOCK_OPS = ("block_kinds", "block_lists", "block_visits")
"""The ops that make block masks and the lists of blocks that kernels visit. They read no q, k or v; their traits have
dtype bf16 and head dim 128."""
PARTIAL, FULL = 1, 2
"""Kinds of block in a block mask; 0 is a hidden block."""

ARCHS = ("sm80", "sm90")
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
DTYPES = tuple(ELEMENT_BYTES)
PRECISIONS = ("tf32",)
BIAS_DTYPES = ("fp16", "bf16", "fp32")
SINK_DTYPES = ("fp16", "bf16", "fp32")
ROTARY = ("interleaved", "halves")
SPLITS = ("fixed", "folded")
ALIGNMENTS = (1, 2, 4)
"""Alignments in elements of a cache's rows that do not all start at multiples of 16 bytes."""
MASKS = ("causal", "causal_top_left", "window", "window_top_left")
DROPOUTS = ("flash", "mem_efficient")
ROW_BYTES = 16
"""Rows of q, k, v and o, and their strides, are multiples of this many bytes, except with an ``alignment`` and where
padding copies read or write the call's tensors."""
LISTED_ROWS = 128
"""Queries, and keys, per block of a sparse mask. A kernel whose block sizes do not divide this visits all blocks."""
MAX_HEAD_DIM = 576
"""The largest head dim of any kernel; each kernel's ``supports`` has its limit."""
MAX_HEAD_DIM_V = 512
"""The largest head dim of V in Hopper kernels (256 columns of O for each of two warpgroups) and in combine kernels."""
MAX_DUAL_COLUMNS = 128
"""Maximum head dim of V next to its tangent: accumulators of 16 rows and 128 columns take 128 registers."""
LARGE_HEAD_DIM = 256
"""For larger head dims, kernels that can do so divide the columns of O among warps or warpgroups."""

_WORD = re.compile(r"[a-z_][a-z0-9_]*")
_DIMS = re.compile(r"d(\d+)(?:x(\d+))?")
# The optional words of a name. A word that is not here names a user's epilogue.
_TOKENS: dict[str, tuple[str, object]] = {
    **{precision: ("precision", precision) for precision in PRECISIONS},
    **{mask: ("mask", mask) for mask in MASKS},
    "softcap": ("softcap", True),
    "alibi": ("alibi", True),
    **{f"bias_{dtype}": ("bias", dtype) for dtype in BIAS_DTYPES},
    **{f"sinks_{dtype}": ("sinks", dtype) for dtype in SINK_DTYPES},
    "dropout": ("dropout", "flash"),
    "dropout_mem_efficient": ("dropout", "mem_efficient"),
    "max_scores": ("max_scores", True),
    "varlen": ("varlen", True),
    "seqused_q": ("seqused_q", True),
    "seqused_k": ("seqused_k", True),
    "bias_grad": ("bias_grad", True),
    "bias_tangent": ("bias_tangent", True),
    "sinks_tangent": ("sinks_tangent", True),
    "lse_grad": ("lse_grad", True),
    **{f"rotary_{pairs}": ("rotary", pairs) for pairs in ROTARY},
    "rotate_q": ("rotate_q", True),
    "varlen_new": ("varlen_new", True),
    "paged": ("paged", True),
    "batch_idx": ("batch_idx", True),
    "leftpad": ("leftpad", True),
    "varlen_k": ("varlen_k", True),
    "tree": ("tree", True),
    "latent": ("latent", True),
    **{f"split_{split}": ("split", split) for split in SPLITS},
    **{f"aligned_{n}": ("alignment", n) for n in ALIGNMENTS},
}
FEATURES = tuple(_TOKENS)
"""The optional words of a name, except for users' epilogues."""
_BEFORE_EPILOGUES = ("precision", "mask", "softcap", "alibi", "bias")
# Features of some ops only.
_ONLY_IN: dict[str, tuple[str, ...]] = {
    "sinks": ("forward", "jvp", "kvcache", "combine"),
    "max_scores": ("forward", "kvcache"),
    "bias_grad": ("backward",),
    **dict.fromkeys(("bias_tangent", "sinks_tangent"), ("jvp",)),
    "lse_grad": ("backward_preprocess",),
    **dict.fromkeys(("rotary", "rotate_q", "varlen_new"), ("append",)),
    **dict.fromkeys(("paged", "batch_idx"), ("append", "kvcache")),
    "leftpad": ("kvcache",),
    "varlen_k": ("kvcache",),
    "split": ("kvcache",),
    "tree": ("kvcache",),
    "latent": ("kvcache",),
    "alignment": ("kvcache", "combine", "append"),
}
_TOKEN_OF = {value: token for token, value in _TOKENS.items()}


def is_word(name: str) -> bool:
    """True if ``name`` can be a word of a kernel's name."""
    return _WORD.fullmatch(name) is not None and _DIMS.fullmatch(name) is None


def field_of(feature: str) -> tuple[str, object]:
    """The field of :class:`Traits` that one of ``FEATURES`` sets, and its value."""
    return _TOKENS[feature]


def ops_of(feature: str) -> tuple[str, ...]:
    """The ops whose traits may have one of ``FEATURES``; a kernel's ``supports`` may still decline it."""
    return _ONLY_IN.get(_TOKENS[feature][0], OPS)


_MEANT = {
    **dict.fromkeys(("sm86", "sm89", "sm100", "sm120"), ", a target (--target)"),
    **{f"{name}16": f" (did you mean '{short}16'?)" for name, short in (("bfloat", "bf"), ("float", "fp"))},
    "float32": " (did you mean 'fp32'?)",
}
"""Unknown words -> the hint that an error message adds."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint such as ``" (did you mean 'causal'?)"`` for a misspelled word, or ``""``."""
    whole = list(known)
    parts = {part: one for one in reversed(whole) for part in one.split("_")}
    word = word.lower()
    close = difflib.get_close_matches(word, whole, 1, 0.7)
    close += [parts[part] for part in difflib.get_close_matches(word, parts, 1, 0.8)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def kind_of(value: object) -> str:
    """The class of ``value`` with its article: ``"an int"``."""
    kind = type(value).__name__
    return f"an {kind}" if kind[0].lower() in "aeiou" or kind.startswith("nd") else f"a {kind}"


def head_dim_multiple(dtype: str) -> int:
    """Number of elements of ``dtype`` in 16 bytes; aligned rows have a multiple of this many elements."""
    return ROW_BYTES // ELEMENT_BYTES[dtype]


def aligned_head_dim(dtype: str, head_dim: int) -> int:
    """``head_dim`` rounded up so that rows are multiples of 16 bytes."""
    return -(-head_dim // head_dim_multiple(dtype)) * head_dim_multiple(dtype)


def head_dims_text(multiple: int, most: int) -> str:
    """The accepted head dims as error messages state them."""
    return f"1 to {most}" if multiple == 1 else f"multiples of {multiple} up to {most}"


@dataclass(frozen=True, order=True)
class Traits:
    """A kernel's computation: the operation, the kernel's generation, the types, the score features.

    Attributes:
        op: the operation, one of ``OPS``. ``jvp`` is the forward with its forward-mode derivative.
        arch: the kernel's generation. An ``sm80`` kernel (cp.async, mma.sync) also runs on later GPUs.
        dtype: element type of q, k, v and o.
        head_dim: elements of a row of q and k, up to 576; a multiple of 16 bytes, except with ``alignment`` and for the
            padding copies.
        head_dim_v: elements of a row of v and o; ``0`` means ``head_dim``.
        precision: precision of fp32 products: ``""`` for full fp32, ``"tf32"`` for operands rounded to tf32's
            11 significant bits.
        mask: ``""``, or the band of keys a query sees. ``causal`` and ``window`` align the last query with the last
            key (bottom right), the ``_top_left`` ones the first query with the first key.
        softcap: scores pass through ``cap * tanh(score / cap)``.
        alibi: ``slope * |query - key|`` is subtracted from scores, with a slope per head or per batch and head.
        bias: dtype of a tensor added to the scores, or ``""``.
        epilogues: names of users' registered epilogues, applied in this order after the built-in ones.
        sinks: dtype of the attention sinks, one logit per head in the softmax's denominator, or ``""``. The forward
            includes them in LSE; combine adds them once to merged results.
        dropout: ``""``, or which of PyTorch's two dropout masks.
        max_scores: each row's greatest score is an output, too. Ops forward and kvcache.
        varlen: sequences are packed one after the other, with cumulative lengths.
        seqused_q, seqused_k: lengths limit each batch's queries or keys.
        bias_grad: the bias's gradient is computed too. Op backward, with a bias.
        bias_tangent, sinks_tangent: the bias or the sinks have a tangent, too. Op jvp, with a bias or sinks.
        lse_grad: LSE has a gradient; it flows into q and k. Op backward_preprocess.
        rotary: ``""``, or which pairs of elements a rotary embedding rotates: ``interleaved`` (2i, 2i + 1) or
            ``halves`` (i, i + pairs). Op append, like ``rotate_q`` and ``varlen_new``.
        rotate_q: queries are rotated too; ``varlen`` then refers to the queries.
        varlen_new: new keys are packed, with cumulative lengths.
        paged: the cache consists of pages, found through a table. Ops append and kvcache, like ``batch_idx``.
        batch_idx: each sequence names its entry of the cache.
        leftpad: each sequence has a first valid row in its cache entry. Op kvcache.
        varlen_k: keys are packed sequences as well, instead of a cache. Op kvcache.
        tree: a row of bits for each query says which of the last keys the query sees. Op kvcache.
        split: ``""``, or how the keys of a query block are split. ``fixed``: among CTAs, in a fixed number of splits
            or in splits of a fixed size. ``folded``: one CTA adds splits of a fixed size
            (:mod:`cute_attn.outputs.fold`). Op kvcache.
        alignment: 0 if rows start at multiples of 16 bytes; else 1, 2 or 4: row starts and head dims are multiples of
            this many elements. Kernels with a cache.
        variant: name of a registered kernel class, ``""`` for the package's default. The fp32 forward on sm80 also has
            ``terms`` and ``fallback``, launched together (:mod:`cute_attn.host.split_fp32`).

    Raises:
        ValueError: a field outside the listed values; the message names the field, its value and the accepted ones.
    """

    op: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int = 0
    precision: str = ""
    mask: str = ""
    softcap: bool = False
    alibi: bool = False
    bias: str = ""
    epilogues: tuple[str, ...] = field(default=())
    sinks: str = ""
    dropout: str = ""
    max_scores: bool = False
    varlen: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    bias_grad: bool = False
    bias_tangent: bool = False
    sinks_tangent: bool = False
    lse_grad: bool = False
    rotary: str = ""
    rotate_q: bool = False
    varlen_new: bool = False
    paged: bool = False
    batch_idx: bool = False
    leftpad: bool = False
    varlen_k: bool = False
    tree: bool = False
    latent: bool = False
    split: str = ""
    alignment: int = 0
    variant: str = ""

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name, accepted in (
            ("op", OPS),
            ("arch", ARCHS),
            ("dtype", DTYPES),
            ("precision", ("", *PRECISIONS) if self.dtype == "fp32" else ("",)),
            ("mask", ("", *MASKS)),
            ("bias", ("", *BIAS_DTYPES)),
            ("sinks", ("", *SINK_DTYPES)),
            ("dropout", ("", *DROPOUTS)),
            ("rotary", ("", *ROTARY)),
            ("split", ("", *SPLITS)),
            ("alignment", (0, *ALIGNMENTS)),
        ):
            if (given := getattr(self, name)) not in accepted:
                meant = _MEANT.get(str(given)) or did_you_mean(str(given), map(str, accepted))
                raise ValueError(f"{name} is {given!r}{meant}; accepted: {', '.join(map(repr, accepted))}")
        if self.alignment * self.element_bytes >= ROW_BYTES:
            raise ValueError(
                f"alignment is {self.alignment} with dtype {self.dtype!r}; accepted: 0 for {ROW_BYTES} bytes"
            )
        multiple = 1 if self.op in PADDED_TENSORS else self.row_alignment
        for name in ("head_dim", "head_dim_v"):
            dim = getattr(self, name)
            if not (isinstance(dim, int) and 0 < dim <= MAX_HEAD_DIM and dim % multiple == 0):
                raise ValueError(f"{name} is {dim!r}; accepted: {head_dims_text(multiple, MAX_HEAD_DIM)}")
        for name, ops in _ONLY_IN.items():
            if getattr(self, name) and self.op not in ops:
                which = " or ".join(map(repr, ops))
                raise ValueError(
                    f"{name} is {getattr(self, name)} with op {self.op!r}; accepted: with op {which}"
                )
        if self.varlen_k and (not self.varlen or self.paged or self.batch_idx or self.leftpad):
            raise ValueError(
                "varlen_k is True; accepted: with varlen, and without paged, batch_idx or leftpad"
            )
        if self.rotate_q and not self.rotary:
            raise ValueError(f"rotate_q is True without rotary; accepted: with rotary {' or '.join(ROTARY)}")
        for name, needs, accepted in (
            ("bias_grad", "bias", BIAS_DTYPES),
            ("bias_tangent", "bias", BIAS_DTYPES),
            ("sinks_tangent", "sinks", SINK_DTYPES),
        ):
            if getattr(self, name) and not getattr(self, needs):
                which = " or ".join(accepted)
                raise ValueError(f"{name} is True without {needs}; accepted: with {needs} {which}")
        for name in (*self.epilogues, *([self.variant] if self.variant else [])):
            if not is_word(name):
                raise ValueError(
                    f"{name!r} cannot be part of a name; accepted: lower-case words like 'my_bias'"
                )
        taken = [name for name in self.epilogues if name in _TOKENS]
        if taken or len(set(self.epilogues)) != len(self.epilogues):
            raise ValueError(
                f"epilogues is {self.epilogues!r}; accepted: distinct names that are not traits' own words"
            )

    @property
    @functools.lru_cache(maxsize=4096)  # noqa: B019  checks name the traits, in each new plan
    def name(self) -> str:
        """The short name; :meth:`parse` reads it back."""
        dims = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        arch = f"{self.arch}:{self.variant}" if self.variant else self.arch
        words = [_TOKEN_OF[item] for item in self._features() if item in _TOKEN_OF]
        before_epilogues = [w for w in words if _TOKENS[w][0] in _BEFORE_EPILOGUES]
        after_epilogues = words[len(before_epilogues) :]
        return "-".join(
            [self.op, arch, self.dtype, dims, *before_epilogues, *self.epilogues, *after_epilogues]
        )

    def _features(self) -> list[tuple[str, object]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "epilogues"]

    @classmethod
    def of(cls, kernel: "Traits | str", named: str = "kernel") -> "Traits":
        """The traits that ``kernel`` is or names. named: the argument's name in error messages.

        Raises:
            TypeError: ``kernel`` is neither traits nor text.
            ValueError: the text is not a kernel's name.
        """
        if isinstance(kernel, cls):
            return kernel
        if isinstance(kernel, str):
            return cls.parse(kernel)
        text = repr(kernel)  # a tensor's has many lines
        given = text if len(text) < 100 and "\n" not in text else kind_of(kernel)
        raise TypeError(
            f"{named} is {given}; accepted: Traits, or a name such as 'forward-sm80-bf16-d128-causal'"
        )

    @classmethod
    def parse(cls, name: str) -> "Traits":
        """The traits of a name such as ``forward-sm80-bf16-d192x128-causal``.

        Raises:
            TypeError: ``name`` is not a str.
            ValueError: the text is not a kernel's name.
        """
        if not isinstance(name, str):
            raise TypeError(
                f"name is {kind_of(name)}; accepted: text such as 'forward-sm80-bf16-d128-causal'"
            )
        parts = name.split("-")
        dims = _DIMS.fullmatch(parts[3]) if len(parts) > 3 else None
        if dims is None:
            raise ValueError(
                f"name is {name!r}; accepted: OP-ARCH-DTYPE-dDIM[xDIM_V][-FEATURE...], such as "
                "'forward-sm80-bf16-d128-causal'"
            )
        arch, _, variant = parts[1].partition(":")
        features: dict[str, object] = {}
        epilogues = []
        for word in parts[4:]:
            if word not in _TOKENS:
                epilogues.append(word)
                continue
            key, value = _TOKENS[word]
            if key in features:
                raise ValueError(f"name is {name!r}; accepted: one word for {key}, and {word!r} is a second")
            features[key] = value
        return cls(
            op=parts[0],
            arch=arch,
            dtype=parts[2],
            head_dim=int(dims[1]),
            head_dim_v=int(dims[2] or 0),
            epilogues=tuple(epilogues),
            variant=variant,
            **features,  # type: ignore[arg-type]
        )

    def part(self, op: str, *, lse_grad: bool = False) -> "Traits":
        """Traits of ``"backward_preprocess"`` or ``"backward_convert"`` for this backward: only ``PART_FIELDS``.

        One compiled kernel thus serves many main kernels. lse_grad: the preprocess reads a gradient of LSE.
        """
        if op not in PARTS:
            raise ValueError(f"op is {op!r}; accepted: {', '.join(map(repr, PARTS))}")
        kept = {name: getattr(self, name) for name in PART_FIELDS}
        return Traits(op, lse_grad=lse_grad, **kept)

    def split_fp32(self, op: str) -> "Traits":
        """Traits of ``"forward_split"`` or ``"backward_split"``: only precision, dims and varlen."""
        if op not in SPLIT_TENSORS:
            raise ValueError(f"op is {op!r}; accepted: {', '.join(map(repr, SPLIT_TENSORS))}")
        names = ("dtype", "head_dim", "head_dim_v", "precision", "varlen")
        return Traits(op, "sm80", **{name: getattr(self, name) for name in names})

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k, v and o."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def row_alignment(self) -> int:
        """Row starts and head dims are multiples of this number of elements."""
        return self.alignment or head_dim_multiple(self.dtype)

    @property
    def fp32_terms(self) -> int:
        """Terms of an fp32 number in tf32 or fp16: hi and lo, or with precision tf32 only hi."""
        return 1 if self.precision == "tf32" else 2

    @property
    def differentiates(self) -> bool:
        """True if the derivatives of score epilogues are computed, in reverse or forward mode."""
        return self.op in ("backward", "jvp")

    @property
    def divides_keys(self) -> bool:
        """True if the keys of a query block are split among several CTAs."""
        return self.split == "fixed"

    @property
    def causal(self) -> bool:
        """True if no query sees a key after its position."""
        return self.mask.startswith("causal")

    @property
    def windowed(self) -> bool:
        """True if the band of visible keys has run-time bounds."""
        return self.mask.startswith("window")

    @property
    def top_left(self) -> bool:
        """True if the band is aligned to the first query and key, False to the last."""
        return self.mask.endswith("top_left")

    def __str__(self) -> str:
        return self.name
