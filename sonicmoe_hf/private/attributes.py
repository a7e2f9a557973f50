"""The attributes that sonicmoe_hf puts on objects of other packages, all of them. Copies and pickles take them along."""

# modules that patch_model changes: (the hook that it installed there, what removes it)
GUARD = "_sonicmoe_hf_guard"  # models that contain experts
HOOK = "_sonicmoe_hf_hook"  # routers, and these models, once something beside top-k was asked for

# experts modules
SAVE = "_sonicmoe_hf_save"  # what patched experts keep for backward: "preactivation" or "input"
COMPUTE = "_sonicmoe_hf_compute"  # what patched experts multiply in: None or "fp8"
KNOWN_FACTS = "_sonicmoe_hf_known_facts"  # (the act_fn that they hold for, patching.experts.known_facts)
UNPATCHED = "_sonicmoe_hf_unpatched"  # what their config named before patch_model
PARALLELISM = "_sonicmoe_hf_expert_parallelism"  # what brings them their tokens, an ExpertParallelism
PARAMETER_NAMES = "_sonicmoe_hf_parameter_names"  # until their checkpoint is read: of their parameters, in order
WHEN_SPLIT = "_sonicmoe_hf_when_split"  # called with them once they know the ranks that share them
HAS_HOST_HOOK = "_sonicmoe_hf_has_host_hook"  # True: state dicts have the hook of weights in host memory

# indexers and attentions whose class attention.indexers wraps
OUR_FORWARD = "_sonicmoe_hf_our_forward"  # True, in a patched model: they run our forward, else their class's own

# modules that hold packed weights
HAS_STATE_DICT_HOOKS = "_sonicmoe_hf_has_state_dict_hooks"  # True: state dicts hold codes and scales by name

# storages of tensors
KEPT = "_sonicmoe_hf_kept"  # the packed weights that a recomputation expanded, for backward

# PEFT
HAS_AVERAGED_ADAPTERS = "_sonicmoe_hf_has_averaged_adapters"  # True, of a model: ranks average adapters' gradients
PACKED_BASE = "_sonicmoe_hf_packed_base"  # of a config: lora.packed_base.PackedBase or None, of the experts below
