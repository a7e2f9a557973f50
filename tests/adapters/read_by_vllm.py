"""vLLM's own code reads the adapters that `convert --layout vllm` writes; what it loads is PEFT's merge in memory.

    python tests/adapters/read_by_vllm.py

makes an environment in a temporary folder, with vLLM's wheel and what its LoRA modules import beside the packages of this
Python, and runs there on the CPU. Not a test of the suite: the wheel is 340 MB.

It expects the modules that vLLM's own model classes and mappings name, and builds none of its models: tests/serving does,
which serves 12 families. Of the models whose adapters vLLM takes it does not read DeepSeek-V2, ERNIE 4.5 MoE, EXAONE MoE,
GLM-4.7-Flash, GLM-4.5V, Qwen2-MoE, Qwen3-Next, and Qwen3.5-MoE's text model by itself.
"""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

VLLM = "vllm==0.33.0"
IMPORTED = (  # by vllm.lora, besides what Transformers, PEFT and the tests need
    "aiohttp",
    "aiosignal",
    "aiohappyeyeballs",
    "frozenlist",
    "multidict",
    "propcache",
    "yarl",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors",
    "fastapi",
    "loguru",
    "starlette",
    "llguidance",
    "msgspec",
    "openai",
    "openai-harmony",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "partial-json-parser",
    "prometheus-client",
    "pybase64",
    "sniffio",
    "uvloop",
    "xgrammar",
)
IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
NUM_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # what configs call it
TESTS = Path(__file__).resolve().parents[1]


def run_in_an_environment_of_its_own() -> int:
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = next(Path(folder).glob("lib/python*/site-packages"))
        (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"])
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", VLLM, *IMPORTED], check=True)
        paths = os.pathsep.join(str(path) for path in (TESTS.parent, TESTS))
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        return subprocess.run([python, __file__, "--read"], env=environment).returncode


def read_every_model() -> None:
    from helpers.adapters import adapt
    from helpers.checkpoints import FAMILIES
    from helpers.engine_adapters import FAMILIES_IN_VLLM, OTHERS, UNEVEN, config_for_vllm, save_base
    from helpers.small_families import small_model
    from peft import get_peft_model

    for name in (*FAMILIES, *OTHERS):
        for title, options in (("one rank", {}), ("patterns and rsLoRA", UNEVEN)):
            with tempfile.TemporaryDirectory() as folder:
                adapted = adapt(save_base(name, Path(folder) / "base"), Path(folder) / "adapter", **options)
                read(f"{name}, {title}", adapted, Path(folder))
    for name in FAMILIES_IN_VLLM:
        with tempfile.TemporaryDirectory() as folder:
            model = small_model(name)
            model.save_pretrained(Path(folder) / "base")
            read(name, get_peft_model(model, config_for_vllm(model)), Path(folder))


def read(title: str, adapted, folder: Path) -> None:
    """Convert the adapter and have vLLM read it; compare with PEFT's merge, both under the
    names that vLLM's class has."""
    from helpers.adapters import save_with_factors
    from helpers.checkpoints import tensors_in
    from helpers.engine_adapters import merge_by_peft, split_experts
    from helpers.models import ORDER_OF_SUMS, assert_all_close

    from sonicmoe_hf import convert_adapter

    engine_class = class_of(type(adapted.get_base_model()).__name__)
    mapper = mapper_of(engine_class)
    if not (folder / "adapter").exists():
        save_with_factors(adapted, folder / "adapter")
    convert_adapter(folder / "adapter", folder / "served", "vllm", trained_on=folder / "base")
    weights, expected = tensors_in(folder / "base"), merge_by_peft(adapted, folder / "by peft")
    for tensors in (weights, expected):
        for name in tensors if "GptOss" in type(adapted.get_base_model()).__name__ else ():
            if tensors[name].dim() == 3:  # [E, in, out]
                tensors[name] = tensors[name].transpose(1, 2)
    expected_modules = modules_of(engine_class, adapted.get_base_model().config.get_text_config())
    loras = loaded(folder / "served", mapper, expected_modules)
    fused = any(isinstance(lora.lora_a, list) for lora in loras.values())
    weights, expected = (
        {renamed(name, mapper, fused): tensor for name, tensor in split_experts(tensors).items()}
        for tensors in (weights, expected)
    )
    assert_all_close(merged_by_vllm(weights, loras), expected, 1e-5, ORDER_OF_SUMS)
    print(f"{title}: {len(loras)} modules read by vLLM, equal to PEFT's merge", flush=True)


def class_of(class_name: str):
    """Find vLLM's class of this name."""
    from vllm.model_executor.models import registry

    names = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
    module, name = registry._VLLM_MODELS[names.get(class_name, class_name)]
    module = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    for missing in IMAGES:  # of image processors, which are imported beside the classes and not used
        sys.modules.setdefault(missing, mock.MagicMock())
    return getattr(importlib.import_module(module), name)


def mapper_of(engine_class):
    """Find the mapper by which vLLM's class renames the modules of adapters, or None."""
    mapper = getattr(engine_class, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


def modules_of(engine_class, config) -> set[str]:
    """List the modules on which vLLM's worker expects adapters of the class: its linear layers, by the source of the
    class and of what that imports, and experts by its own mapping. To build the model, a GPU would be needed."""
    source = "".join(map(inspect.getsource, _models_below(sys.modules[engine_class.__module__], set())))
    names = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = \w*(?:Linear|FusedMoE)\w*\(", source))
    packed = dict(getattr(engine_class, "packed_modules_mapping", {}))
    if not getattr(engine_class, "is_3d_moe_weight", False):
        packed["experts"] = [name.rstrip(".") for _, name, *_ in _experts_of(engine_class, config)]
    return {part for name in names for part in packed.get(name, [name])} | ({"experts"} & names)


def _models_below(module, seen: set) -> set:
    """Find the module of a model, and those of models that it takes classes from."""
    if module not in seen and ".models." in module.__name__:
        seen.add(module)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__.startswith(("vllm.model_executor.models.", "vllm.models.")):
                _models_below(sys.modules[value.__module__], seen)
    return seen


def _experts_of(engine_class, config) -> list:
    """Find vLLM's mapping of experts' weights: the one of the model, or of the layer of experts
    under the model's names."""
    from torch import nn
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    module = sys.modules[engine_class.__module__]
    owners = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    for owner in (*engine_class.__mro__, *owners):
        method = vars(owner).get("get_expert_mapping")
        if method is not None and "self.model." not in inspect.getsource(method):  # of the model that it holds
            model = owner.__new__(owner)  # without its layers
            nn.Module.__init__(model)
            model.config, model.has_moe, model.is_fused_shared_expert_enabled = config, True, False
            return model.get_expert_mapping()
    given = re.search(r"ckpt_names=\((.+)\)", "".join(map(inspect.getsource, _models_below(module, set()))))
    names = ast.literal_eval(f"({given[1]})") if given else ("gate_proj", "down_proj", "up_proj")
    count = next(getattr(config, key) for key in NUM_EXPERTS if hasattr(config, key))
    return RoutedExperts.build_expert_params_mapping(*names, num_experts=count, routed_experts_prefix="")


def renamed(name: str, mapper, fused: bool) -> str:
    """Find vLLM's name of the weight `name`, as it renames modules of adapters; fused experts have one for all."""
    module = (
        name.partition(".experts.")[0] + ".experts" if fused and ".experts." in name else name.removesuffix(".weight")
    )
    there = module if mapper is None else mapper.map_name(f"{module}.lora_A.weight").removesuffix(".lora_A.weight")
    return name.replace(module, there, 1)


def loaded(folder: Path, mapper, expected: set[str]) -> dict:
    """Read vLLM's adapter by module, scales multiplied into B, and stacked for models that it holds as 3D."""
    from safetensors import safe_open
    from vllm.config.lora import LoRAConfig
    from vllm.lora import lora_model
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    lora_model.PIN_MEMORY = False  # which needs an accelerator
    helper = PEFTHelper.from_local_dir(str(folder), 4096)
    helper.validate_legal(LoRAConfig(max_lora_rank=8, max_loras=1))
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        modules = {parse_fine_tuned_lora_name(name, mapper)[0] for name in file.keys()}  # noqa: SIM118
    model = lora_model.LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, lora_model_id=1, device="cpu", weights_mapper=mapper
    )
    assert set(model.loras) == modules
    for lora in model.loras.values():
        lora.optimize()
    for module in sorted(modules):
        if module.endswith(".experts"):
            _stack(LoRAModelManager, model, module, model.loras[module].lora_a.shape[0] // helper.r)
    return model.loras


def _stack(manager_class, model, module: str, num_experts: int) -> None:
    """Stack the factors of all experts as vLLM's manager does, all of them on this rank."""
    rows = SimpleNamespace(shape=(1, num_experts))
    layer = SimpleNamespace(w13_lora_a_stacked=[rows], global_num_experts=num_experts, ep_rank=0)
    manager = SimpleNamespace(_is_3d_moe_model=True, _get_lora_layer_weights=lambda model, name: model.get_lora(name))
    manager_class._stack_moe_lora_weights(manager, model, layer, module)


def merged_by_vllm(weights: dict, loras: dict) -> dict:
    """Compute the hub's matrices with B A added, each where the module's name in vLLM says."""
    from helpers.engine_adapters import split_experts

    products = {}
    for module, lora in loras.items():
        if isinstance(lora.lora_a, list):
            for parameter, a, b in zip(("gate_up_proj", "down_proj"), lora.lora_a, lora.lora_b):
                products |= split_experts({f"{module}.{parameter}": b @ a})
        else:
            products[f"{module}.weight"] = lora.lora_b @ lora.lora_a
    assert products.keys() <= weights.keys(), sorted(products.keys() - weights.keys())[:3]
    return {name: weight + products[name] if name in products else weight for name, weight in weights.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["--read"]:
        read_every_model()
    else:
        sys.exit(run_in_an_environment_of_its_own())
