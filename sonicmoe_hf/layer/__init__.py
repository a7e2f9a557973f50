"""The layer: moe_experts, its torch op, dispatch and routing, on tensors and settings; and what is asked of the module
that holds a layer's weights (experts_module.py).

In the order of reading:

config, backends       settings, and which kernels run
moe_experts            the function; projection and packed_weight: its weights and their adapters
routing, dispatch      the experts of each token, and the pairs sorted by expert
call, experts_op       one call, and its forward and backward as ops of torch_op
ahead                  kernels that are compiled while torch traces these ops
products               the computation of both, by a backend's functions; pieces: of very many rows
fetching, kept         where a call finds weights that live in host memory, or that it has expanded already
experts_module         what a module with experts holds; holding: which of them a rank has
adapters_argument      how adapters reach the experts' forward
"""
