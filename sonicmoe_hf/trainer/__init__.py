"""Trainer support: attach, callbacks, and Trainer checkpoints that restore fused experts.

In the order of reading:

attach              which methods of a Trainer are wrapped, and which callbacks are added; methods: how
step_callback       the base of rounding_callback, load_callback (which load_reports draws) and balancing, for users
steps               what these ask of routers in a step; loss_scale: how training scales the balancing loss
packed_steps        micro-batches as rows without padding; packing_checks: whether they compute the same
lengths             what is prepared for lengths that vary; few_lengths: padding to a few of them
compiled            layers that are compiled
expanded_memory, liger_loss, loss_filter, module_walks, flops    what saves time too
report, gpu_advice  what a user is told at the first step, and where the GPU waits for Python
resume              checkpoints that restore experts; rank_states: the optimiser of a model that ranks share
documents, sampling, policy_trainers    errors where training would not be what was asked for
router_loss, mixed_precision            what a Trainer's arguments say of the routers' loss and of the dtype
"""
