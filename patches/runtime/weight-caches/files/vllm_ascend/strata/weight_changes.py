"""The mark that says: weights may have changed since the last forward.

A write through ``param.data`` leaves neither address nor version of the tensor different, so a change cannot
be found by looking at the tensor. Instead everything that could change a weight sets the mark, rather too
often than too rarely, and the next forward refreshes what is derived from weights
(:func:`vllm_ascend.strata.weight_caches.settle`).

Standard library only: vLLM's executors import this module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

pending: bool = False
"""The mark itself; cleared only by ``weight_caches.settle``."""

every_step: bool = False
"""Whether each step marks: set at building where user code shares the process and could write at any time."""

STEP_CALLS: frozenset[str] = frozenset(
    {"execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch", "check_health"}
)
"""The calls of a worker that serving makes in every step. They run the model and change no weight; every
other call, by name or as a function, may."""


def mark() -> None:
    """Weights may have changed, or change before the next forward. Costs nothing; any code may call it."""
    global pending
    pending = True


class _Call(AbstractContextManager[None]):
    def __enter__(self) -> None:
        mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mark()


_STEP = nullcontext()
_OTHER = _Call()


def call(method: Any) -> AbstractContextManager[None]:
    """Around one call that reaches a worker: marks before and after it, unless it is one of a step's.

    method: its name, a pickled function (bytes) or a callable, as the executors pass it. Marks on both sides
    because the call may itself run forwards before and after it writes.
    """
    return _STEP if isinstance(method, str) and method in STEP_CALLS else _OTHER


def step(scheduler_output: SchedulerOutput) -> None:
    """Before a step: marks if it continues no request of an earlier one, or if every step has to.

    Between two generations something may have written to the parameters without any call that could be seen.
    """
    if every_step or not scheduler_output.scheduled_cached_reqs.req_ids:
        mark()
