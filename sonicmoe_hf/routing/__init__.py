"""The work of a patched model's routers beside top-k: token rounding, counting, balancing, recording and replaying.

Exports the policy of token rounding, its functions of tensors, and what says where it does not work.

In the order of reading:

patched_model     what others ask of a patched model's routing, and set; support: where token rounding works
hooks             the hooks of routers and models; state: what these share, and what is known of a call
calls             which calls are in progress, also where checkpointing runs their layers again; padding: their tokens
handlers          what a router does in a call, by expert_load (counting), balance and recorded
call_scale        how training scales a call, of which balance asks
replay            record_routing and replay_routing, whose `with` blocks contexts knows
divergence        serving_divergence; server_arrays: what servers return of their routing
"""

from ..layer.routing import Routing, TokenRounding, round_tokens, rounded_routing
from .support import why_no_rounding

__all__ = ["Routing", "TokenRounding", "round_tokens", "rounded_routing", "why_no_rounding"]
