"""Routing that an inference server used: its arrays over padded batches, ids of -1, and how far
it is from the model's."""

import base64
import io
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers.architectures import EXPERTS, HIDDEN, TOKENS, TOP_K, architectures, family_of, layers_of
from helpers.marks import rest_pinned
from helpers.models import CONFIGS, assert_all_close, build_patched, gradients_of, relative_error, with_other_routers
from torch.overrides import TorchFunctionMode

from sonicmoe_hf import RecordedRouting, record_routing, replay_routing, serving_divergence
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing.recorded import with_experts

LENGTHS = (9, 13, 1, 6)
WIDTH = 16
START = 4  # prompt tokens that the server left out, where it did
PADDING = {  # where each sequence begins in its row
    "left": [WIDTH - length for length in LENGTHS],
    "right": [0] * len(LENGTHS),
    "both": [3, 1, 8, 10],
}


OTHER_ROWS = "fp32; products of another number of rows add up in another order"


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]


def served_arrays(server, dtype=numpy.int16, start=0):
    """Make vLLM's arrays: every token but the last, [sequence - 1 - start, layers, K]."""
    arrays = []
    for ids in sequences():
        with torch.no_grad(), record_routing(server) as routing:
            server(input_ids=ids[None])
        arrays.append(routing.tensors()[0].transpose(0, 1)[start:-1].numpy().astype(dtype))
    return arrays


def padded(begins):
    ids, mask = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long), torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
    for row, (begin, sequence) in enumerate(zip(begins, sequences())):
        ids[row, begin : begin + len(sequence)] = sequence
        mask[row, begin : begin + len(sequence)] = 1
    return ids, mask


def weighted_sum(logits):
    """Compute a scalar whose gradient differs from token to token."""
    generator = torch.Generator().manual_seed(5)
    return (logits * torch.randn(logits.shape, generator=generator)).sum()


@pytest.mark.parametrize("start", rest_pinned([START, 0]))
@pytest.mark.parametrize("side", PADDING)
def test_a_padded_batch_computes_every_sequence_with_the_servers_experts(side, start):
    """Beside each sequence alone, unpadded, with the same experts: logits and all gradients. The sequence of one token
    has no row of the server's; with a cut prompt the cut is -1 there too."""
    model = build_patched("qwen3_moe").eval()
    arrays = served_arrays(with_other_routers(model))
    ids, mask = padded(PADDING[side])
    cut = [array[start:] for array in arrays]
    routing = RecordedRouting.from_server(
        [SimpleNamespace(routed_experts=array) for array in cut], mask, prompt_start=start
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with replay_routing(model, routing), record_routing(model) as used:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    sum(weighted_sum(logits[row][mask[row].bool()]) for row in range(len(LENGTHS))).backward()
    found = gradients_of(model)
    model.zero_grad()

    expected_logits, used_LBSK = [], used.tensors()[0].unflatten(1, ids.shape)
    for row, (array, sequence) in enumerate(zip(arrays, sequences())):
        alone_LTK = torch.full((array.shape[1], len(sequence), array.shape[2]), -1)
        alone_LTK[:, start : len(sequence) - 1] = torch.from_numpy(array[start:].astype(int)).transpose(0, 1)
        with replay_routing(model, alone_LTK), record_routing(model) as alone:
            expected_logits.append(model(input_ids=sequence[None]).logits[0])
        weighted_sum(expected_logits[-1]).backward()
        assert torch.equal(used_LBSK[:, row][:, mask[row].bool()], alone.tensors()[0])
        served_LTK = alone.tensors()[0][:, start : len(sequence) - 1].transpose(0, 1)
        assert numpy.array_equal(served_LTK.numpy(), array[start:]), "the server's, where it computed"
    expected = gradients_of(model)
    for row, alone_logits in enumerate(expected_logits):
        assert relative_error(logits[row][mask[row].bool()], alone_logits) < 1e-5, OTHER_ROWS
    assert_all_close(found, expected, 1e-4, OTHER_ROWS)


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.uint16, numpy.int32, numpy.int64])
def test_arrays_of_any_integers_lists_and_tensors_on_the_network_give_the_same(dtype):
    server = with_other_routers(build_patched("qwen3_moe").eval())
    _, mask = padded(PADDING["left"])
    expected = RecordedRouting.from_server(served_arrays(server), mask).tensors()[0]
    arrays = served_arrays(server, dtype)
    from_bytes = [numpy.frombuffer(array.tobytes(), dtype).reshape(array.shape) for array in arrays]
    as_tensors = [torch.from_numpy(array.astype(int)) for array in arrays]
    for given in (arrays, from_bytes, as_tensors):
        found = RecordedRouting.from_server(given, mask.bool())
        assert torch.equal(found.tensors()[0], expected) and found.tensors()[0].dtype == torch.int32
    assert expected.shape == (2, len(LENGTHS) * WIDTH, 2)
    each = [START, 0, 0, 2]
    cut = RecordedRouting.from_server([array[start:] for array, start in zip(arrays, each)], mask, prompt_start=each)
    known_BS = (cut.tensors()[0][0] >= 0).all(-1).unflatten(0, mask.shape)
    assert known_BS.sum(1).tolist() == [max(length - 1 - start, 0) for length, start in zip(LENGTHS, each)]


def with_layers_of_zeros(array):
    """Lay the array out as vLLM and SGLang return it: [.., decoder layers, ..], zeros where a layer has no experts."""
    zeros = numpy.zeros_like(array[:, :1])
    return numpy.concatenate([zeros, array[:, :1], zeros, array[:, 1:]], 1)


def test_layers_without_experts_that_a_server_counts_are_left_out():
    model = build_patched("qwen3_moe").eval()
    _, mask = padded(PADDING["left"])
    arrays = served_arrays(with_other_routers(model))
    arrays[0][0] = -1  # where nothing is known, nothing says that a layer is empty
    expected = RecordedRouting.from_server(arrays, mask).tensors()[0]
    with_dense = [with_layers_of_zeros(array) for array in arrays]
    for layers in (None, [1, 3]):
        assert torch.equal(RecordedRouting.from_server(with_dense, mask, layers=layers).tensors()[0], expected)
    never_written = [numpy.zeros_like(array) for array in arrays]
    for given, layers, place in ((with_dense, [1, 2], 2), (never_written, None, 0)):
        words = rf"sequence 0 names expert 0 twice for position 7 in layer {place}.*in layers=\.\.\."
        with pytest.raises(ValueError, match=words):
            RecordedRouting.from_server(given, mask, layers=layers)
    one_each = [array[..., :1] for array in arrays]
    assert len(RecordedRouting.from_server(one_each, mask).layers) == 2, "of one expert a token nothing tells"


def test_what_vllm_sends_over_http_is_taken_and_other_text_is_an_error():
    """vLLM: .npy in base64 (vllm/utils/serial_utils.py); SGLang: the array's bytes in base64."""
    _, mask = padded(PADDING["left"])
    arrays = served_arrays(with_other_routers(build_patched("qwen3_moe").eval()), numpy.uint8)
    texts = []
    for array in arrays:
        numpy.save(file := io.BytesIO(), array, allow_pickle=False)
        texts.append(base64.b64encode(file.getvalue()).decode())
    expected = RecordedRouting.from_server(arrays, mask.numpy()).tensors()[0]
    for given in (texts, [SimpleNamespace(routed_experts=text) for text in texts]):
        assert torch.equal(RecordedRouting.from_server(given, mask).tensors()[0], expected)
    pickled = io.BytesIO()
    numpy.save(pickled, numpy.array([{}], object), allow_pickle=True)
    archive = base64.b64encode(b"PK\x03\x04" + arrays[1].tobytes()).decode()
    by_pickle = base64.b64encode(pickled.getvalue()).decode()
    for text in (base64.b64encode(arrays[1].tobytes()).decode(), "no base64!", "", archive, texts[1][:40], by_pickle):
        with pytest.raises(ValueError, match="allow_pickle=False" if text is by_pickle else ""):
            RecordedRouting.from_server([texts[0], text, *texts[2:]], mask)


def test_what_does_not_fit_is_refused_with_both_numbers():
    model = build_patched("qwen3_moe").eval()
    ids, mask = padded(PADDING["left"])
    arrays = served_arrays(with_other_routers(model))
    changed = {
        "the routing of sequence 1 has 11 tokens, but there must be 12": [arrays[0], arrays[1][:-1], *arrays[2:]],
        r"there are 3 completions, but attention_mask is \[4, 16\]": arrays[:3],
        r"sequence 2 is object \[\], .* enable_return_routed_experts=True": [*arrays[:2], None, arrays[3]],
        r"sequence 0 is float64 \[8, 2, 2\], but it must be integer": [arrays[0].astype(float), *arrays[1:]],
        "sequence 0 names expert 4294967": [arrays[0].astype(numpy.int64) + 2**32, *arrays[1:]],
    }
    starts = "prompt_start is .* one for each of the 4 completions"
    for words, given, start in (
        *((words, given, 0) for words, given in changed.items()),
        *((starts, arrays, start) for start in (-1, [0, 0])),
        ("8 tokens, but there must be 4: its 9 .* without the first 4", arrays, 4),
    ):
        with pytest.raises(ValueError, match=words):
            RecordedRouting.from_server(given, mask, prompt_start=start)

    def routed(change):
        return RecordedRouting.from_server([change(array) for array in arrays], mask)

    for words, routing in {
        r"\[1, 64, 2\], but it must be .* of 2 layers; a server's arrays": routed(lambda array: array[:, :1]),
        "has 8 experts, but its routing names expert": routed(lambda array: array + 8),
    }.items():
        for use in (
            lambda given: replay_routing(model, given).__enter__(),
            lambda given: serving_divergence(model, given),
        ):
            with pytest.raises(ValueError, match=words):
                use(routing)
    below = routed(lambda array: array.astype(numpy.int64) - 2**32)
    assert (below.tensors()[0] == -1).all(), "the router's own choice, not expert 0"
    one = routed(lambda array: array[..., :1])
    with (
        pytest.raises(ValueError, match=r"has shape \(64, 1\), but this call's is \(64, 2\)"),
        replay_routing(model, one),
    ):
        model(input_ids=ids)
    with pytest.raises(ValueError, match=r"is \[64, 1\], but the model's is \[64, 2\]"):
        serving_divergence(model, one, input_ids=ids)


class OtherTopK(TorchFunctionMode):
    """Makes a router's own last top-k, that over all experts, give other experts; -1 keeps its own. The rest of the
    router's forward, Transformers' code, then computes their weights."""

    def __init__(self, given_TK):
        super().__init__()
        self.given_TK, self.count = given_TK, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") != "topk" or args[0].shape[-1] != EXPERTS or result[1].shape[-1] != TOP_K:
            return result
        self.count += 1
        own_T1 = (self.given_TK < 0).any(-1, keepdim=True)
        index = torch.where(own_T1, result[1], self.given_TK)
        return torch.return_types.topk((args[0].gather(-1, index), index))


def mixed_experts(own_TK):
    """Draw experts of a third of the tokens at random, one id or both below 0 of another third;
    the rest keep their own."""
    generator = torch.Generator().manual_seed(1)
    given_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    given_TK[1::3] = -1
    given_TK[1::6, 0] = 5
    given_TK[2::3] = own_TK[2::3]
    return given_TK


@pytest.mark.parametrize("architecture", [a for a in architectures() if family_of(a)], ids=lambda a: a.experts)
def test_tokens_with_given_experts_beside_tokens_with_their_own_have_the_routers_own_formula(architecture):
    """Every family, softmax before or after top-k and sigmoid, with and without normalising: weights and the gradients of
    logits and router, beside the router's own forward with its top-k exchanged."""
    model = layers_of(architecture).train()
    (layer,) = find_layers(model)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    given_TK = mixed_experts(layer.router(x)[2])
    with OtherTopK(given_TK) as exchanged:
        _, expected_TK, index_TK = layer.router(x)
    assert exchanged.count == 1
    factors_TK = torch.randn(TOKENS, TOP_K, generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in layer.router.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad((expected_TK * factors_TK).sum(), trained, allow_unused=True)

    _, weights_TK, used_TK = with_experts(layer.family, layer.router, layer.router(x), given_TK)
    found = torch.autograd.grad((weights_TK * factors_TK).sum(), trained, allow_unused=True)
    assert torch.equal(used_TK, index_TK) and weights_TK.dtype == expected_TK.dtype
    kept = (given_TK < 0).any(-1) | (given_TK == layer.router(x)[2]).all(-1)
    assert torch.equal(weights_TK[kept], expected_TK[kept]) and 0 < kept.sum() < TOKENS
    assert relative_error(weights_TK, expected_TK) < 1e-6, "fp32: softmax over all, and over the chosen"
    assert any(gradient is not None for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_divergence_counts_the_tokens_whose_sets_of_experts_differ(family):
    model = build_patched(family).eval()
    ids, mask = padded(PADDING["left"])
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad(), record_routing(model) as own:
        model(**inputs)
    layers, own_LTK = own.layers, own.tensors()[0]
    assert serving_divergence(model, own, **inputs) == dict.fromkeys(layers, 0.0)
    assert serving_divergence(model, own_LTK.flip(-1), **inputs) == dict.fromkeys(layers, 0.0), "sets have no order"
    other_LTK = own_LTK.clone()
    real = mask.flatten().nonzero().flatten()
    changed, unknown = real[:5], real[5:9]
    taken = own_LTK[0, changed]
    other_LTK[0, changed, 0] = torch.stack([next(e for e in torch.arange(8) if e not in row) for row in taken]).int()
    other_LTK[:, unknown, 1] = -1
    other_LTK[:, mask.flatten() == 0] = other_LTK[:, mask.flatten() == 0].flip(0)  # padding does not count
    known = len(real) - len(unknown)
    expected = {layer: (len(changed) / known if number == 0 else 0.0) for number, layer in enumerate(layers)}
    assert serving_divergence(model, other_LTK, **inputs) == pytest.approx(expected)
    model.train()
    assert serving_divergence(model, other_LTK, **inputs) == pytest.approx(expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_divergence_of_a_server_is_between_none_and_all_and_of_unknown_tokens_no_number():
    model = build_patched("qwen3_moe").eval()
    ids, mask = padded(PADDING["right"])
    routing = RecordedRouting.from_server(served_arrays(with_other_routers(model)), mask)
    shares = serving_divergence(model, routing, input_ids=ids, attention_mask=mask)
    assert list(shares) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(0.1 < share < 1 for share in shares.values())
    unknown = torch.full_like(routing.tensors()[0], -1)
    assert all(share != share for share in serving_divergence(model, unknown, input_ids=ids).values())
    with pytest.raises(ValueError, match="has 2 calls, but serving_divergence compares one"):
        serving_divergence(model, [unknown, unknown], input_ids=ids)
