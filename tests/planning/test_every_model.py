"""The plan of every mixture-of-experts architecture of the installed Transformers, at the sizes of its default config."""

import json

import pytest
from helpers.architectures import architectures
from transformers import CONFIG_MAPPING

from sonicmoe_hf.checkpoints.reading.config_only import UNREADABLE, build_on_meta
from sonicmoe_hf.errors import UnsupportedModelError
from sonicmoe_hf.model_patches import FAMILIES
from sonicmoe_hf.tools.planning.sizes import sizes_of_model
from sonicmoe_hf.tools.planning.ways import ways_of

FOLDERS = sorted({architecture.folder for architecture in architectures()} & set(CONFIG_MAPPING))
REFUSALS = ("no mixture-of-experts layer", "cannot be accelerated", "as a model without a loss", "the config of")


def model_by_config(folder, place):
    """Build the model of a family's default config, as of a folder with that config alone."""
    entries = json.loads(CONFIG_MAPPING[folder]().to_json_string(use_diff=False))
    (place / "config.json").write_text(json.dumps({**entries, "model_type": CONFIG_MAPPING[folder].model_type}))
    return build_on_meta(str(place))


@pytest.mark.skipif("step3p7" not in CONFIG_MAPPING, reason="of a later Transformers")
def test_step_whose_experts_patch_model_adopts_is_planned_for(tmp_path):
    sizes = sizes_of_model("step3p7", model_by_config("step3p7", tmp_path))
    assert round(sizes.total / 1e9) == 198 and 0.95 < sizes.experts / sizes.total < 0.97
    ways = ways_of(sizes, gpus=1, gpu_memory=80, tokens=4096)
    assert any(way.fits and way.training.experts_memory is not None for way in ways)


def test_longcat_flash_is_refused_by_the_name_of_its_identity_experts(tmp_path):
    with pytest.raises(UnsupportedModelError, match="256 of its 768 experts are identity experts"):
        sizes_of_model("longcat_flash", model_by_config("longcat_flash", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_model_is_planned_for_or_refused_with_a_reason(folder, tmp_path):
    try:
        model = model_by_config(folder, tmp_path)
    except UNREADABLE as error:
        pytest.skip(f"its default config describes no model: {' '.join(str(error).split())[:100]}")
    try:
        sizes = sizes_of_model(folder, model)
    except UnsupportedModelError as error:
        assert any(words in str(error) for words in REFUSALS), error
        assert folder not in FAMILIES or REFUSALS[1] not in str(error)
        return
    assert sizes.total == sum(parameter.numel() for parameter in model.parameters()) > sizes.experts > 0
    for gpus in (1, 8):
        for way in ways_of(sizes, gpus=gpus, gpu_memory=80, tokens=4096):
            parts = {name: value for name, value in vars(way.memory).items() if name != "moment"}
            assert min(parts.values()) >= 0 and parts["experts"] > 0 and parts["rest"] > 0, (way.name, parts)
