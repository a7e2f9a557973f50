"""vLLM's own code reads the adapters that `convert --layout vllm` writes; what it loads is PEFT's merge in memory.

    python tests/lora/read_by_vllm.py

makes an environment in a temporary folder, with vLLM's wheel and what its LoRA modules import beside the packages of this
Python, and runs there on the CPU. Not a test of the suite: the wheel is 340 MB.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

VLLM = "vllm==0.33.0"
IMPORTED = (  # by vllm.lora, besides what Transformers, PEFT and the tests need
    "aiohttp", "aiosignal", "aiohappyeyeballs", "frozenlist", "multidict", "propcache", "yarl", "cachetools", "cbor2",
    "cloudpickle", "fastapi", "starlette", "llguidance", "msgspec", "openai", "openai-harmony", "opentelemetry-api",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions", "partial-json-parser", "prometheus-client", "pybase64",
    "sniffio", "uvloop", "xgrammar",
)  # fmt: skip
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
    from helpers.checkpoints import FAMILIES, tensors_in
    from helpers.models import ORDER_OF_SUMS, assert_all_close
    from helpers.served import OTHERS, UNEVEN, adapt, base, merged_by_peft

    from sonicmoe_hf import convert_adapter

    for name in (*FAMILIES, *OTHERS):
        for title, options in (("one rank", {}), ("patterns and rsLoRA", UNEVEN)):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                adapted = adapt(base(name, folder / "base"), name, folder / "adapter", **options)
                convert_adapter(folder / "adapter", folder / "served", "vllm")
                weights = tensors_in(folder / "base")
                loras = loaded(folder / "served")
                merged = merged_by_vllm(weights, loras, name)
                assert_all_close(merged, merged_by_peft(adapted, folder / "by peft"), 1e-5, ORDER_OF_SUMS)
                print(f"{name}, {title}: {len(loras)} modules read by vLLM, equal to PEFT's merge", flush=True)


def loaded(folder: Path) -> dict:
    """By module, what vLLM holds of an adapter, scales multiplied into B, and stacked for models that it holds as 3D."""
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
        modules = {parse_fine_tuned_lora_name(name)[0] for name in file.keys()}  # noqa: SIM118
    expected = {
        module[module.find(".experts") + 1 :] if ".experts" in module else module.rpartition(".")[2]
        for module in modules
    }
    model = lora_model.LoRAModel.from_local_checkpoint(str(folder), expected, helper, lora_model_id=1, device="cpu")
    assert set(model.loras) == modules
    for lora in model.loras.values():
        lora.optimize()
    for module in sorted(modules):
        if module.endswith(".experts"):
            _stack(LoRAModelManager, model, module, model.loras[module].lora_a.shape[0] // helper.r)
    return model.loras


def _stack(manager_class, model, module: str, num_experts: int) -> None:
    """What vLLM's manager does with the factors of all experts, all of which are on this rank."""
    rows = SimpleNamespace(shape=(1, num_experts))
    layer = SimpleNamespace(w13_lora_a_stacked=[rows], global_num_experts=num_experts, ep_rank=0)
    manager = SimpleNamespace(_is_3d_moe_model=True, _get_lora_layer_weights=lambda model, name: model.get_lora(name))
    manager_class._stack_moe_lora_weights(manager, model, layer, module)


def merged_by_vllm(weights: dict, loras: dict, name: str) -> dict:
    """The hub's tensors with B A added, each where the module's name in vLLM says."""
    merged = dict(weights)
    for module, lora in loras.items():
        if not isinstance(lora.lora_a, list):
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + lora.lora_b @ lora.lora_a
            continue
        for parameter, a, b in zip(("gate_up_proj", "down_proj"), lora.lora_a, lora.lora_b):
            product = b @ a
            product = product.transpose(1, 2) if name == "gpt_oss" else product
            merged[f"{module}.{parameter}"] = merged[f"{module}.{parameter}"] + product
    return merged


if __name__ == "__main__":
    if sys.argv[1:] == ["--read"]:
        read_every_model()
    else:
        sys.exit(run_in_an_environment_of_its_own())
