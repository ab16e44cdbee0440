"""The arguments of a kernel's launch: the parameters of its ``__call__``, in order, without the stream at the end.

The signature is the only declaration of their names and order. Its annotations say how arguments are faked for the
compiler: a number by its type, such as ``Float32``; anything else by ``Annotated[type, fake]``, where ``fake(kernel)``
makes the placeholder. :mod:`cute_attn.kernels.fakes` defines the types that several kernels use.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_origin

from cute_attn.compiler.fingerprint import dsl


def parameters(kernel: type) -> dict[str, Any]:
    """Names and annotations of a launch's arguments, in order. kernel: a kernel's class."""
    _, *taken, _ = inspect.signature(kernel.__call__, eval_str=True).parameters.values()
    return {one.name: one.annotation for one in taken}


def fakes(kernel: Any) -> tuple:
    """The fake arguments with which a kernel is compiled.

    Raises:
        TypeError: an annotation does not say how an argument is faked.
    """
    return tuple(_fake(kernel, *one) for one in parameters(type(kernel)).items())


def _fake(kernel: Any, name: str, annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__[0](kernel)
    if isinstance(annotation, type) and issubclass(annotation, dsl().Numeric):
        return annotation(0)
    raise TypeError(
        f"{name} of {type(kernel).__qualname__}.__call__ is annotated {annotation}; accepted: a number's type such as "
        "Float32, or Annotated[type, fake] with a function from the kernel to a fake argument"
    )


def ordered(kernel: Any, names: Iterable[str], given: Mapping[str, Any]) -> tuple:
    """The ``given`` arguments in the order of ``names``. kernel: the kernel's name, for the error message."""
    names = tuple(names)
    if given.keys() != set(names):
        raise TypeError(f"{kernel} is launched with {', '.join(given)}; accepted: {', '.join(names)}")
    return tuple(given[name] for name in names)
