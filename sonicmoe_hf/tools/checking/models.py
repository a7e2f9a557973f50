"""Models as Transformers loads them, adapters on them as PEFT does, and the log-probabilities that they give."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...adapters.adapter import is_in_pefts_form
from ...adapters.convert import convert_adapter
from ...checkpoints.reading.config_only import build_from_config
from ...checkpoints.reading.files import ADAPTER_CONFIG, CONFIG_FILE, read_config
from ...errors import CheckpointError
from ...formats.declared import QUANT_METHOD
from ...layer.experts_module import is_experts
from ...model_patches import NATIVE_PREFIX
from ...models.loading import from_pretrained
from ...private.transformers import auto_class_of
from ...registration import install_in_peft
from .texts import Text

Biases = list[tuple[torch.nn.Parameter, torch.Tensor]]  # parameters that an adapter changes, with the base's values
BATCH_SIZE = 8  # texts of a forward


class TokenScores(NamedTuple):
    """Scores [T] of a text's tokens, on the CPU. beside_likeliest: log_p less that of the likeliest token."""

    log_p: torch.Tensor
    beside_likeliest: torch.Tensor


Scores = dict[Text, TokenScores]


class Loading(NamedTuple):
    """Options of loading models. dtype: a name, or "auto" for the checkpoint's. experts_memory, experts_quantization: as
    sonicmoe_hf.from_pretrained takes them; without either, Transformers and PEFT compute."""

    dtype: str = "auto"
    experts_memory: str | None = None
    experts_quantization: str | None = None

    def model(self, folder: Path) -> PreTrainedModel:
        """Load the model in `folder`, onto the GPUs where there are any."""
        options: dict[str, Any] = {"dtype": self.dtype}
        declared = read_config(folder).get("quantization_config") or {}
        is_packed_here = declared.get("quant_method") == QUANT_METHOD
        if torch.cuda.is_available() and self.experts_memory is None:
            options["device_map"] = "auto"
        if is_packed_here or self.experts_memory or self.experts_quantization:
            options["experts_memory"] = self.experts_memory
            return from_pretrained(folder, experts_quantization=self.experts_quantization, **options).eval()
        auto_class = auto_class_of(AutoConfig.from_pretrained(folder)) or AutoModelForCausalLM
        model = auto_class.from_pretrained(folder, **options).eval()
        parameters = list(model.parameters())
        if self.dtype == "float32" and all(parameter.dtype.itemsize > 1 for parameter in parameters):
            for parameter in parameters:  # Transformers leaves what was not quantized in the files' dtype
                parameter.data = parameter.data.float()
        return model


@torch.no_grad()
def scores_of(
    model: Any, texts: Iterable[Text], place: str, say: Callable[[str], None] = lambda sentence: None
) -> Scores:
    """Compute the scores of each text's tokens from its `start` on. say: called before each forward.

    Raises:
        CheckpointError: the model of `place` has no such token, or its scores are not finite.
    """
    by_length: dict[int, list[Text]] = collections.defaultdict(list)
    last = len(model.get_input_embeddings().weight) - 1
    for text in texts:
        if max(text.ids) > last:
            raise CheckpointError(
                f"{place} ends at token {last} and the texts have {max(text.ids)}: another vocabulary"
            )
        by_length[len(text.ids)].append(text)
    scores: Scores = {}
    groups = by_length.values()  # of one length each, so that none is padded
    num_texts = sum(map(len, groups))
    batches = (group[first : first + BATCH_SIZE] for group in groups for first in range(0, len(group), BATCH_SIZE))
    for batch in batches:
        say(f"computing the texts with {place}, {len(scores)} of {num_texts}")
        ids = torch.tensor([text.ids for text in batch], dtype=torch.int64, device=model.device)
        all_logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
        if all_logits is None or all_logits.shape[:-1] != ids.shape or all_logits.shape[-1] <= last:
            raise CheckpointError(
                f"{place} is a {type(model).__name__}, which gives no probabilities of tokens; check compares language "
                "models"
            )
        for text, row, logits in zip(batch, ids, all_logits):
            expected = logits[text.start - 1 : -1].float().log_softmax(-1)
            log_p = expected.gather(-1, row[text.start :, None].to(expected.device))[:, 0]
            scores[text] = TokenScores(log_p.double().cpu(), (log_p - expected.amax(-1)).double().cpu())
            if not all(vector.isfinite().all() for vector in scores[text]):
                raise CheckpointError(f"{place} gives log-probabilities that are not finite, in {model.dtype}")
    return scores


@contextmanager
def rounded(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Change each module's output at random by as much as rounding in `dtype` may, inside the block.

    Rounding a weight changes a product by the same relative error as rounding the product, so this stands for both.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: Any, arguments: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        error = 2 * torch.rand(output.shape, generator=generator, dtype=torch.float32, device=device) - 1
        return (output.float() * (1 + error * (torch.finfo(dtype).eps / 2))).to(output.dtype)

    leaves = [module for module in model.modules() if not any(module.children()) or is_experts(module)]
    hooks = [module.register_forward_hook(move) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Read the dtype of a checkpoint's weights; None where they are packed."""
    config = read_config(folder)
    text = config.get("text_config") or {}
    if config.get("quantization_config") or text.get("quantization_config"):
        return None
    name = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "float32")
    return getattr(torch, str(name))


@contextmanager
def adapted(model: PreTrainedModel, base: Path, adapter: Path, new: Path) -> Iterator[tuple[Any, Biases]]:
    """Put an adapter of any form on the model inside the block, by PEFT; yields PEFT's model, and the biases that it
    changes.

    base: the model's folder. new: a folder in which an adapter that PEFT would misread is written anew.

    Raises:
        CheckpointError: it cannot be read as an adapter of this model.
    """
    import peft
    from peft.utils import ModulesToSaveWrapper

    install_in_peft()  # so that the adapter's base is compared with this one
    config = read_config(base)
    if not is_in_pefts_form(adapter, build_from_config(config, base / CONFIG_FILE)):
        layout = "native" if str(config["model_type"]).startswith(NATIVE_PREFIX) else "hub"
        adapter = convert_adapter(adapter, new, layout, trained_on=base)
    biases = {n: (p, p.data.clone()) for n, p in model.named_parameters() if n.rpartition(".")[2] == "bias"}
    try:
        wrapped = peft.PeftModel.from_pretrained(model, adapter)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"PEFT cannot load {adapter / ADAPTER_CONFIG}: {error}") from error
    wrappers = {n: module for n, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    try:
        yield wrapped.eval(), [(p, base_values) for p, base_values in biases.values() if not p.data.equal(base_values)]
    finally:
        for bias, base_values in biases.values():  # PEFT has written an adapter's biases into the base itself
            bias.data = base_values
        wrapped.unload()  # type: ignore[operator]
        for name, wrapper in wrappers.items():  # unload() leaves modules_to_save trained
            model.set_submodule(name, wrapper.original_module)
