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
_counting = threading.Lock()


def _contexts_of(state: PatchState) -> list[_Context]:
    return [context for context in getattr(_thread, "contexts", ()) if context.state is state]


@contextlib.contextmanager
def in_this_thread(state: PatchState, *, recording: RecordedRouting | None = None, replay: Replay | None = None):
    """Have this thread's calls of a model note their routing, or take it from a replay. Other threads' do not."""
    context = _Context(state, recording, replay)
    _thread.contexts = (*getattr(_thread, "contexts", ()), context)
    with _counting:
        state.num_routing_contexts += 1
    try:
        yield
    finally:
        with _counting:
            state.num_routing_contexts -= 1
        _thread.contexts = tuple(other for other in _thread.contexts if other is not context)


def recording_of(state: PatchState) -> RecordedRouting | None:
    """Where this thread's calls of a model note their routing, if they do."""
    recordings = [context.recording for context in _contexts_of(state) if context.recording is not None]
    return recordings[-1] if recordings else None


def replay_of(state: PatchState) -> Replay | None:
    """What this thread's calls of a model take their experts from, if they do."""
    replays = [context.replay for context in _contexts_of(state) if context.replay is not None]
    return replays[-1] if replays else None
