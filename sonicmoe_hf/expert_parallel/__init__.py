"""Expert parallelism through Transformers' EPImplementationInterface: with token rounding, and each token sent to a rank
at most once.

In the order of reading: implementation (which Transformers calls), exchange (which tokens go where), collectives (how
they get there, with gradients), gradients (for training loops of one's own).
"""
