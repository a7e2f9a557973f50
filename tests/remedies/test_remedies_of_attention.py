"""Messages of attention: each is raised, by the stand-in for CUDA's kernels where they are CUDA's, and then what it names
is done."""

from types import SimpleNamespace

import pytest
import torch
from helpers.attention import build, packed_batch, padded_batch
from helpers.flash_kernels import as_on_cuda
from helpers.models import relative_error
from helpers.said import says
from helpers.sinks import compute
from transformers import DynamicCache, GptOssConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from sonicmoe_hf.attention import names, packing
from sonicmoe_hf.attention.packing import check_not_captured

pytestmark = pytest.mark.pinned
EXACT = 1e-5  # fp32: sums in another order


def test_flash_kernels_take_a_model_in_bfloat16():
    """On tensors without memory, which say that they are on CUDA."""
    with torch._subclasses.FakeTensorMode():
        q, sinks = torch.empty(1, 2, 3, 8, device="cuda"), torch.empty(2, device="cuda")
        with says("not torch.float32: load the model with dtype=torch.bfloat16"):
            compute([q, q, q, sinks])
        q = q.bfloat16()
        out = compute([q, q, q, sinks])
        assert (out.shape, out.dtype) == ((1, 3, 2, 8), torch.bfloat16)


def test_attention_that_is_not_causal_takes_a_cache_as_eager():
    model, ids = build().eval(), padded_batch()["input_ids"]
    cache = DynamicCache(config=model.config)

    def continued(cache):
        model(input_ids=ids[:, :5], past_key_values=cache)
        return model(input_ids=ids[:, 5:9], past_key_values=cache, is_causal=False).logits

    with torch.no_grad(), says("as many keys as queries; load the model with attn_implementation"):
        continued(cache)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert continued(DynamicCache(config=model.config)).isfinite().all()


def test_packed_sequences_are_captured_with_their_starts_and_lengths(monkeypatch):
    on_cuda = SimpleNamespace(is_cuda=True)  # what every tensor is taken for
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(packing, "check_not_captured", lambda tensor: check_not_captured(on_cuda))
    words = "or packed sequences as cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, to capture steps"
    model = build().eval()
    expected = model(**packed_batch()).logits
    with as_on_cuda(monkeypatch), torch.no_grad():
        with says(words, "give the model an attention_mask"):
            model(**packed_batch())
        assert relative_error(model(**packed_batch(with_starts=True)).logits, expected) < EXACT
        assert model(**padded_batch("both")).logits.isfinite().all()


def test_sliding_windows_in_pieces_are_without_masks_of_ones_own_or_eager():
    config, embeds = GptOssConfig(sliding_window=4), torch.zeros(2, 9, 8)
    own = {"and_mask_function": lambda batch, head, query, key: query >= key}  # which hides nothing more
    config._attn_implementation = names.TORCH_PIECES
    with says("takes sliding windows over dynamic caches, without masks of one's own; use attn_implementation"):
        create_sliding_window_causal_mask(config, embeds, None, None, **own)
    seen = create_sliding_window_causal_mask(config, embeds, None, DynamicCache(config=config)).sum(-1)
    config._attn_implementation = "eager"
    mask = create_sliding_window_causal_mask(config, embeds, None, None, **own)
    assert torch.equal((mask == 0).sum(-1), seen) and seen.max() == 4
