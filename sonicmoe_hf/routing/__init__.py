"""The work of a patched model's routers beside top-k: token rounding, counting, balancing, recording and replaying.

Exports the policy of token rounding, its functions of tensors, and what says where it does not work.
"""

from ..layer.routing import Routing, TokenRounding, round_tokens, rounded_routing
from .support import why_no_rounding

__all__ = ["Routing", "TokenRounding", "round_tokens", "rounded_routing", "why_no_rounding"]
