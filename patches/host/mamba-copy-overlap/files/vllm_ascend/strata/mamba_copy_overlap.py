"""The copy of mamba states to new blocks, on a stream of its own between its collection and the forward pass.

The copy stream waits for what the forward pass's stream was given before (it wrote the states), and the
forward pass waits for the copy. Without a KV connector nothing in between reads or writes the states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.worker import mamba_utils
from vllm_ascend.strata import switches
from vllm_ascend.utils import is_310p

if TYPE_CHECKING:
    from vllm.v1.worker.mamba_utils import MambaCopyBuffers

ENABLED: bool = switches.bind("mamba_copy_overlap", __name__)

_ATTRIBUTE: Final = "_strata_copy"


class _Copy:
    """stream: the copy's own; done: completes with the last copy; running: begun and not yet waited for by a
    forward pass.
    """

    __slots__ = ("done", "running", "stream")

    def __init__(self) -> None:
        self.stream: Any = torch.npu.Stream()
        self.done: Any = torch.npu.Event()
        self.running = False


def settle(buffers: MambaCopyBuffers) -> None:
    """Before a step collects: the lists of the last copy may be rewritten afterwards. Waits for that copy,
    and counts it as waited for if its step failed before the forward pass.
    """
    copy: _Copy | None = vars(buffers).get(_ATTRIBUTE)
    if copy is not None:
        copy.done.synchronize()
        copy.running = False


def start(buffers: MambaCopyBuffers) -> None:
    """After a step has collected: begin its copies, unless there are none or they have to wait for a KV
    connector's load.
    """
    if not ENABLED or buffers.offset == 0 or has_kv_transfer_group() or is_310p():
        return
    attributes = vars(buffers)
    copy: _Copy | None = attributes.get(_ATTRIBUTE)
    if copy is None:
        copy = attributes[_ATTRIBUTE] = _Copy()
    copy.stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(copy.stream):
        mamba_utils.do_mamba_copy_block(buffers)
        copy.done.record()
    copy.running = True


def finish(buffers: MambaCopyBuffers) -> bool:
    """Right before the forward pass: make its stream wait for the copies. False: none were begun, upstream
    has to make them now.
    """
    copy: _Copy | None = vars(buffers).get(_ATTRIBUTE)
    if copy is None or not copy.running:
        return False
    torch.npu.current_stream().wait_event(copy.done)
    copy.running = False
    return True
