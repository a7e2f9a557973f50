"""Which routing a thread's calls of a model note or replay: the `with` blocks of replay.py that the thread is in."""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple

from .calls import PatchState
from .recorded import RecordedRouting, Replay


class _Context(NamedTuple):
    """A `with` of record_routing or replay_routing, of the model with this state."""

    state: PatchState
    recording: RecordedRouting | None
    replay: Replay | None


_thread = threading.local()  # contexts: those that this thread is in, the innermost last


@contextlib.contextmanager
def in_this_thread(state: PatchState, *, recording: RecordedRouting | None = None, replay: Replay | None = None):
    """Have this thread's calls of a model note their routing, or take it from a replay. Other threads' do not."""
    context = _Context(state, recording, replay)
    _thread.contexts = (*getattr(_thread, "contexts", ()), context)
    try:
        yield
    finally:
        _thread.contexts = tuple(other for other in _thread.contexts if other is not context)


def active(state: PatchState) -> tuple[RecordedRouting | None, Replay | None]:
    """Where this thread's calls of a model note their routing, and what they take their experts from, if they do."""
    recording, replay = None, None
    for context in getattr(_thread, "contexts", ()):  # the innermost counts
        if context.state is state:
            recording, replay = context.recording or recording, context.replay or replay
    return recording, replay
