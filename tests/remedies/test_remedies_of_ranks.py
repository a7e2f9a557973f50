"""Messages about models that two gloo ranks share: each is raised on both, and then what it names is done."""

import pytest
import torch
from helpers.adapters import EXPERTS, random_factors
from helpers.checkpoints import fp8_of, make, to_fp8
from helpers.integers import to_integers
from helpers.models import assert_all_close, batch, build, logits_of
from helpers.parallel import PARTIAL_SUMS, gather
from helpers.ranks import WORLD
from helpers.said import KINDS, says
from helpers.training import POLICY, callback_in_first_step
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing
from sonicmoe_hf.formats.dense_conversion import dense_shard
from sonicmoe_hf.formats.float_matrices import FP8Matrix
from sonicmoe_hf.layer.holding import has_expert_parallelism
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing import calls
from sonicmoe_hf.routing.hooks import hook_of

pytestmark = [
    pytest.mark.pinned,
    pytest.mark.skipif(not has_expert_parallelism(), reason="Transformers takes it since 5.23"),
]
OF_128 = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
SHARED, APART = {"tp_size": WORLD, "ep_size": WORLD}, {"fsdp_size": WORLD, "ep_size": WORLD}
OURS, THEIRS = {"ep_implementation": "sonicmoe_hf"}, {"ep_implementation": "all_to_all"}
WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": fully_shard}


def load(folder, sizes=None, wrapper=None, **options):
    if sizes is not None:
        options["distributed_config"] = DistributedConfig(**sizes)
    model = sonicmoe_hf.from_pretrained(folder, dtype=torch.float32, **options)
    return model if wrapper is None else WRAPPERS[wrapper](model)


def logits_or_messages(rank, loads):
    """Compute the logits of each model, or what loading it says."""
    found = []
    for folder, options in loads:
        try:
            found.append(gather(logits_of(load(folder, **options))))
        except KINDS as error:
            found.append(str(error))
    return found


PACKED = {name: {"experts_quantization": name} for name in ("nf4", "fp8", "int4")}
LOADS = {  # message: (a checkpoint and how it is loaded), and those that it names
    "split them by expert parallelism (ep_size, load the model with DistributedConfig(ep_implementation=": (
        ("hub", PACKED["nf4"] | {"sizes": {"fsdp_size": WORLD}}),
        [("hub", PACKED["nf4"] | {"sizes": APART | OURS})],
    ),
    "or load the model without it, and replicate them by DDP, or shard them with FSDP2 (fully_shard": (
        ("hub", PACKED["nf4"] | {"sizes": {"fsdp_size": WORLD}}),
        [("hub", PACKED["nf4"] | {"wrapper": wrapper}) for wrapper in WRAPPERS],
    ),
    "convert the checkpoint first (sonicmoe-hf convert SRC DST --layout native --quantize FORMAT) or, unless they are": (
        ("fp8", PACKED["fp8"] | {"sizes": SHARED | OURS}),
        [("native", {"sizes": SHARED | OURS}), ("fp8", PACKED["fp8"] | {"sizes": APART | OURS})],
    ),
    "which cannot be cut; leave out distributed_config, or load it once on one rank and save_pretrained it": (
        ("int4", PACKED["int4"] | {"sizes": APART | OURS}),
        [("int4", PACKED["int4"]), ("saved", {"sizes": APART | OURS})],
    ),
}


def test_models_are_loaded_as_the_messages_say(ranks, tmp_path):
    for name in ("hub", "fp8", "int4"):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "of", "qwen3_moe", dtype=torch.float32, **OF_128)
    folders = {name: tmp_path / name / "of" for name in ("hub", "fp8", "int4", "saved", "native")}
    to_fp8(folders["fp8"])
    to_integers(folders["int4"], "gptq-asym")
    sonicmoe_hf.convert_checkpoint(folders["fp8"], folders["native"], layout="native", quantize="fp8")
    load(folders["int4"], **PACKED["int4"]).save_pretrained(folders["saved"])
    loads = [each for refused, done in LOADS.values() for each in (refused, *done)]
    results = ranks.run(logits_or_messages, [(str(folders[name]), options) for name, options in loads])
    for found in results:
        for words, (_, done) in LOADS.items():
            assert words in found.pop(0)
            for name, options in done:
                alone = (
                    ("int4", PACKED["int4"])
                    if name == "saved"
                    else (name, {**options, "sizes": None, "wrapper": None})
                )
                expected = logits_of(load(folders[alone[0]], **alone[1]))
                assert_all_close({"logits": found.pop(0)}, {"logits": expected}, 1e-5, f"{words}: {PARTIAL_SUMS}")


ADAPTED = {  # message: family, how it is loaded, the adapters that get it, and how others are loaded
    "leave down_proj_bias out of target_parameters": (
        "gpt_oss",
        (APART | OURS, {"targets": ["mlp.experts.down_proj_bias"]}),
        [(APART | OURS, {})],
    ),
    "or shard it by FSDP, or adapt no experts: target_parameters=[]": (
        "qwen3_moe",
        (APART | THEIRS, {}),
        [
            (APART | OURS, {}),
            ({"fsdp_size": WORLD}, {}),
            (APART | THEIRS, {"target_modules": ["q_proj"], "targets": []}),
        ],
    ),
}


def losses_or_messages(rank, folder, adapters):
    """Compute the loss of each model with adapters, or what it says of them."""
    found = []
    for sizes, options in adapters:
        try:
            found.append(gather(adapted(folder, sizes, **options)(**batch()).loss))
        except KINDS as error:
            found.append(str(error))
    return found


def adapted(folder, sizes=None, targets=EXPERTS, **options):
    config = LoraConfig(r=3, lora_alpha=6, target_parameters=targets, **options)
    return random_factors(get_peft_model(load(folder, sizes).train(), config))


@pytest.mark.parametrize("words", ADAPTED)
def test_adapters_of_ranks_are_those_that_the_messages_name(words, ranks, tmp_path):
    family, refused, done = ADAPTED[words]
    build(family, num_hidden_layers=1).save_pretrained(tmp_path)
    expected = [adapted(tmp_path, **options)(**batch()).loss.detach() for _, options in done]
    for message, *found in ranks.run(losses_or_messages, str(tmp_path), [refused, *done]):
        assert words in message
        for loss, whole in zip(found, expected, strict=True):
            assert_all_close({"loss": loss}, {"loss": whole}, 1e-5, PARTIAL_SUMS)


def rounded(model):
    sonicmoe_hf.set_routing(model, POLICY)


def balanced(model):
    LoadBalancing(0.1).start(model)


ASKED = {
    "no token rounding in model.layers.0.mlp: token rounding does not work under expert parallelism": rounded,
    "it does not work under Transformers' own expert parallelism": balanced,
    "nothing is counted under expert parallelism of Transformers' own, whose ranks may share their tokens": callback_in_first_step,
}


def losses_and_messages(rank, folder, implementation):
    """Ask for each of ASKED; list the messages, and a loss after it."""
    found = []
    for ask in ASKED.values():
        model = load(folder, APART | implementation).train()
        with says() as said:
            ask(model)
        found.append((" ".join(said), gather(model(**batch()).loss.detach())))
    return found


def test_rounding_balance_and_counts_work_under_the_parallelism_that_the_messages_name(ranks, tmp_path):
    build("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    remedy = 'load the model with DistributedConfig(ep_implementation="sonicmoe_hf")'
    for found in ranks.run(losses_and_messages, str(tmp_path), THEIRS):
        assert all(words in said and remedy in said for words, (said, _) in zip(ASKED, found, strict=True))
    expected = []
    for ask in ASKED.values():
        ask(model := load(tmp_path).train())
        expected.append(model(**batch()).loss.detach())
    for found in ranks.run(losses_and_messages, str(tmp_path), OURS):
        for (said, loss), whole in zip(found, expected, strict=True):
            assert remedy not in said
            assert_all_close({"loss": loss}, {"loss": whole}, 1e-5, PARTIAL_SUMS)


def tokens(count):
    generator = torch.Generator().manual_seed(count)
    x, scores = torch.randn(count, 32, generator=generator), torch.rand(count, 8, generator=generator)
    return x, scores.topk(2).indices, torch.rand(count, 2, generator=generator)


def outputs_or_message(rank, folder, implementation):
    """Compute the experts' outputs for 8 and then for 9 tokens in one call of a model, or take their message."""
    model = load(folder, APART | implementation)
    experts, hook = next(find_layers(model)).experts, hook_of(model)
    if hook is not None:
        calls.begin(hook, None)
    try:
        return [experts(*tokens(count)).detach() for count in (8, 9)]
    except KINDS as error:
        return str(error)
    finally:
        if hook is not None:
            calls.end(hook)


def test_layers_of_other_numbers_of_tokens_exchange_them_by_all_to_all(ranks, tmp_path):
    model = build("qwen3_moe", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    experts = next(find_layers(model)).experts
    words = 'use ep_implementation="all_to_all" for such a model'
    assert all(words in message for message in ranks.run(outputs_or_message, str(tmp_path), OURS))
    expected = {str(count): experts(*tokens(count)).detach() for count in (8, 9)}
    for found in ranks.run(outputs_or_message, str(tmp_path), THEIRS):
        assert_all_close(dict(zip(("8", "9"), found, strict=True)), expected, 1e-5, PARTIAL_SUMS)


def rows_or_message(rank, dim):
    """Take a rank's shard of a matrix in FP8: (what it is, what it should be), or what is said."""
    mesh, (values, scales, dense) = init_device_mesh("cpu", (WORLD,)), fp8_of(torch.randn(257, 130), "fp32")
    values, scales, wanted, parameter = (  # gloo sends no FP8; all ranks have the whole
        distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
        for tensor in (values, scales, dense, torch.empty_like(dense))
    )
    try:
        return dense_shard(FP8Matrix(), values.to_local(), scales.to_local(), parameter), wanted.to_local()
    except KINDS as error:
        return str(error)


def test_linear_layers_in_fp8_are_cut_by_rows(ranks):
    assert all("shard by fsdp_size alone" in message for message in ranks.run(rows_or_message, 1))
    assert all(torch.equal(found, wanted) for found, wanted in ranks.run(rows_or_message, 0))
