"""Changes that importing sonicmoe_hf makes in other packages: none for models that are not ours, and all can be
undone."""

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import batch, build
from helpers.streamed import build_small
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import AutoConfig, PreTrainedModel, Trainer, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import sonicmoe_hf
from sonicmoe_hf import patch, patch_model, quantize_experts, registration, unpatch
from sonicmoe_hf.private.replaced import REPLACED, RUN
from sonicmoe_hf.private.transformers import loaded_one_by_one
from sonicmoe_hf.tools.autopatch import session as autopatch
from sonicmoe_hf.tools.autopatch.program import SITE
from sonicmoe_hf.tools.autopatch.settings import RUN_VARIABLE, RunSettings

PACKAGE = Path(sonicmoe_hf.__file__).parent


@pytest.fixture
def replaced(monkeypatch):
    """List all functions of other packages in whose place ours are: most are replaced when something needs it."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    sys.modules["deepspeed"].initialize = lambda args, model: None
    patch()
    patch_model(quantize_experts(build_small(), "nf4"), "token_rounding")
    with loaded_one_by_one(lambda *_: None):
        registration.install_in_peft()
    yield list(REPLACED)
    unpatch()
    registration.uninstall()
    registration.install()


@pytest.fixture
def uninstalled(replaced):
    registration.uninstall()


class Experts(nn.Module):
    """A user's own: one parameter of three dimensions, read as PEFT's tests of ParamWrapper read theirs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(60.0).reshape(3, 4, 5) / 60)

    def forward(self, x):
        return torch.einsum("ti,eio->teo", x, self.weight)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return self.experts(x).sum()


def adapted_plain():
    torch.manual_seed(0)
    model = get_peft_model(Plain(), LoraConfig(r=2, target_parameters=["experts.weight"], init_lora_weights=False))
    return model, model(torch.ones(2, 4))


def adapted_eager():
    """Compute experts of the interface that another implementation computes."""
    model = with_lora(build("qwen3_moe", implementation="eager"))
    return model, model(**batch()).logits.square().sum()


@pytest.mark.parametrize("make", [adapted_plain, adapted_eager])
def test_peft_computes_models_that_are_not_ours_as_without_us(make):
    def results():
        model, loss = make()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        names = [name for name, _ in model.named_parameters()]
        return {"loss": loss.detach(), **gradients}, names

    actual, names = results()
    registration.uninstall()
    try:
        expected, names_without = results()
    finally:
        registration.install()
    assert names == names_without and actual.keys() == expected.keys() and len(actual) > 2
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_uninstalling_gives_every_package_back_its_own(replaced, uninstalled):
    for owner, name, original, ours, _ in replaced:
        assert inspect.getattr_static(owner, name) is original is not ours, f"{owner.__name__}.{name}"


def test_every_function_that_is_replaced_stands_in_the_document_on_patching(replaced):
    text = (Path(__file__).parents[2] / "docs" / "patching.md").read_text(encoding="utf-8")
    table = text[text.index("## What importing changes") : text.index("## Limits")]
    assert [name for _, name, *_ in replaced if name not in table] == []


class GRPOTrainer:
    """Stands for TRL's."""

    def __init__(self):
        pass


def test_uninstalling_gives_back_what_sonicmoe_hf_run_has_replaced(monkeypatch):
    spec = importlib.util.spec_from_file_location("site_of_run", SITE / "sitecustomize.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    monkeypatch.setenv(RUN_VARIABLE, RunSettings(adapt_experts=8).as_variable())
    monkeypatch.setattr(autopatch.atexit, "register", lambda function: None)
    monkeypatch.setattr(autopatch, "register_optimizer_step_pre_hook", lambda hook: None)
    owners = [(PreTrainedModel, "post_init"), (PreTrainedModel, "from_pretrained"), (Trainer, "train")]
    owners += [(BaseTuner, "inject_adapter"), (GRPOTrainer, "__init__")]
    site.follow_models(modeling_utils)  # before the package is imported, in a program
    site.session()
    site.follow_grpo(types.SimpleNamespace(GRPOTrainer=GRPOTrainer))
    patch()
    of_run = {(each.owner, each.name): each for each in REPLACED if each.by == RUN}
    assert of_run.keys() == set(owners)
    unpatch()
    assert inspect.getattr_static(PreTrainedModel, "post_init") is of_run[owners[0]].ours, "that of patch is gone"
    registration.uninstall()
    assert not REPLACED and all(inspect.getattr_static(*owner) is of_run[owner].original for owner in owners[:3])
    assert "sonicmoe_hf" not in inspect.getattr_static(BaseTuner, "inject_adapter").__module__
    assert inspect.getattr_static(GRPOTrainer, "__init__").__module__ == __name__
    autopatch.session.cache_clear()
    registration.install()


@pytest.mark.pinned
def test_functions_of_other_packages_are_replaced_by_the_register_alone():
    sources = [path for path in PACKAGE.rglob("*.py") if "kernels" not in path.parts]
    for path in sources:
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        others = [node for node in imports if not getattr(node, "level", 0)]
        names = {(alias.asname or alias.name).partition(".")[0] for node in others for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value)
                is_setting = owner in ("dynamo.config", "collector")  # torch's; Transformers' of recorded outputs
                assert is_setting or owner.partition(".")[0] not in names, (
                    f"{path}:{node.lineno} sets {ast.unparse(node)}"
                )


def test_installing_again_after_uninstalling_changes_the_same(uninstalled):
    registration.install()
    registration.install()
    assert "sonicmoe_hf" in ALL_EXPERTS_FUNCTIONS and "sonicmoe_hf" in AUTO_QUANTIZER_MAPPING
    assert ParamWrapper.forward.__module__ == "sonicmoe_hf.lora.peft_wrapper"
    assert AutoConfig.for_model("sonicmoe_olmoe").model_type == "sonicmoe_olmoe"


LORA = """
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2)


def build(implementation="sonicmoe_hf"):
    config._experts_implementation = implementation
    return Qwen3MoeForCausalLM(config)


def adapt(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))


def check(model):
    # PEFT itself forms W + BA by a parametrization, under which the experts would see it registered
    from torch.nn.utils import parametrize

    (experts,) = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts"]
    seen = []
    experts.register_forward_hook(lambda module, *_: seen.append(parametrize.is_parametrized(module)))
    call(model)
    assert seen == [False], seen


def call(model):
    if hasattr(model, "lm_head"):
        model(input_ids=torch.arange(8)[None])
    else:
        model.mlp(torch.ones(1, 8, 16))


def alone():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config._experts_implementation = "sonicmoe_hf"
    model = torch.nn.Module()
    model.mlp = Qwen3MoeSparseMoeBlock(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model
"""
ORDERS = {
    "PEFT after the model": "import sonicmoe_hf; model = build(); assert 'peft' in sys.modules; check(adapt(model))",
    "PEFT before sonicmoe_hf": "import peft, sonicmoe_hf; check(adapt(build()))",
    "PEFT between": "import sonicmoe_hf, peft; check(adapt(build()))",
    "sonicmoe_hf after the model": "m = build('eager'); import sonicmoe_hf; m.set_experts_implementation('sonicmoe_hf'); check(adapt(m))",
    "sonicmoe_hf after the adapters": "m = adapt(build('eager')); import sonicmoe_hf; sonicmoe_hf.patch_model(m); check(m)",
    "patched": "m = build('eager'); import sonicmoe_hf; sonicmoe_hf.patch_model(m); check(adapt(m))",
    "by the family's patch": "import sonicmoe_hf; sonicmoe_hf.patch(); check(adapt(build(None)))",
    "load_adapter": "import sonicmoe_hf; m = build(); m.load_adapter(sys.argv[1]); m.train(); check(m)",
    "a block alone, PEFT last": "import sonicmoe_hf; check(adapt(alone()))",
    "unpickled": "import sonicmoe_hf; m = torch.load(sys.argv[1] + '/model.pt', weights_only=False); check(adapt(m))",
}


FORKS = """
import importlib, importlib.util, json, os, pathlib, traceback

for name in ("accelerate", "bitsandbytes"):  # what PEFT imports takes longer than PEFT
    if importlib.util.find_spec(name):
        importlib.import_module(name)
assert "peft" not in sys.modules and "sonicmoe_hf" not in sys.modules
for name, code in json.loads(sys.argv[2]).items():  # one after the other, as the first saves what others load
    if not (child := os.fork()):
        try:
            exec(code)
            outcome = "right"
        except BaseException:
            outcome = traceback.format_exc()
        pathlib.Path(sys.argv[1], name).write_text(outcome)
        os._exit(0)
    os.waitpid(child, 0)
"""
SAVE = (
    "import sonicmoe_hf; m = build(); torch.save(m, sys.argv[1] + '/model.pt'); adapt(m).save_pretrained(sys.argv[1])"
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Make a folder with a file for each order. Each runs in a process of its own, forked from one that has imported
    Transformers."""
    folder = tmp_path_factory.mktemp("orders")
    code = [sys.executable, "-c", f"import sys\n{LORA}\n{FORKS}", str(folder), json.dumps({"save": SAVE, **ORDERS})]
    subprocess.run(code, check=True, timeout=300)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_adapters_of_our_experts_form_no_merged_weight_in_whatever_order_things_are_imported(order, outcomes):
    assert (outcomes / order).read_text() == "right"


@pytest.mark.pinned
def test_importing_sonicmoe_hf_imports_no_other_package_than_transformers_models_do_and_hooks_neither_imports_nor_modules():
    code = (
        "import sys, torch, transformers.modeling_utils, transformers.models.auto.modeling_auto\n"
        "packages = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "before, modules = packages(), set(sys.modules)\nimport sonicmoe_hf\nprint(*sorted(packages() - before))\n"
        "assert not {'transformers.trainer', 'deepspeed', 'rich'} & (set(sys.modules) - modules)\n"
        "assert not torch.nn.modules.module._global_module_registration_hooks\n"
        "assert not any(type(finder).__module__.startswith('sonicmoe_hf') for finder in sys.meta_path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and set(done.stdout.split()) <= {"sonicmoe_hf", "tokenizers"}, (
        done.stdout + done.stderr
    )


def test_an_old_peft_is_named_with_the_remedy(uninstalled, monkeypatch):
    monkeypatch.setattr(registration.importlib.metadata, "version", lambda name: "0.17.1")
    with pytest.raises(ImportError, match=r"peft 0\.17\.1 is installed, but sonicmoe_hf works with 0\.20 or newer"):
        registration.install()
    monkeypatch.undo()
    registration.install()
    assert ParamWrapper.forward.__module__ == "sonicmoe_hf.lora.peft_wrapper"
