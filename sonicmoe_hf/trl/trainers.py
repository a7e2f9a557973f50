"""Methods of TRL's trainers where vLLM gets adapters and experts are replayed: classes that stand before TRL's among
the bases of one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from ..models.patch import patch_model
from ..patching.moe_layers import every_experts, is_patched
from ..private.replaced import temporarily_replaced
from ..routing.divergence import serving_divergence
from ..routing.replay import record_routing, replay_routing
from .functions import SYNC, TrlClass, check_functions, check_replay_functions, module_with
from .generation import AdapterGeneration
from .rollouts import DTYPE, Rollout, as_calls
from .serving import Serving

logger = logging.getLogger(__name__)
ROUTING = "routing"  # beside TRL's own tensors of a batch, which it shuffles and splits together: [B, S, L, K]
BUILDER = "VLLMGeneration"  # the global by which a trainer's module builds its engine
SCORING_ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size")  # as TRL gives them by position
UNTRUNCATED = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}
TRUNCATED = (
    "vLLM's log-probabilities are those of the distribution that {names} left, and the trainer's of the whole one, so "
    "serving/kl and serving/largest_gap include what was left out"
)


class SendsAdapters(TrlClass):
    """A trainer that builds VLLMGeneration: its vLLM gets the adapter alone."""

    serving: ClassVar[Serving]
    replays: ClassVar[bool] = False

    def __init__(self, *args: Any, **options: Any):
        with self.constructing():
            super().__init__(*args, **options)

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Make TRL's constructor, inside the `with`, build a generation that sends adapters.

        Raises:
            RuntimeError: TRL has other functions.
        """
        module = module_with(type(self), BUILDER)
        check_functions(SYNC)
        with temporarily_replaced(module, BUILDER, functools.partial(self._generation, vars(module)[BUILDER])):
            yield
        if every_experts(self.model) and not is_patched(self.model):
            patch_model(self.model)

    def _generation(self, base: type, *args: Any, **options: Any) -> Any:
        """Make our generation, in place of TRL's VLLMGeneration."""
        replay = self.replays and self.serving.replay and bool(every_experts(self.model))
        own = type(base.__name__, (AdapterGeneration, base), {})
        return own(*args, serving=self.serving, output_dir=self.args.output_dir, replay=replay, **options)


class ReplaysRouting(SendsAdapters):
    """TRL's GRPOTrainer, or a subclass of it: the policy uses, in every training call, the experts that sampled.

    Without vLLM, those that it chooses itself before the first update of a batch.
    """

    replays = True

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Do as SendsAdapters, and begin without a rollout: here and not in an __init__, since autopatch's
        `Session.make_grpo` constructs trainers without ours."""
        check_replay_functions(type(self))
        self._rollout: Rollout | None = None  # until its batch is scored
        self._aligned: torch.Tensor | None = None
        self._num_rollouts = 0
        with super().constructing():
            yield
        cut = [name for name, unused in UNTRUNCATED.items() if getattr(self, name) not in unused]
        if self.use_vllm and cut:
            logger.warning(TRUNCATED.format(names=", ".join(cut)))

    @property
    def _is_replayed(self) -> bool:
        return self.serving.replay and is_patched(self.model) and bool(every_experts(self.model))

    def _generate(self, prompts):
        """Generate, and pair the final sequences with their experts."""
        if self.use_vllm:
            self.vllm_generation.sequences.clear()
        generated = super()._generate(prompts)
        if not self._is_replayed:
            return generated
        prompt_ids, completion_ids = generated[:2]
        fields = next(each for each in generated[2:] if isinstance(each, dict))  # of a rollout_func
        experts = fields.pop("routed_experts", None)
        if experts is None and self.use_vllm:
            sequences = self.vllm_generation.sequences
            experts = [sequences.experts_of([*prompt, *own]) for prompt, own in zip(prompt_ids, completion_ids)]
            sequences.clear()
        if experts is not None:
            self._rollout = Rollout(list(map(len, prompt_ids)), list(map(len, completion_ids)), experts)
        return generated

    def _generate_and_score_completions(self, inputs):
        """Score completions with their experts, and hand these out beside them."""
        self._rollout = self._aligned = None
        batch = super()._generate_and_score_completions(inputs)
        rollout, self._rollout = self._rollout, None
        if not self._is_replayed and not self.use_vllm:
            return batch
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        width = batch["completion_ids"].shape[1]
        divergence = float("nan")
        if rollout is not None:
            mask = rollout.mask(ids.shape[1], width).to(ids.device)
            batch[ROUTING] = self._aligned if self._aligned is not None else rollout.aligned(ids.shape[1], width)
            divergence = self._divergence(batch[ROUTING], ids, mask)
        elif self._is_replayed:
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            batch[ROUTING] = self._recorded(ids, mask)
        self._aligned = None
        if self.use_vllm or rollout is not None:
            self._log_serving(batch, divergence)
        return batch

    def _rows(self) -> int:
        """Count the sequences in a call that scores."""
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    def _recorded(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Gather the policy's own experts [B, S, L, K]."""
        pieces, rows = [], self._rows()
        for some_ids, some_mask in zip(ids.split(rows), mask.split(rows)):
            with torch.no_grad(), self.accelerator.autocast(), record_routing(self.model) as routing:
                self.model(input_ids=some_ids, attention_mask=some_mask, logits_to_keep=1)
            index_LTK = routing.tensors()[0].to("cpu", DTYPE)
            pieces.append(index_LTK.unflatten(1, some_ids.shape).permute(1, 2, 0, 3))
        return torch.cat(pieces)

    def _divergence(self, experts_BSLK: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> float:
        """Compute the share of tokens whose experts the policy would not have chosen, or nan between measurements."""
        every, number = self.serving.divergence_every, self._num_rollouts
        self._num_rollouts += 1
        if not every or number % every:
            return float("nan")
        rows, shares = self._rows(), list[float]()
        for call, some_ids, some_mask in zip(as_calls(experts_BSLK, rows), ids.split(rows), mask.split(rows)):
            with self.accelerator.autocast():
                of_layers = serving_divergence(
                    self.model, call, input_ids=some_ids, attention_mask=some_mask, logits_to_keep=1
                )
            shares += of_layers.values()
        return torch.tensor(shares, dtype=torch.float64, device="cpu").nanmean().item()

    def _log_serving(self, batch: dict[str, Any], divergence: float) -> None:
        """Log how far server and trainer are apart, over all ranks: k3's estimate of KL(server || trainer), the largest
        difference of a log-probability, and the share of tokens with other experts."""
        old, sampled = batch.get("old_per_token_logps"), batch.get("sampling_per_token_logps")
        kl = gap = float("nan")
        if old is not None and sampled is not None:
            mask = batch["completion_mask"].bool() & ~sampled.isnan()
            if "tool_mask" in batch:
                mask &= batch["tool_mask"].bool()
            log_ratio = (old - sampled)[mask].double()
            if len(log_ratio):
                kl, gap = (log_ratio.exp() - 1 - log_ratio).mean().item(), log_ratio.abs().max().item()
        seconds = self.vllm_generation.sync_seconds if self.use_vllm else float("nan")
        values = torch.tensor([kl, divergence, seconds, gap], dtype=torch.float64, device=self.accelerator.device)
        every = self.accelerator.gather(values).view(-1, len(values))
        means, largest = every.nanmean(0).tolist(), every[:, 3].nan_to_num(nan=-1.0).max().item()
        log = self._metrics["train" if self.model.training else "eval"]
        metrics = {"kl": means[0], "divergence": means[1], "sync_seconds": means[2], "largest_gap": largest}
        for name, value in metrics.items():
            if value == value and value >= 0:
                log[f"serving/{name}"].append(value)

    def _get_per_token_logps_and_entropies(self, model, *args: Any, **options: Any):
        """Compute log-probabilities, while a rollout is scored with its experts; another reference model chooses its
        own."""
        method = super()._get_per_token_logps_and_entropies
        if self._rollout is None or model is not self.model:
            return method(model, *args, **options)
        given = dict(zip(SCORING_ARGUMENTS, args)) | options
        ids = given["input_ids"]
        if self._aligned is None:
            self._aligned = self._rollout.aligned(ids.shape[1], given["logits_to_keep"])
        rows = len(ids) if self._is_one_call() else given.get("batch_size") or len(ids)
        with replay_routing(self.model, as_calls(self._aligned, rows)):
            return method(model, *args, **options)

    def _is_one_call(self) -> bool:
        """Tell whether TRL calls the model once whatever the batch size, as 1.14 does with Liger."""
        return hasattr(self, "_chunked_logps") and bool(getattr(self, "use_liger_kernel", False))

    def compute_loss(self, model, inputs, *args: Any, **options: Any):
        """Compute the loss with the experts of the rollout."""
        replay: Any = nullcontext()
        if ROUTING in inputs:
            replay = replay_routing(self.model, as_calls(inputs[ROUTING], len(inputs[ROUTING])))
        with replay:
            return super().compute_loss(model, inputs, *args, **options)
