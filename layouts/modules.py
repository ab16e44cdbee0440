"""Packages whose modules, if called like functions, raise an error that names the function to call."""

from types import ModuleType
from typing import Any


class Module(ModuleType):
    """A module that, if called, raises a TypeError that names its function."""

    def __call__(self, *args: Any, **options: Any) -> None:
        own = self.__name__.rpartition(".")[2]
        place = f"; its function is {self.__name__}.{own}" if hasattr(self, own) else ""
        raise TypeError(f"{self.__name__} is a module{place}")


class Package(Module):
    """A package whose modules become :class:`Module`: ``sys.modules[__name__].__class__ = Package``."""

    def __setattr__(self, name: str, value: Any) -> None:  # Python's import sets a module here
        if type(value) is ModuleType:
            value.__class__ = Module
        super().__setattr__(name, value)

    def missing(self, name: str, place: str | None = None) -> AttributeError:
        """The error for a missing name, to which Python adds a similar name. place: where the name is, or None."""
        where = f"; it is {self.__name__}.{place}" if place else ""
        return AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}{where}", name=name, obj=self
        )
