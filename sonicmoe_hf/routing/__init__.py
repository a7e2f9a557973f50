"""The work of a patched model's routers beside top-k: token rounding, counting, balancing, recording and replaying.

Exports the policy of token rounding and its functions of tensors.
"""

from ..layer.routing import Routing, TokenRounding, round_tokens, rounded_routing

__all__ = ["Routing", "TokenRounding", "round_tokens", "rounded_routing"]
