"""torch's flash kernels for CUDA with sinks, against the formula in fp32: everything test_sinks.py tries on a stand-in."""

import pytest
import torch
from helpers.attention import build, inputs, packed, results
from helpers.flash_kernels import Attention, causal, reference
from transformers import DynamicCache, StaticCache

from sonicmoe_hf.attention.implementation import sinks_attention_forward
from sonicmoe_hf.attention.mask import sinks_mask
from sonicmoe_hf.checkpoints.comparing import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="flash kernels need sm_80"
    ),
]
# The kernels round the probabilities, o, o' and every result to 16 bits: a few times half of eps, in the norm.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
CASES = {  # B, T, S, H, key heads, D, D of values, window, causal
    "gpt_oss": (2, 257, 257, 64, 8, 64, 64, None, True),
    "gpt_oss_window": (2, 257, 257, 64, 8, 64, 64, 128, True),
    "mimo": (1, 130, 130, 16, 4, 192, 128, 129, True),
    "odd_heads": (1, 65, 65, 4, 2, 20, 12, 7, True),
    "largest_heads": (1, 65, 65, 4, 2, 256, 256, None, True),
    "one_token": (3, 1, 1, 4, 2, 64, 64, None, True),
    "window_of_one": (1, 63, 63, 4, 2, 64, 64, 1, True),
    "both_ways": (2, 129, 129, 4, 2, 64, 64, None, False),
    "window_both_ways": (2, 129, 129, 4, 2, 64, 64, 17, False),
    "decode": (2, 1, 300, 64, 8, 64, 64, None, True),
    "decode_in_window": (2, 1, 300, 64, 8, 64, 64, 128, True),
    "a_few_more": (2, 5, 300, 8, 2, 64, 64, 128, True),
}
NO_ROUTING = {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 64}  # a rounding could change the experts


def tensors(batch, queries, keys, heads, key_heads, size, value_size, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (
        (batch, heads, queries, size),
        (batch, key_heads, keys, size),
        (batch, key_heads, keys, value_size),
        (heads,),
    )
    made = [torch.randn(shape, device="cuda") for shape in shapes]
    return [*(x.to(dtype).requires_grad_() for x in made[:3]), made[3].requires_grad_()]


def compute(made, mask=None, is_causal=True, **options):
    q, k, v, sinks = made
    return sinks_attention_forward(Attention(is_causal), q, k, v, mask, s_aux=sinks, **options)[0]


def formula(made, sees):
    exact = [None if x is None else x.detach().float().requires_grad_() for x in made]
    q, k, v, sinks = exact
    sees = sees.to("cuda")
    return exact, reference(*(x.transpose(1, 2) for x in (q, k, v)), sinks, sees, q.shape[-1] ** -0.5)


def gradients(out, made, seen=None):
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, device="cuda").bfloat16()
    gradient = gradient if seen is None else gradient * seen
    return torch.autograd.grad(out, [x for x in made if x is not None], gradient.to(out.dtype))


def compare(ours, made, sees, seen=None, dtype=torch.bfloat16):
    exact, theirs = formula(made, sees)
    named = zip(
        ("o", "dq", "dk", "dv", "ds"),
        (ours if seen is None else ours * seen, *gradients(ours, made, seen)),
        (theirs if seen is None else theirs * seen, *gradients(theirs, exact, seen)),
    )
    errors = {name: float(relative_error(a.float(), b)) for name, a, b in named if b.any()}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_result_and_every_gradient(case, dtype):
    *sizes, window, is_causal = CASES[case]
    made = tensors(*sizes, dtype=dtype)
    ours = compute(made, sliding_window=window, is_causal=is_causal)
    assert ours.dtype == dtype and ours.is_contiguous()
    compare(ours, made, causal(sizes[1], sizes[2], window, is_causal), dtype=dtype)


def test_a_layer_without_sinks():
    made = [*tensors(2, 130, 130, 8, 2, 64, 64)[:3], None]
    compare(compute(made, sliding_window=33), made, causal(130, 130, 33))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("padding", ["left", "right", "both", "whole_row"])
def test_padding(padding, window):
    made, is_real = tensors(3, 130, 130, 8, 2, 64, 64), torch.ones(3, 130, dtype=torch.bool, device="cuda")
    if padding in ("left", "both"):
        is_real[0, :71] = False
    if padding in ("right", "both"):
        is_real[1, 128:] = False
    if padding == "whole_row":
        is_real[2] = False
    mask = sinks_mask(3, 130, 130, attention_mask=is_real, local_size=window, device="cuda")
    ours = compute(made, mask, sliding_window=window)
    assert not ours[~is_real].any()
    sees = causal(130, 130, window) & is_real[:, None, None].cpu()
    compare(ours, made, sees, seen=is_real[..., None, None])


@pytest.mark.parametrize("lengths", [[71, 1, 200], [272], [1] * 272, [5, 0, 267]])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("told_by", ["cu_seq_lens", "lengths_too", "position_ids"])
def test_packed_sequences(lengths, window, told_by):
    made = tensors(1, 272, 272, 8, 2, 64, 64)
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    if told_by == "lengths_too":
        given |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if told_by == "position_ids":
        given = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None].cuda()}
    ours = compute(made, sliding_window=window, **given)
    compare(ours, made, causal(272, 272, window) & (number[:, None] == number))


def test_rows_of_packed_sequences():
    made = tensors(2, 100, 100, 8, 2, 64, 64)
    positions = torch.stack([torch.cat([torch.arange(40), torch.arange(60)]), torch.arange(100)]).cuda()
    number = torch.stack([(torch.arange(100) >= 40).long(), torch.full((100,), 2)])
    compare(
        compute(made, position_ids=positions),
        made,
        causal(100, 100) & (number[:, None, :, None] == number[:, None, None]),
    )


def test_tokens_after_the_last_sequence_and_queries_without_keys_have_zeros():
    made = tensors(1, 64, 64, 4, 2, 64, 64)
    starts_q = torch.tensor([0, 20, 50], device="cuda", dtype=torch.int32)
    starts_k = torch.tensor([0, 0, 50], device="cuda", dtype=torch.int32)
    ours = compute(made, cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k)
    assert not ours[:, :20].any() and not ours[:, 50:].any() and ours[:, 20:50].any()
    dq, dk, dv, ds = gradients(ours, made)
    assert all(x.isfinite().all() for x in (dq, dk, dv, ds))
    assert not dq[:, :, :20].any() and not dq[:, :, 50:].any() and not dk[:, :, 50:].any() and not dv[:, :, 50:].any()


def test_padding_never_waits_for_the_gpu():
    made = tensors(2, 64, 64, 4, 2, 64, 64)
    flags = torch.full((2, 64), 3, dtype=torch.uint8, device="cuda")
    flags[0, :9] = 2
    gradient = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(compute(made, flags, sliding_window=16), made, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_bits_on_a_second_run():
    """Forward always; gradients where torch is told to be deterministic, as for torch's own flash attention."""
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            made = tensors(2, 513, 513, 8, 2, 64, 64)
            flags = torch.full((2, 513), 3, dtype=torch.uint8, device="cuda")
            flags[0, :70] = 2
            out = compute(made, flags, sliding_window=128)
            runs.append([out, *gradients(out, made)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    made = tensors(2, 513, 513, 8, 2, 64, 64)
    assert torch.equal(compute(made), compute(made))


BATCHES = {
    "whole": lambda: inputs(length=150, device="cuda"),
    "both": lambda: inputs("both", length=150, device="cuda"),
    "packed": lambda: packed((71, 1, 80), device="cuda"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_gpt_oss_in_bf16_is_as_near_to_fp32_as_eager(case):
    options = {**NO_ROUTING, "sliding_window": 32, "max_position_embeddings": 256}
    batch = BATCHES[case]()
    if case == "packed":  # GptOssModel hides position_ids from eager's mask, so eager gets the mask
        number = torch.repeat_interleave(torch.arange(3), torch.tensor([71, 1, 80]))
        sees = {
            kind: causal(152, 152, window) & (number[:, None] == number)
            for kind, window in (("full_attention", None), ("sliding_attention", 32))
        }
    exact_model = build(implementation="eager", device="cuda", **options)

    def for_eager(dtype):
        if case != "packed":
            return batch
        smallest = torch.finfo(dtype).min
        masks = {
            kind: torch.zeros(1, 1, 152, 152, dtype=dtype).masked_fill(~x, smallest).cuda() for kind, x in sees.items()
        }
        return {**batch, "attention_mask": masks}

    def run(model, given):
        model.zero_grad(set_to_none=True)
        out = model(**given, use_cache=False)
        out.loss.backward()
        return {"loss": out.loss.detach(), **{n: p.grad.detach().float() for n, p in model.named_parameters()}}

    exact = run(exact_model, for_eager(torch.float32))
    eager = run(
        build(implementation="eager", device="cuda", dtype=torch.bfloat16, **options), for_eager(torch.bfloat16)
    )
    ours = run(build(device="cuda", dtype=torch.bfloat16, **options), batch)
    for name in exact:
        error, eager_error = (float(relative_error(x[name].float(), exact[name])) for x in (ours, eager))
        assert error <= 1.5 * eager_error + 1e-2, (name, error, eager_error)


def test_under_autocast_with_parameters_in_fp32():
    options = {**NO_ROUTING, "sliding_window": 32, "max_position_embeddings": 256}
    batch = BATCHES["both"]()
    exact = results(build(implementation="eager", device="cuda", **options), batch)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = results(build(device="cuda", **options), batch)
    assert relative_error(found["loss"].float(), exact["loss"]) <= 1e-2
    sinks = [name for name in exact if "sinks" in name]
    assert sinks and all(relative_error(found[name], exact[name]) <= 5e-2 for name in sinks)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoding_in_pieces_past_the_window(kind):
    options = {**NO_ROUTING, "sliding_window": 16, "max_position_embeddings": 256}
    model = build(device="cuda", dtype=torch.bfloat16, **options).eval()
    exact = build(implementation="eager", device="cuda", **options).eval()
    batch = inputs("left", length=60, device="cuda")
    ids, mask, positions = batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=64)
    with torch.no_grad():
        whole = exact(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        pieces, start = [], 0
        for size in (21, 9, *[1] * 30):
            end = start + size
            pieces.append(
                model(
                    input_ids=ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            )
            start = end
    is_real = mask.bool()
    assert relative_error(torch.cat(pieces, 1)[is_real].float(), whole[is_real]) <= 3e-2  # bf16 through two layers


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_are_the_best_by_eager_in_fp32(cache):
    options = {**NO_ROUTING, "sliding_window": 16, "max_position_embeddings": 256}
    model = build(device="cuda", dtype=torch.bfloat16, **options).eval()
    exact = build(implementation="eager", device="cuda", **options).eval()
    batch = inputs("left", length=30, device="cuda")
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    ids = model.generate(**given, do_sample=False, max_new_tokens=30, min_new_tokens=30, cache_implementation=cache)
    mask = torch.cat([given["attention_mask"], torch.ones(3, 30, dtype=torch.long, device="cuda")], 1)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = exact(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 29:-1]
    logits[..., 2] = -torch.inf  # min_new_tokens forbids the end
    best, taken = logits.max(-1).values, logits.gather(-1, ids[:, 30:, None])[..., 0]
    assert (
        (best - taken) <= 0.05 * logits[logits.isfinite()].std()
    ).float().mean() == 1  # a tie within bf16's rounding


@pytest.mark.parametrize("case", BATCHES)
def test_compiled_without_graph_breaks(case):
    torch._dynamo.reset()
    options = {**NO_ROUTING, "sliding_window": 32, "max_position_embeddings": 256, "experts": "sonicmoe_hf"}
    model, batch = build(device="cuda", dtype=torch.bfloat16, **options), BATCHES[case]()
    expected = results(model, batch)
    model.model.forward = torch.compile(model.model.forward, fullgraph=True)
    found = results(model, batch)
    for name in expected:
        # other roundings to bf16; of a router's bias, where all tokens' gradients nearly cancel, they leave more
        bound = 0.3 if name.endswith("router.bias") else 5e-2
        assert relative_error(found[name].float(), expected[name].float()) <= bound, name


def test_the_op_is_what_torch_asks_of_ops():
    q, k, v, sinks = tensors(2, 40, 40, 4, 2, 64, 64)
    flags = torch.full((2, 40), 3, dtype=torch.uint8, device="cuda")
    flags[0, :2] = 2
    starts = torch.tensor([0, 4, 80, 80], dtype=torch.int32)
    for form in ((None,) * 4, (None, flags, None, None), (None, None, starts, None)):
        torch.library.opcheck(
            torch.ops.sonicmoe_hf.attention_with_sinks.default,
            (*(x.transpose(1, 2) for x in (q, k, v)), sinks, *form, 0.3, True, 3, 0, 0),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
