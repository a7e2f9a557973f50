"""The errors that sonicmoe_hf raises of its own; everything else is a ValueError or what torch raises."""


class CheckpointError(ValueError):
    """A checkpoint or an adapter that cannot be converted: the message names the file or tensor and the reason."""


class DoctorError(Exception):
    """A model that cannot be planned for; the message names the layer or the entry of its config."""


class WarmupError(Exception):
    """Nothing can be compiled here; the message says why and what to do."""


class UnsupportedExpertsError(ValueError):
    """These experts compute something that sonicmoe_hf does not: the message names the class, the reason, the remedy."""


class UnsupportedModelError(ValueError):
    """A model, or some of its layers, cannot be patched: the message names each layer, the reason and the remedy."""
