"""The `with` blocks of replay.py that a thread is in: its calls of a model note their experts, or are given them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from .recorded import RecordedRouting, ReplayedCall
from .state import RoutingState

Replay = deque[ReplayedCall]  # what the calls to come take their experts from
_thread = threading.local()  # contexts: (a model's state, a recording or a replay) of each, the innermost last


@contextlib.contextmanager
def in_this_thread(state: RoutingState, recording_or_replay: RecordedRouting | Replay):
    """Make this thread's calls of a model note their experts, or take them from a replay. Other threads' do not."""
    context = state, recording_or_replay
    _thread.contexts = (*getattr(_thread, "contexts", ()), context)
    try:
        yield
    finally:
        _thread.contexts = tuple(other for other in _thread.contexts if other is not context)


def active(state: RoutingState) -> tuple[RecordedRouting | None, Replay | None]:
    """Find where this thread's calls of a model note their experts, and what they take them from, if they do."""
    recording, replay = None, None
    for owner, recording_or_replay in getattr(_thread, "contexts", ()):  # the innermost counts
        if owner is state and isinstance(recording_or_replay, RecordedRouting):
            recording = recording_or_replay
        elif owner is state:
            replay = recording_or_replay
    return recording, replay
