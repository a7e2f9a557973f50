"""Whether ranks can share a model's experts, asked of configs alone, before anything is loaded."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from ..errors import UnsupportedModelError
from ..layer.experts_module import num_experts_in


def check_ranks(config: PreTrainedConfig, distributed_config: Any) -> None:
    """Raise UnsupportedModelError where a DistributedConfig, or its dict, has another number of ranks share a model's
    experts than one that divides them."""

    def given(name: str) -> Any:
        is_dict = isinstance(distributed_config, dict)
        return distributed_config.get(name) if is_dict else getattr(distributed_config, name, None)

    total = num_experts_in(config.get_text_config())
    in_batch, batches = given("tp_size") or 1, given("fsdp_size") or 1
    # Transformers 5.17 has no ep_size
    ranks = given("ep_size") or (in_batch if given("enable_expert_parallel") else 1)
    if total is None or total % ranks == 0:
        return
    remedy = f"start as many processes as divide {total}"
    fewer = math.gcd(total, in_batch * batches)
    if fewer > 1 and fewer % in_batch == 0:
        remedy += f", or give ep_size={fewer}: then each expert is on {in_batch * batches // fewer} ranks"
    raise UnsupportedModelError(
        f"{type(config).__name__} has {total} experts, of which {ranks} ranks (ep_size) cannot hold as many each; "
        f"{remedy}"
    )
