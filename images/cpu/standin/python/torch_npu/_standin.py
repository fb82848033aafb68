"""Callables and classes that exist for import-time code and, when used, say clearly that there is no NPU."""

from __future__ import annotations

from typing import Any, NoReturn


class StandInError(NotImplementedError):
    """Something that needs an NPU was used on the stand-in."""


class Operator:
    """A named device operator. ``hasattr`` and decorators work; a call raises :class:`StandInError`.

    Attributes such as ``.out`` or ``.default`` are operators too. Tests replace operators by assignment.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = f"Stand-in for {name}: raises when called."

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StandInError(f"{self.__name__} needs an NPU: this is Strata's stand-in on a CPU host")

    def __getattr__(self, name: str) -> Operator:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Operator(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __repr__(self) -> str:
        return f"<stand-in operator {self.__name__}>"


class Unavailable:
    """Base of classes that may be named (annotations, ``isinstance``) but not instantiated without an NPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise StandInError(f"{type(self).__name__} needs an NPU: this is Strata's stand-in on a CPU host")


def unavailable_class(name: str, module: str, **members: Any) -> type[Unavailable]:
    """A subclass of :class:`Unavailable` called ``name`` that says it lives in ``module``."""
    return type(name, (Unavailable,), {"__module__": module, **members})


class Namespace:
    """An attribute bag whose unknown public attributes are operators (``torch_npu.atb`` and the like)."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Operator:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Operator(f"{self._name}.{name}")
        setattr(self, name, value)
        return value
