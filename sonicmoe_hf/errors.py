"""The errors that sonicmoe_hf raises of its own; everything else is a ValueError or what torch raises."""


class CheckpointError(ValueError):
    """A checkpoint or an adapter that cannot be converted: the message names the file or tensor and the reason."""


class UnsupportedExpertsError(ValueError):
    """These experts compute something that sonicmoe_hf does not: the message names the class, the reason, the remedy."""


class UnsupportedModelError(ValueError):
    """A model, or some of its layers, cannot be patched or planned for: the message names the layers, the reason and the
    remedy."""
