"""Tensors derived from weights: built once after loading, refreshed in place after every change.

A patch that wants one describes it as a :class:`Derived` and registers it at import. :func:`build` goes
through the loaded models and gives each module that has such a weight its tensor as a plain attribute, which
is what the forward reads. The attribute is set once and keeps its tensor and the tensor its address, since
traced code has the attribute and captured graphs have the address. It is a plain attribute and not a buffer
because vLLM's reload takes buffers off a module and puts them back as persistent ones, its loaders transfer
them, and sleep mode saves and restores their old values.

A module whose weight is not what it was at building (on the meta device in the middle of a reload, moved to
the host, another type) has None there until it is again, so that nothing old can be read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.logger import logger
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm_ascend.strata import weight_changes

ALIGNMENT = 512
"""Bytes. What the device's allocator gives every tensor of its own; slots of a shared storage keep to it."""


@dataclass(frozen=True)
class Derived:
    """One kind of derived tensor.

    attribute: name of the module attribute that holds the tensor, or None.
    enabled: the switch of the patch, asked once, at building.
    weight: the parameter of a module that the tensor follows; None for modules without one.
    view: a view of that parameter, no copy, which has the shape of the derived tensor.
    finish: turns, in place and elementwise, the view's values into the derived ones; None if they are equal.
    """

    attribute: str
    enabled: Callable[[], bool]
    weight: Callable[[nn.Module], torch.Tensor | None]
    view: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor], object] | None = None


@dataclass(eq=False)
class _Slot:
    module: weakref.ref[nn.Module]
    tensor: torch.Tensor


@dataclass(eq=False)
class _Arena:
    """Derived tensors of one kind, type and row shape in one storage: a refresh is one copy for all of them.

    slots lie in ``storage`` one behind the other, along the first dimension.
    """

    kind: Derived
    storage: torch.Tensor
    slots: list[_Slot] = field(default_factory=list)


_kinds: dict[str, Derived] = {}
_arenas: list[_Arena] = []


def register(kind: Derived) -> None:
    """Make a kind known before the model is loaded; a second kind for one attribute replaces the first."""
    _kinds[kind.attribute] = kind


def build(runner: Any) -> None:
    """Give every module of the runner's models its derived tensors.

    runner: an NPUModelRunner after ``load_model``; its model and, if there is one, its drafter's. Modules
    that have theirs already keep them. Nothing is built where weights move between host and device (an
    offloader is set), or for a weight that is not in one place (on the meta device). Parameters get a weight
    loader that marks a change, around the one that they have.
    """
    if type(get_offloader()) is not NoopOffloader:
        logger.info("Strata: weights are offloaded, no derived tensors are kept.")
        return
    _arenas[:] = [arena for arena in _arenas if any(slot.module() is not None for slot in arena.slots)]
    # the engine, and the worker with it, in the process of whoever uses vLLM as a library
    weight_changes.every_step = not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    modules = list(_modules(runner))
    for kind in _kinds.values():
        if kind.enabled():
            _build_kind(kind, modules)


def settle() -> None:
    """Refresh, if the mark of :mod:`weight_changes` is set. Called at the start of every forward.

    Runs on the current stream, ahead of the forward's own work.
    """
    if weight_changes.pending:
        weight_changes.pending = False
        complete = False
        try:
            complete = refresh()
        finally:
            if not complete:
                weight_changes.mark()


def refresh() -> bool:
    """Compute every derived tensor anew from its weight, where it lies.

    Returns whether all of them could be; the others' attributes are None until a later refresh can.
    """
    with torch.no_grad():
        complete = [_refresh_arena(arena) for arena in _arenas]
    return all(complete)


def tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(module, attribute, derived tensor) of everything that is kept for a model, for tests and reports."""
    members = set(model.modules())
    for arena in _arenas:
        for slot in arena.slots:
            module = slot.module()
            if module is not None and module in members:
                yield module, arena.kind.attribute, slot.tensor


def _modules(runner: Any) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    for model in (runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None)):
        if isinstance(model, nn.Module):
            for module in model.modules():
                if module not in seen:
                    seen.add(module)
                    yield module


def _build_kind(kind: Derived, modules: Iterable[nn.Module]) -> None:
    groups: dict[tuple[Any, ...], list[tuple[nn.Module, torch.Tensor]]] = {}
    for module in modules:
        weight = kind.weight(module)
        if weight is None or weight.is_meta or getattr(module, kind.attribute, None) is not None:
            continue
        view = kind.view(weight.detach())
        shared = view.numel() * view.element_size() % ALIGNMENT == 0
        key = (view.dtype, view.device, view.shape[1:], None if shared else len(groups))
        groups.setdefault(key, []).append((module, view))
    for members in groups.values():
        arena = _new_arena(kind, members)
        _arenas.append(arena)
        _refresh_arena(arena)
    if groups:
        logger.debug("Strata: %d tensors for %s.", sum(map(len, groups.values())), kind.attribute)


def _new_arena(kind: Derived, members: list[tuple[nn.Module, torch.Tensor]]) -> _Arena:
    first = members[0][1]
    rows = [view.shape[0] for _, view in members]
    with torch.inference_mode(False), torch.no_grad():
        storage = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        parts = storage.split(rows)
    slots = [_Slot(weakref.ref(module), part) for (module, _), part in zip(members, parts, strict=True)]
    return _Arena(kind, storage, slots)


def _refresh_arena(arena: _Arena) -> bool:
    """Returns whether every module that still exists has its tensor."""
    kind = arena.kind
    finish = kind.finish or _as_it_is
    current = [(slot, _current(kind, slot)) for slot in arena.slots]
    usable = [view for _, view in current if view is not None]
    if len(usable) == len(current):
        torch.cat(usable, out=arena.storage)
        finish(arena.storage)
    complete = True
    for slot, view in current:
        if view is not None and len(usable) < len(current):
            finish(slot.tensor.copy_(view))
        module = slot.module()
        if module is None:
            continue
        tensor = None if view is None else slot.tensor
        complete &= tensor is not None
        if getattr(module, kind.attribute, None) is not tensor:
            setattr(module, kind.attribute, tensor)
    return complete


def _as_it_is(values: torch.Tensor) -> None:
    return None


def _current(kind: Derived, slot: _Slot) -> torch.Tensor | None:
    """The view of the module's present weight if the slot can follow it."""
    module = slot.module()
    weight = kind.weight(module) if module is not None else None
    if weight is None or weight.device != slot.tensor.device or weight.dtype != slot.tensor.dtype:
        return None
    if weight.numel() != slot.tensor.numel():
        return None
    view = kind.view(weight.detach())
    if view.shape != slot.tensor.shape:
        return None
    _watch(weight)  # the parameter may be another object than at building
    return view


def _watch(weight: torch.Tensor) -> None:
    """Have the parameter's weight loader mark a change; it loads as before."""
    loader = getattr(weight, "weight_loader", default_weight_loader)
    if getattr(loader, "strata_marks", False):
        return

    @functools.wraps(loader)
    def marking(*args: Any, **kwargs: Any) -> Any:
        try:
            return loader(*args, **kwargs)
        finally:
            weight_changes.mark()

    marking.strata_marks = True  # type: ignore[attr-defined]
    weight.weight_loader = marking  # type: ignore[attr-defined]
