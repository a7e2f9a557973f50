"""Trainers of reinforcement learning and preference optimization, recognised by their class names.

They compare log-probabilities of one text under two calls: a policy's new ones with its old ones (GRPO, RLOO), or with a
reference's (DPO, KTO). Only the call with gradients is rounded, so that the two differ where the policies do not: at
GRPO's first step KL is 0.009 instead of 0. ORPO, CPO and TPO compare a chosen and a rejected text, whose roundings depend
on each other and on the rest of the batch. Reward models, supervised fine-tuning and distillation compare no
log-probabilities of one model across two routings, and are none of these.
"""

from __future__ import annotations

import re

# ...PO is some policy or preference optimisation: GRPO, DPO, PPO, CPO, ORPO, XPO, TPO, SDPO, GMPO
_POLICY_TRAINER = re.compile(
    r"(?:PO|KTO|BCO|RLOO|NashMD|MiniLLM|IWOPD|SDFT)(?:v\d)?(?:Trainer|Config|TrainingArguments|Arguments)$"
)


def policy_trainer(*objects) -> str | None:
    """Find the name of the first class of a policy or preference trainer among the classes of a Trainer or its
    arguments."""
    names = (cls.__name__ for thing in objects for cls in type(thing).__mro__)
    return next((name for name in names if _POLICY_TRAINER.search(name)), None)


def check_no_policy_trainer(*objects, remedy: str) -> None:
    """Raise ValueError where a Trainer, or its arguments, belong to reinforcement learning or preference optimization."""
    name = policy_trainer(*objects)
    if name is not None:
        raise ValueError(
            f"{name}: token rounding changes a token's experts with the rest of its batch, and only in calls with "
            "gradients, so that log-probabilities that this trainer compares differ for reasons that are not the policy; "
            f"train it with top-k: {remedy}"
        )
