"""The protocol of score epilogues: operations on a score tile in registers between the two matrix products.

An epilogue is a small frozen object made from traits. On the host it adds arguments to a kernel. On the device it
begins once per work tile, and is applied to each of its score tiles.

To add one, subclass :class:`Epilogue`, decorate the class with :func:`register_epilogue`, and name it in
``Traits(..., epilogues=("my_name",))`` or in ``attention(..., epilogues=("my_name",))``. With a ``backward`` it is
differentiable. Tiles are transposed or not (``ScoreTile``), with any number of rows and columns per thread: write
an epilogue in terms of ``tile.rows`` and ``tile.cols``.

Tiles reach beyond the sequences: an epilogue that indexes a tensor must clamp its indices. Query ``tile.row0 +
tile.rows[r]`` is out of bounds from ``context.seqlen_q`` on and key ``tile.col0 + tile.cols[c]`` from
``context.seqlen_k`` on, so index with ``min(query, seqlen_q - 1)`` and ``min(key, seqlen_k - 1)``; elements
there are masked or not stored. ``add_gradients`` must skip those elements.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


class Epilogue:
    """Base of all score epilogues. ``forward`` and ``reference`` are required."""

    name: ClassVar[str] = ""
    code_digest: ClassVar[str] = ""
    """Tells a class that code makes from others of its name, as the source does for a written one."""
    lists_blocks: ClassVar[bool] = False
    """Set if it hides all keys outside listed blocks, and changes no score of a listed block without a mask."""
    reads_keys: ClassVar[bool] = True
    """Unset if what it does to a score depends on no key."""

    @classmethod
    def of(cls, traits: Traits) -> "Epilogue":
        """The object that a kernel of these traits uses; a backward's may differ."""
        return cls()

    @classmethod
    def check(cls, inputs: ScoreInputs) -> None:
        """Raise TypeError or ValueError for a call's wrong arguments; once for all calls of the same metadata."""

    @classmethod
    def warn_of_indices(cls, inputs: ScoreInputs, sizes: Mapping[str, int]) -> None:
        """Warn of elements that a kernel and the definition read at different places, for a call of these sizes."""

    def fake_args(self) -> tuple:
        """Fake tensors and scalars to compile with, in the order of ``host_args``; () by default."""
        return ()

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """The arguments of one launch, selected from ``inputs``."""
        return ()

    @classmethod
    def example_args(cls, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> tuple:
        """Arguments of a call of these sizes, with tensors on the CPU, for checks and timings by name."""
        return ()

    @classmethod
    def held(cls, backward: bool) -> int:
        """Numbers that a thread holds per score, or per query or key; default tiles are chosen by it."""
        return 4 * backward

    def begin(self, args: tuple, context: ScoreContext) -> Any:
        """Once a work tile, on the device: the state for the other methods, as a tuple or a frozen dataclass."""
        return args

    def visiting(self) -> "Epilogue":
        """With ``lists_blocks``: for a kernel that visits only the listed blocks."""
        return self

    def key_blocks(self, state: Any, row0: Any, rows: int) -> Any:
        """With ``lists_blocks`` the key blocks, of ``rows``, that the query block of ``row0`` visits: a BlockRange."""
        raise NotImplementedError(f"epilogue {self.name!r} lists no blocks")

    def query_blocks(self, state: Any, row0: Any, rows: int) -> Any:
        """With ``lists_blocks`` the query blocks, of ``rows``, that see the key block of ``row0``: a BlockRange."""
        raise NotImplementedError(f"epilogue {self.name!r} lists no blocks")

    def load(self, state: Any, tile: ScoreTile) -> Any:
        """Before the score tile's product: start reads of global memory; ``forward`` gets the result.

        ``tile.acc`` holds no scores yet.
        """
        return ()

    def forward(self, state: Any, tile: ScoreTile, loaded: Any) -> Any:
        """Change ``tile.acc`` in place. A score is ``acc * context.score_scale``.

        ``backward`` gets the result; forward kernels ignore it.
        """
        raise NotImplementedError(f"epilogue {self.name!r} has no forward")

    @property
    def has_gradients(self) -> bool:
        """The class overrides :meth:`add_gradients`."""
        return type(self).add_gradients is not Epilogue.add_gradients

    def add_gradients(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Before ``backward``, of the same arguments: store or add the gradients of a call's tensors.

        Nothing by default. Where several CTAs compute one score, only the first of them calls it. It leaves
        ``tile.acc`` as it is.
        """

    def backward(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Convert d(loss)/d(score after) in ``tile.acc`` into d(loss)/d(score before), in place.

        ``saved`` is the result of ``forward`` for the same tile; it occupies registers in between. Gradients in
        ``tile.acc`` lack the factor ``context.gradient_scale``: ``add_gradients`` multiplies its results by it.

        Raises:
            NotImplementedError: by default; an epilogue without a derivative serves forward kernels only.
        """
        raise NotImplementedError(
            f"epilogue {self.name!r} has no backward: a forward kernel can use it, no backward can"
        )

    @classmethod
    def differentiable(cls) -> bool:
        """False if the class has no ``backward``: then it serves forward kernels only."""
        return cls.backward is not Epilogue.backward

    @classmethod
    def with_gradients(cls, wanted: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """An epilogue for backward kernels that also computes gradients of a call's arguments, by its name.

        Also returns the ``wanted`` numbers of arguments with gradients that are not always 0. The epilogue has the same
        arguments and then, for each of these numbers, fp32 zeros of its shape to add to. None if there is none.
        """
        return None

    @staticmethod
    def reference(scores: Any, coords: Any, inputs: ScoreInputs) -> Any:
        """``forward`` on torch tensors: scores (batch, nheads, seqlen_q, seqlen_k) -> the same shape.

        ``coords`` has index tensors ``batch``, ``head``, ``query`` and ``key`` that broadcast to the scores' shape.
        """
        raise NotImplementedError
