"""The protocol of an epilogue: something that happens to a score tile in registers between the two matrix products.

An epilogue is a small frozen object made from traits. On the host it says which arguments it adds to a kernel; on the
device it is begun once a work tile and then applied to every score tile the work tile visits.

To add one of your own, subclass :class:`Epilogue` in a file of yours, decorate it with :func:`register_epilogue`, and
name it in a trait (``Traits(..., epilogues=("my_name",))``) or in ``attention(..., epilogues=("my_name",))``. With a
``backward`` of its own it can be differentiated. Tiles come upright and transposed (``ScoreTile``), with any number of
rows and columns a thread: written in terms of ``tile.rows`` and ``tile.cols``, an epilogue need not know.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.inputs import ScoreInputs

_REGISTERED: dict[str, type["Epilogue"]] = {}


class Epilogue:
    """Base of all score epilogues. Only ``forward`` and ``reference`` must be given."""

    name: ClassVar[str] = ""

    def fake_args(self) -> tuple:
        """Fake tensors and scalars for compiling, in the order of ``host_args``. None by default."""
        return ()

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """This launch's arguments, picked from what the caller gave."""
        return ()

    def begin(self, args: tuple, context: ScoreContext) -> Any:
        """Once a work tile, on the device: what ``forward`` needs of ``args``, as a tuple or a frozen dataclass."""
        return args

    def load(self, state: Any, tile: ScoreTile) -> Any:
        """Before the score tile's product: start reading what ``forward`` will need of global memory.

        ``tile.acc`` does not hold scores yet. Whatever is returned is given to ``forward``.
        """
        return ()

    def forward(self, state: Any, tile: ScoreTile, loaded: Any) -> Any:
        """Change ``tile.acc`` in place. A score in natural units is ``acc * context.score_scale``.

        Whatever is returned is given to ``backward``; a forward kernel ignores it, and it costs nothing there.
        """
        raise NotImplementedError(f"epilogue {self.name!r} has no forward")

    def backward(self, state: Any, tile: ScoreTile, saved: Any) -> None:
        """Turn d(loss)/d(score after) in ``tile.acc`` into d(loss)/d(score before), in place, both in natural units.

        ``saved`` is what ``forward`` returned for the same tile, in registers till now: as little as possible. What is
        in ``tile.acc`` is a gradient but for ``context.gradient_scale``, with which a gradient that an epilogue itself
        writes has to be multiplied. The default refuses: an epilogue without a derivative serves forward kernels only.
        """
        raise NotImplementedError(
            f"epilogue {self.name!r} has no backward: a forward kernel can use it, no backward can"
        )

    @classmethod
    def differentiable(cls) -> bool:
        """Whether the class has a backward of its own."""
        return cls.backward is not Epilogue.backward

    @staticmethod
    def reference(scores: Any, coords: Any, inputs: ScoreInputs) -> Any:
        """The same on torch tensors: scores (batch, nheads, seqlen_q, seqlen_k) in natural units -> the same shape.

        ``coords`` has ``batch``, ``head``, ``query`` and ``key`` index tensors that broadcast to the scores' shape.
        """
        raise NotImplementedError


def register_epilogue(name: str) -> Callable[[type[Epilogue]], type[Epilogue]]:
    """Class decorator: make an epilogue known under ``name``, which traits can then use.

    Raises:
        ValueError: the name is taken by another class.
    """

    def register(cls: type[Epilogue]) -> type[Epilogue]:
        known = _REGISTERED.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"epilogue name {name!r} is taken by {known.__module__}.{known.__qualname__}")
        cls.name = name
        _REGISTERED[name] = cls
        return cls

    return register


def user_epilogue(name: str) -> type[Epilogue]:
    """The class registered under ``name``.

    Raises:
        KeyError: nothing is registered under it; the message lists what is.
    """
    if name not in _REGISTERED:
        known = ", ".join(sorted(_REGISTERED)) or "none"
        raise KeyError(f"no epilogue is registered as {name!r}; registered: {known}")
    return _REGISTERED[name]
