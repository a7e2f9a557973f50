"""Few tokens over experts in host memory: kernels read the pinned bytes themselves, and nothing is copied."""

import gc
import itertools

import pytest
import torch
from helpers.marks import rest_pinned, rest_slow
from helpers.models import batch, loss_and_gradients
from helpers.streamed import add_adapter, build_streamed, copies_of, host_weights

from sonicmoe_hf import moe_experts, patch_model
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.fetching import ROWS_OVER_THE_BUS
from sonicmoe_hf.streaming.placement import expert_layers
from sonicmoe_hf.streaming.weight import HostWeight

LAYERS, EXPERTS, TOP_K = 4, 8, 2
FEW = int(ROWS_OVER_THE_BUS * EXPERTS / TOP_K)  # tokens


def made(experts_memory=0, format="nf4", family="qwen3_moe"):
    return build_streamed(experts_memory, format, family, layers=LAYERS).eval()


def work(model):
    """List the work done so far, "copy" or "over the bus", for each of the layers' weights; then forget it."""
    log = copies_of(model).log
    works = [key for key, _ in itertools.groupby(log) if key[0] != "read"]  # a weight is read once, and seen twice
    log.clear()
    return [kind for kind, *_ in works]


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.arange(tokens)[None] % 32, use_cache=False).logits


@pytest.mark.parametrize(
    "family,format",
    rest_slow([("qwen3_moe", "nf4"), *((family, each) for family in ("qwen3_moe", "gpt_oss") for each in FORMATS)]),
)
def test_few_tokens_read_every_format_over_the_bus(late_copies, family, format):
    model, resident = made(0, format, family), made(None, format, family)
    for tokens in (1, FEW):
        assert torch.equal(logits(model, tokens), logits(resident, tokens))
        assert work(model) == ["over the bus"] * (2 * LAYERS)


def test_one_token_more_is_copied(late_copies):
    model = made()
    logits(model, FEW + 1)
    assert set(work(model)) == {"copy"}


@pytest.mark.parametrize("format, compute", [(None, None), ("fp8", "fp8")], ids=["dense", "FP8 products"])
def test_what_kernels_load_by_tma_is_copied(late_copies, format, compute):
    model, resident = made(0, format), made(None, format)
    for each in (model, resident):
        patch_model(each, experts_compute=compute)
    assert torch.equal(logits(model, 1), logits(resident, 1))
    assert set(work(model)) == {"copy"}


@pytest.mark.pinned
@pytest.mark.parametrize("experts_memory", [0, 30_000], ids=["all", "half"])
def test_generation_copies_for_the_prompt_and_not_for_its_tokens(late_copies, experts_memory):
    model, resident = made(experts_memory), made(None)
    prompt = {key: value for key, value in batch(1, 9).items() if key != "labels"}
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for _ in range(2):
        given, expected = model.generate(**prompt, **options), resident.generate(**prompt, **options)
        assert torch.equal(given.sequences, expected.sequences)
        assert all(torch.equal(*pair) for pair in zip(given.logits, expected.logits))
        assert given.past_key_values is not None, "a cache, so that a step has one token"
        kinds, streamed = work(model), len(host_weights(model))
        assert kinds[: kinds.index("over the bus")] == ["copy"] * kinds.count("copy")
        assert kinds.count("over the bus") == 4 * streamed, "the prompt gives the first of five tokens"


@pytest.mark.parametrize("checkpointing", rest_pinned([False, True, None]), ids=["recomputed", "reentrant", "kept"])
def test_steps_of_few_and_of_many_tokens_have_the_resident_gradients(late_copies, checkpointing):
    model, resident = (add_adapter(made(memory), checkpointing).train() for memory in (0, None))
    for tokens in (FEW, 16, FEW):
        inputs = batch(1, tokens)
        given, expected = loss_and_gradients(model, inputs), loss_and_gradients(resident, inputs)
        assert all(torch.equal(given[name], expected[name]) for name in expected)
        assert ("copy" in work(model)) == (tokens > FEW)


def test_where_the_driver_maps_nothing_few_tokens_are_copied(late_copies, monkeypatch):
    monkeypatch.setattr(late_copies, "map", lambda self, host: None)
    model = made()
    assert torch.equal(logits(model, 1), logits(made(None), 1))
    assert set(work(model)) == {"copy"}


def test_weights_that_are_loaded_anew_are_those_read(late_copies):
    model, other = made(), made(None)
    for _, experts in expert_layers(other):
        experts.down_proj.codes.bitwise_xor_(1)
    before = logits(model, 1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(logits(model, 1), logits(other, 1)) and not torch.equal(logits(model, 1), before)


@pytest.mark.parametrize("tokens", [1, 16], ids=["over the bus", "copied"])
def test_host_memory_is_not_written_while_the_device_reads_it(late_copies, tokens):
    model = made()
    weight = next(each for each in model.parameters() if isinstance(each, HostWeight))
    logits(model, tokens)
    with weight.layer.fetch():
        pass  # the next layer's copy is under way
    engine = copies_of(model)
    assert engine.queue and bool(engine.reading) == (tokens == 1)
    weight.copy_(weight.resident())
    assert not engine.queue and not engine.reading


def test_memory_is_not_unpinned_while_it_is_read(late_copies):
    model = made()
    logits(model, 1)
    engine = copies_of(model)
    assert engine.reading
    del model
    gc.collect()
    assert not engine.pinned, "a Hazard in a finaliser would leave it"


def test_the_op_takes_few_tokens_under_torch_compile(late_copies):
    model, resident = made(), made(None)
    (_, experts), (_, expected) = expert_layers(model)[1], expert_layers(resident)[1]
    x, index, weights = torch.randn(2, 64), torch.randint(8, (2, TOP_K)), torch.rand(2, TOP_K)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(gate_up, down):
        return moe_experts(x, gate_up, down, (index, weights))

    given = run(experts.gate_up_proj, experts.down_proj)
    assert torch.equal(given, moe_experts(x, expected.gate_up_proj, expected.down_proj, (index, weights)))
    assert work(model) == ["over the bus"] * 2
