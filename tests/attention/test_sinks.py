"""The function attention_with_sinks, and the attention function of Transformers around it,
against the formula in fp64."""

import pytest
import torch
from helpers.flash_kernels import as_on_cuda
from helpers.sinks import Attention, causal, compare, compute, gradients, in_fp64, tensors
from torch._dynamo.utils import counters

from sonicmoe_hf.attention.implementation import sinks_attention_forward
from sonicmoe_hf.attention.mask import sinks_mask
from sonicmoe_hf.attention.names import TORCH_SINKS
from sonicmoe_hf.attention.packing import sequence_starts, sides_of
from sonicmoe_hf.attention.positions import starts_of
from sonicmoe_hf.attention.sinks import AttentionInputs, AttentionOptions, Masking, attention_with_sinks

CASES = {  # B, T, S, H, key heads, D, D of values, window, causal
    "one_sequence": (1, 7, 7, 2, 2, 8, 8, None, True),
    "grouped_heads": (2, 9, 9, 6, 2, 8, 8, None, True),
    "one_key_head": (2, 5, 5, 4, 1, 16, 16, 3, True),
    "window": (2, 13, 13, 4, 2, 8, 8, 4, True),
    "window_of_one": (1, 6, 6, 4, 2, 8, 8, 1, True),
    "both_ways": (2, 9, 9, 4, 2, 8, 8, None, False),
    "window_both_ways": (2, 9, 9, 4, 2, 8, 8, 3, False),
    "odd_heads": (1, 7, 7, 4, 2, 12, 5, 4, True),
    "values_larger": (1, 7, 7, 4, 2, 8, 24, None, True),
    "decode": (2, 1, 11, 4, 2, 8, 8, None, True),
    "decode_in_window": (2, 1, 11, 4, 2, 8, 8, 5, True),
    "a_few_more": (2, 4, 11, 4, 2, 8, 8, 6, True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_and_every_gradient_are_the_formula_s(kernels, case):
    *sizes, window, is_causal = CASES[case]
    inputs = tensors(*sizes)
    if not is_causal or sizes[1] == sizes[2] or sizes[1] == 1 or window:
        ours = compute(inputs, module=Attention(is_causal), sliding_window=window)
        compare(ours, inputs, causal(sizes[1], sizes[2], window, is_causal))


def test_a_causal_model_that_is_told_to_see_both_ways_sees_as_far_as_transformers_masks(kernels):
    """Masks include the distance sliding_window; models that are never causal add 1 to theirs."""
    inputs = tensors(2, 9, 9, 4, 2, 8, 8)
    compare(compute(inputs, sliding_window=3, is_causal=False), inputs, causal(9, 9, 4, False))


def test_a_layer_may_have_no_sinks(place):
    tokens, window = place.either((7, None), (130, 33))
    inputs = [*place.tensors(2, tokens)[:3], None]
    compare(compute(inputs, sliding_window=window), inputs, causal(tokens, tokens, window))


def test_slices_of_fused_projections(kernels):
    torch.manual_seed(0)
    fused = torch.randn(2, 7, 8, 8, dtype=torch.float64).transpose(1, 2)
    sinks = torch.randn(4, dtype=torch.float64)
    inputs = [x.detach().requires_grad_() for x in (*fused.split([4, 2, 2], dim=1), sinks)]
    compare(compute(inputs, sliding_window=3), inputs, causal(7, 7, 3))


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("padding", ["left", "right", "both", "whole_row"])
def test_padding_on_either_side(place, padding, has_window):
    tokens, window = place.either((9, 4), (130, 33))
    inputs, window = place.tensors(3, tokens), window if has_window else None
    is_real = torch.ones(3, tokens, dtype=torch.bool, device=place.device)
    if padding in ("left", "both"):
        is_real[0, : place.either(4, 71)] = False
    if padding in ("right", "both"):
        is_real[1, tokens - 2 :] = False
    if padding == "both":
        is_real[0, tokens - 1] = False
    if padding == "whole_row":
        is_real[2] = False
    made = sinks_mask(
        3, tokens, tokens, attention_mask=is_real, local_size=window, dtype=torch.float64, device=place.device
    )
    sees = causal(tokens, tokens, window)
    if place.kernels == "cpu":  # eager's mask: the window comes with the mask function
        made = made.masked_fill(~sees, torch.finfo(torch.float64).min)
    ours = compute(inputs, made, sliding_window=window)
    assert ours.isfinite().all()  # what padding's own queries get is nobody's concern
    compare(ours, inputs, sees & is_real[:, None, None].cpu(), seen=is_real[..., None, None])


def test_keys_that_are_padding_get_no_gradient(kernels):
    inputs, is_real = tensors(2, 6, 6, 4, 2, 8, 8), torch.ones(2, 6, dtype=torch.bool)
    is_real[0, :2] = False
    ours = compute(inputs, sinks_mask(2, 6, 6, attention_mask=is_real, dtype=torch.float64))
    _, dk, dv, _ = gradients(ours * is_real[..., None, None], inputs)
    assert not dk[0, :, :2].any() and not dv[0, :, :2].any() and dk[0, :, 2:].any()


@pytest.mark.parametrize(
    "few, many", [([4, 1, 6], [71, 1, 200]), ([11], [272]), ([1] * 11, [1] * 272), ([5, 0, 6], [5, 0, 267])]
)
@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("told_by", ["cu_seq_lens", "lengths_too", "position_ids"])
def test_packed_sequences(place, few, many, has_window, told_by):
    lengths, window = place.either((few, 3), (many, 33))
    tokens, window = sum(lengths), window if has_window else None
    inputs = place.tensors(1, tokens)
    starts = torch.tensor([0, *lengths], device=place.device).cumsum(0)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    if told_by == "lengths_too":
        given |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if told_by == "position_ids":
        given = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(place.device)}
    ours = compute(inputs, sliding_window=window, **given)
    compare(ours, inputs, causal(tokens, tokens, window) & (number[:, None] == number))


def test_tokens_after_the_last_packed_sequence_have_zeros(kernels):
    inputs = tensors(1, 8, 8, 4, 2, 8, 8)
    ours = compute(inputs, cu_seq_lens_q=torch.tensor([0, 2, 5]), max_length_q=3)
    assert not ours[:, 5:].any() and ours[:, :5].all()
    for gradient in gradients(ours, inputs)[:3]:
        assert not gradient[:, :, 5:].any() and gradient.isfinite().all()


@pytest.mark.parametrize("told_by", ["cu_seq_lens", "position_ids"])
def test_rows_of_packed_sequences_follow_one_another(place, told_by):
    first, tokens = place.either((2, 5), (40, 100))
    inputs = place.tensors(2, tokens)
    if told_by == "cu_seq_lens":
        starts = torch.tensor([0, first, tokens, 2 * tokens], device=place.device)
        ours = compute(inputs, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    else:
        positions = torch.arange(tokens) - torch.tensor([first, 0])[:, None]
        ours = compute(inputs, position_ids=positions.remainder(tokens).to(place.device))
    number = torch.stack([(torch.arange(tokens) >= first).long(), torch.full((tokens,), 2)])
    compare(ours, inputs, causal(tokens, tokens) & (number[:, None, :, None] == number[:, None, None]))


def test_queries_without_keys_and_tokens_after_the_last_sequence_have_zeros(place):
    first, last, tokens = place.either((2, 5, 8), (20, 50, 64))
    inputs = place.tensors(1, tokens)
    starts_q, starts_k = (torch.tensor([0, start, last], device=place.device) for start in (first, 0))
    ours = compute(inputs, cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k)
    assert not ours[:, :first].any() and not ours[:, last:].any() and ours[:, first:last].any(-1).all()
    dq, dk, dv, ds = gradients(ours, inputs)
    assert all(x.isfinite().all() for x in (dq, dk, dv, ds))
    assert not dq[:, :, :first].any() and not any(x[:, :, last:].any() for x in (dq, dk, dv))


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float64).min])
def test_a_query_masked_from_every_key_has_zeros_and_finite_gradients(masked):
    inputs, mask = tensors(1, 3, 3, 4, 2, 8, 8), torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    mask[..., 1, :] = masked
    ours = compute(inputs, mask)
    assert not ours[:, 1].any() and ours[:, 0].all()
    compare(ours, inputs, mask == 0)


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_to_compute(kernels, sizes):
    inputs = tensors(*sizes, 4, 2, 8, 8)
    ours = compute(inputs)
    assert ours.shape == (sizes[0], sizes[1], 4, 8) and not ours.any()
    assert all(not gradient.any() for gradient in gradients(ours, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_keep_their_dtypes(kernels, dtype, sink_dtype):
    """Within four roundings to 16 bits: o, o', and two of the gradients' products; in fp32 sums have 18 terms."""
    inputs = tensors(2, 9, 9, 4, 2, 8, 8, dtype)
    inputs[3] = inputs[3].detach().to(sink_dtype).requires_grad_()
    ours, (exact, theirs) = compute(inputs, sliding_window=4), in_fp64(inputs, causal(9, 9, 4))
    ours_all, theirs_all = [ours, *gradients(ours, inputs)], [theirs, *gradients(theirs, exact)]
    assert [x.dtype for x in ours_all] == [dtype] * 4 + [sink_dtype]
    for a, b in zip(ours_all, theirs_all):
        eps = max(torch.finfo(a.dtype).eps, torch.finfo(dtype).eps)
        tolerance = (18 if eps < 1e-6 else 4) * eps
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


def test_the_same_bits_on_a_second_run(kernels):
    runs = []
    for _ in range(2):
        inputs = tensors(2, 33, 33, 4, 2, 8, 8, torch.float32)
        out = compute(inputs, sliding_window=7)
        runs.append([out, *gradients(out, inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_gradients_that_nobody_needs_are_left_out(kernels):
    every = tensors(1, 5, 5, 4, 2, 8, 8)
    expected = gradients(compute(every), every)
    for index in range(4):
        inputs = [x.detach().requires_grad_(i == index) for i, x in enumerate(every)]
        assert torch.equal(gradients(compute(inputs), [inputs[index]])[0], expected[index])


def test_under_autocast_it_computes_in_autocast_s_dtype(kernels):
    inputs = tensors(1, 5, 5, 4, 2, 8, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = compute(inputs)
    assert ours.dtype == torch.bfloat16
    assert [x.dtype for x in gradients(ours, inputs)] == [torch.float32] * 4
    half = [*(x.detach().bfloat16().requires_grad_() for x in inputs[:3]), inputs[3]]
    assert torch.equal(compute(half), ours)


def test_autocast_leaves_fp64_as_it_is():
    """Autocast does so with torch's own operators too."""
    inputs = tensors(1, 5, 5, 4, 2, 8, 8)
    expected = compute(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = compute(inputs)
    assert ours.dtype == torch.float64 and torch.equal(ours, expected)


def test_a_boolean_mask_says_which_keys_are_seen():
    """Transformers makes boolean masks for SDPA; its eager attention adds them as 0 and 1."""
    inputs = tensors(2, 6, 6, 4, 4, 8, 8)
    sees = (torch.rand(2, 1, 6, 6) < 0.5) | torch.eye(6, dtype=torch.bool)
    seen = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    torch.testing.assert_close(compute(inputs, sees), compute(inputs, seen), rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_refused(kernels):
    inputs = tensors(1, 5, 5, 4, 2, 8, 8)
    gradient, *_ = torch.autograd.grad(compute(inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="attention with sinks has no second derivatives"):
        gradient.sum().backward()


@pytest.mark.slow
def test_the_op_is_what_torch_asks_of_ops(place):
    inputs, forms = place.tensors(2, 40), [(None,) * 4]
    if place.kernels != "cpu":
        flags = torch.full((2, 40), 3, dtype=torch.uint8, device=place.device)
        flags[0, :2] = 2
        starts = torch.tensor([0, 4, 80, 80], dtype=torch.int32)
        forms += [(None, flags, None, None), (None, None, starts, None)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for form in forms:
        torch.library.opcheck(
            torch.ops.sonicmoe_hf.attention_with_sinks.default,
            (*(x.transpose(1, 2) for x in inputs[:3]), inputs[3], *form, 0.3, True, 3, 0, 0, "source"),
            test_utils=place.either((*checks, "test_aot_dispatch_dynamic"), checks),
        )


def test_torch_func_is_an_error(kernels):
    inputs = tensors(1, 5, 5, 4, 2, 8, 8)
    with pytest.raises(NotImplementedError, match=r"attention with sinks works neither with torch.func"):
        torch.func.grad(lambda *given: compute(given).square().sum())(*(x.detach() for x in inputs))


def test_packing_and_back():
    flags = torch.tensor([[0, 0, 1, 1, 3, 3, 2], [1, 1, 1, 1, 3, 3, 3], [0, 0, 0, 0, 2, 2, 2]], dtype=torch.uint8)
    queries, keys = sides_of(flags, 3)
    x = torch.arange(1, 22).view(3, 7)
    assert keys.starts.tolist() == [0, 4, 11, 11] and queries.starts.tolist() == [0, 2, 5, 5]
    assert keys.pack(x)[:11].tolist() == [3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    assert queries.pack(x[:, 4:])[:5].tolist() == [5, 6, 12, 13, 14]
    assert torch.equal(keys.unpack(keys.pack(x)), x)
    assert queries.clear_(torch.ones(2, 9), 1).sum(1).tolist() == [5, 5]


def test_rows_that_hold_one_sequence_each_are_not_packed():
    """The kernels take the batch as it is, since nothing else begins a sequence."""
    begins = torch.zeros(3, 5, dtype=torch.bool)
    begins[:, 0] = True
    assert sequence_starts(begins) is None
    begins[1, 2] = True
    assert sequence_starts(begins).tolist() == [0, 5, 7, 10, 15]


def test_positions_that_changed_in_place_or_are_of_another_batch_are_looked_at_again():
    """Results about a tensor are kept for the model's other layers alone."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert starts_of(positions, 1).tolist() == [0, 3, 5]
    assert starts_of(positions, 2).tolist() == [0, 3, 5, 8, 10]
    positions[0, 1:] = torch.tensor([0, 1, 2, 3])
    assert starts_of(positions, 2).tolist() == [0, 1, 5, 6, 10]


def test_positions_read_under_inference_mode_serve_a_later_backward():
    values = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.inference_mode():
        starts_of(values, 1)
    assert not starts_of(values, 1).is_inference()


class ChoosesKeys(Attention):
    class config:
        model_type = "deepseek_v4"


REFUSALS = {
    "dropout": ({"dropout": 0.1}, "takes no dropout=0.1: load the model with attention_dropout=0.0"),
    "output_attentions": ({"output_attentions": True}, f'{TORCH_SINKS} takes no output_attentions.*"eager"'),
    "cache": ({"cache": object()}, "takes no cache"),
    "softcap": ({"softcap": 30.0}, "takes no softcap"),
    "chosen keys": ({"module": ChoosesKeys()}, f"{TORCH_SINKS}.*deepseek_v4.*compressed keys"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_it_does_not_compute_is_an_error_with_the_remedy(case):
    options, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        compute(tensors(1, 3, 3, 4, 2, 8, 8), **options)


def test_a_model_without_sinks_is_an_error():
    q, k, v, _ = tensors(1, 3, 3, 4, 2, 8, 8)
    with pytest.raises(ValueError, match=r'passes no sinks.*attn_implementation="eager"'):
        sinks_attention_forward(Attention(), q, k, v, None)


def test_on_cuda_masks_of_four_dimensions_and_larger_heads_are_refused(monkeypatch):
    flags, starts = torch.full((1, 3), 3, dtype=torch.uint8), {"cu_seq_lens_q": torch.tensor([0, 3])}
    for sizes, mask, options, words in (
        ((8, 8), torch.zeros(1, 1, 3, 3), {}, r"no mask of shape \(1, 1, 3, 3\) on CUDA.*2-D attention_mask"),
        ((264, 264), None, {}, "heads of 256 at most, not 264"),
        ((8, 264), None, {}, "heads of 256 at most, not 264"),
        ((8, 8), flags, starts, "contradict each other"),
    ):
        with as_on_cuda(monkeypatch), pytest.raises(ValueError, match=words):
            compute(tensors(1, 3, 3, 4, 2, *sizes), mask, **options)
    inputs = tensors(1, 3, 3, 4, 2, 8, 8)
    with as_on_cuda(monkeypatch):
        for mask, options in ((flags, {}), (None, starts)):
            compare(compute(inputs, mask, **options), inputs, causal(3, 3))


def test_on_cuda_fp32_without_autocast_is_refused():
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 2, 3, 8, device="cuda")
        with pytest.raises(ValueError, match=r"bfloat16 and float16 on CUDA, not torch\.float32.*autocast"):
            compute([q, q, q, torch.empty(2, device="cuda")])


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_stand_in_gives_what_torch_says_the_kernels_give(monkeypatch, is_packed):
    """The shapes of torch's own meta functions."""
    shape = (10, 4, 8) if is_packed else (2, 5, 4, 8)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32) if is_packed else None
    with as_on_cuda(monkeypatch):
        results = []
        for device in ("cpu", "meta"):
            q, cum = torch.randn(shape, device=device), None if starts is None else starts.to(device)
            results.append(
                torch.ops.aten._flash_attention_forward(q, q, q, cum, cum, 6, 6, 0.0, True, False, scale=0.3)
            )
        for ours, theirs in zip(results[0][:2], results[1][:2]):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


@pytest.mark.slow
@pytest.mark.pinned
def test_torchs_cache_on_disk_gives_no_graph_of_another_version_of_the_op(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = AttentionInputs(*(torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)), torch.randn(2))
    hits = []
    for digest in ("this", "this", "another"):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(attention_with_sinks, fullgraph=True)
        compiled(inputs, Masking(), AttentionOptions(1.0, True)._replace(code_digest=digest)).sum().backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]
