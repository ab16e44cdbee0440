"""The protocol of score epilogues: operations on a score tile in registers between the two matrix products.

An epilogue is a small frozen object made from traits. On the host it adds arguments to a kernel. On the device it
begins once per work tile, and is applied to each of its score tiles.

To add an epilogue, subclass :class:`Epilogue`, decorate the class with :func:`register_epilogue`, and name it in
``Traits(..., epilogues=("my_name",))`` or in ``attention(..., epilogues=("my_name",))``. If the class has a
``backward``, it is differentiable. Tiles may be transposed (``ScoreTile``) and have any number of rows and columns per
thread: write an epilogue in terms of ``tile.rows`` and ``tile.cols``.

Tiles reach beyond the sequences: an epilogue that indexes a tensor must clamp its indices. Query ``tile.row0 +
tile.rows[r]`` is out of bounds from ``context.seqlen_q`` on and key ``tile.col0 + tile.cols[c]`` from
``context.seqlen_k`` on, so index with ``min(query, seqlen_q - 1)`` and ``min(key, seqlen_k - 1)``; scores out of
bounds are masked or not stored. ``add_gradients`` must skip them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


class Epilogue:
    """Base of all score epilogues. ``forward`` and ``reference`` are required."""

    name: ClassVar[str] = ""
    code_digest: ClassVar[str] = ""
    """Distinguishes generated classes of the same name; a class written by hand is identified by its source."""
    lists_blocks: ClassVar[bool] = False
    """True if the epilogue hides all keys outside listed blocks and changes no score of a listed, unmasked block."""
    reads_keys: ClassVar[bool] = True
    """False if the epilogue's effect on a score does not depend on the key."""

    @classmethod
    def of(cls, traits: Traits) -> "Epilogue":
        """The epilogue object for a kernel with these traits; forward and backward objects may differ."""
        return cls()

    @classmethod
    def check(cls, inputs: ScoreInputs) -> None:
        """Raise TypeError or ValueError for invalid arguments; runs once for all calls with the same metadata."""

    @classmethod
    def warn_of_indices(cls, inputs: ScoreInputs, sizes: Mapping[str, int]) -> None:
        """Warn if, in a call of these sizes, a kernel reads other tensor elements than the reference does."""

    def fake_args(self) -> tuple:
        """Fake tensors and scalars for compilation, in the order of ``host_args``; () by default."""
        return ()

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """The arguments of one launch, selected from ``inputs``."""
        return ()

    @classmethod
    def example_args(cls, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> tuple:
        """Example arguments, with CPU tensors, of a call of these sizes: for checks and timings by name."""
        return ()

    @classmethod
    def held(cls, backward: bool) -> int:
        """Number of values that a thread holds per score, query or key; used to choose default tiles."""
        return 4 * backward

    def begin(self, args: tuple, context: ScoreContext) -> Any:
        """The state for the other methods, a tuple or a frozen dataclass; called on the device once per work tile."""
        return args

    def visiting(self) -> "Epilogue":
        """The epilogue for a kernel that visits only the listed blocks; called only with ``lists_blocks``."""
        return self

    def key_blocks(self, state: Any, row0: Any, rows: int) -> Any:
        """BlockRange of key blocks (``rows`` keys each) for the query block at ``row0``; needs ``lists_blocks``."""
        raise NotImplementedError(f"epilogue {self.name!r} lists no blocks")

    def query_blocks(self, state: Any, row0: Any, rows: int) -> Any:
        """BlockRange of query blocks (``rows`` queries each) for the key block at ``row0``; needs ``lists_blocks``."""
        raise NotImplementedError(f"epilogue {self.name!r} lists no blocks")

    def load(self, state: Any, tile: ScoreTile) -> Any:
        """Start reads of global memory before the score tile's product; the result is passed to ``forward``.

        ``tile.acc`` holds no scores yet.
        """
        return ()

    def forward(self, state: Any, tile: ScoreTile, loaded: Any) -> Any:
        """Change ``tile.acc`` in place. A score is ``acc * context.score_scale``.

        The result is passed to ``backward``; forward kernels ignore it.
        """
        raise NotImplementedError(f"epilogue {self.name!r} has no forward")

    @property
    def has_gradients(self) -> bool:
        """True if the class overrides :meth:`add_gradients`."""
        return type(self).add_gradients is not Epilogue.add_gradients

    def add_gradients(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Store or add the gradients of a call's tensors; called before ``backward`` with the same arguments.

        Does nothing by default, and must not change ``tile.acc``. If several CTAs compute the same score, only the
        first of them calls this method.
        """

    def backward(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Convert d(loss)/d(score after) in ``tile.acc`` into d(loss)/d(score before), in place.

        ``saved`` is the result of ``forward`` for the same tile; it stays in registers in between. Gradients in
        ``tile.acc`` lack the factor ``context.gradient_scale``; ``add_gradients`` must multiply its results by it.

        Raises:
            NotImplementedError: by default; an epilogue without a backward serves forward kernels only.
        """
        raise NotImplementedError(
            f"epilogue {self.name!r} has no backward: a forward kernel can use it, no backward can"
        )

    @classmethod
    def with_tangents(cls, moved: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """The name of an epilogue for kernels of tangents that also takes those of a call's arguments.

        Also returns those of the ``moved`` argument numbers on which scores depend. The epilogue has the same
        arguments, then the tangents of these, whose last stride is 1. None if unsupported.
        """
        return None

    @property
    def tangents_may_be_nan(self) -> bool:
        """True if :meth:`tangents` may leave NaN or infinity at hidden scores."""
        return False

    @property
    def adds_tangents(self) -> bool:
        """True if tangents of a call's tensors are added by :meth:`tangents`."""
        return False

    def tangents(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Convert tangents of scores before in ``tile.acc`` into tangents of scores after, in place.

        By default those of a function of scores alone: :meth:`backward`. With ``adds_tangents``, tangents of tensors
        are added to ``tile.acc * context.tangent_scale``.
        """
        self.backward(state, tile, saved)

    @classmethod
    def differentiable(cls) -> bool:
        """False if the class has no ``backward`` and so serves forward kernels only."""
        return cls.backward is not Epilogue.backward

    @classmethod
    def with_gradients(
        cls, wanted: tuple[int, ...], exact: tuple[int, ...] = ()
    ) -> tuple[str, tuple[int, ...]] | None:
        """The name of an epilogue for backward kernels that also computes gradients of a call's arguments.

        Also returns those of the ``wanted`` argument numbers whose gradient is not always 0. The epilogue has the same
        arguments, then for each of these numbers zeros to add to: fp32 ``(copies, *shape)``, for ``exact`` ones int64
        ``(copies, bins, *shape)``; see :mod:`cute_attn.epilogues.functions.gradients`. None if unsupported.
        """
        return None

    @classmethod
    def readers(cls, number: int, shape: Sequence[int], sizes: Mapping[str, int], rows: int) -> int:
        """The most scores of a call that add to one element of the gradient of argument ``number``, of this shape.

        sizes: of a call, by input name; rows: queries of all sequences. Needed with :meth:`with_gradients`.
        """
        raise NotImplementedError

    @staticmethod
    def reference(scores: Any, coords: Any, inputs: ScoreInputs) -> Any:
        """``forward`` on torch tensors: scores (batch, nheads, seqlen_q, seqlen_k) -> the same shape.

        ``coords`` has index tensors ``batch``, ``head``, ``query`` and ``key`` that broadcast to the scores' shape.
        """
        raise NotImplementedError(
            "an epilogue's class has no reference; accepted on the CPU, and to be checked: one that overrides it"
        )
