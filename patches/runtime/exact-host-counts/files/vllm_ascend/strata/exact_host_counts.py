"""Whether the host's counts of computed tokens are those that the device will use in this step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner


def hold(runner: NPUModelRunner) -> bool:
    """True if ``input_batch.num_computed_tokens_cpu`` is final when the inputs of a step are prepared.

    False under asynchronous speculation: the host then counts every draft of the step before as accepted,
    and the device corrects the count. False under context parallelism of either kind: positions are split
    over the ranks and may be rebuilt. Asked for with ``is``: an attribute that is not a plain bool (a mock)
    counts as not known.
    """
    return runner.use_async_spec_decode is False and runner.use_cp is False
