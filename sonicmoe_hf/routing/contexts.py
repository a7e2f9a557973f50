"""The `with` blocks of replay.py that a thread is in: the routing that its calls of a model note or replay."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from .recorded import RecordedRouting, ReplayedCall
from .state import RoutingState

Replay = deque[ReplayedCall]  # what the calls to come take their experts from
_thread = threading.local()  # contexts: (a model's state, its RecordedRouting or Replay) of each, the innermost last


@contextlib.contextmanager
def in_this_thread(state: RoutingState, routing: RecordedRouting | Replay):
    """Make this thread's calls of a model note their routing, or take it from a replay. Other threads' do not."""
    context = state, routing
    _thread.contexts = (*getattr(_thread, "contexts", ()), context)
    try:
        yield
    finally:
        _thread.contexts = tuple(other for other in _thread.contexts if other is not context)


def active(state: RoutingState) -> tuple[RecordedRouting | None, Replay | None]:
    """Find where this thread's calls of a model note their routing, and what they take their experts from, if they do."""
    recording, replay = None, None
    for of_model, routing in getattr(_thread, "contexts", ()):  # the innermost counts
        if of_model is state and isinstance(routing, RecordedRouting):
            recording = routing
        elif of_model is state:
            replay = routing
    return recording, replay
