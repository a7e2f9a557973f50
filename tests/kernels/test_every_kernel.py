"""`keep_tensors_apart`, on which memcheck relies, on a CPU."""

from every_kernel import keep_tensors_apart
from moe_problems import AdaptedLayer

from sonicmoe_hf.layer import products


def test_each_factor_of_an_adapter_is_an_allocation_of_its_own(monkeypatch):
    monkeypatch.setattr(products, "prepare_adapters", products.prepare_adapters)
    keep_tensors_apart()
    prepare, prepared = products.prepare_adapters, []
    monkeypatch.setattr(
        products, "prepare_adapters", lambda *given: prepared.extend(found := prepare(*given)) or found
    )
    AdaptedLayer(5, "concatenated", 20, 64, 64, device="cpu").step(None)
    factors = [factor for projection in prepared for factor in (projection.a, projection.b)]
    assert len(factors) >= 4 and all(each.untyped_storage().nbytes() == each.nbytes for each in factors)
