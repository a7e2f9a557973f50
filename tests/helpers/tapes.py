"""The tapes of a layer's functions."""

import sys

TAPED = {
    "sonicmoe_hf.kernels.triton.dispatch": ("_TAPES",),
    "sonicmoe_hf.layer.experts_op": ("_FORWARD_TAPES", "_FIRST_HALF_TAPES", "_SECOND_HALF_TAPES", "_BACKWARD_TAPES"),
}


def of_a_layer():
    """List the tapes of those modules that something has imported."""
    return [getattr(sys.modules[name], each) for name, own in TAPED.items() if name in sys.modules for each in own]


def forget():
    """Forget the tapes of functions that were changed since."""
    for taped in of_a_layer():
        taped.tapes.clear()
        taped._counts.clear()
