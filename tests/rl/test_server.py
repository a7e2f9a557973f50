"""GRPO with a stand-in for `vllm serve`: it is told to load each version of the adapter, and says what it lacks."""

import pytest
from helpers.marks import rest_slow
from helpers.rl import GAP, logged_values, make
from helpers.vllm_stand_in import serving
from trl import GRPOTrainer as TRLsGRPOTrainer

from sonicmoe_hf.trl import GRPOTrainer, vllm_adapters

COMMAND = (
    r"start it with: VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve \S+ --enable-lora "
    r"--max-lora-rank 8 --max-loras 2 --enable-mixed-moe-lora-format --enable-return-routed-experts "
    r"--logprobs-mode processed_logprobs --max-logprobs -1 --dtype float32"
)


def of(server, **changes):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 5, **changes}


@pytest.mark.parametrize("mixed", rest_slow([True, False]))
def test_each_version_is_loaded_by_a_name_of_its_own_and_the_one_before_is_unloaded(mixed, base, engine, tmp_path):
    """Versions are in PEFT's own form where the server takes it. A second run, after one that was killed, unloads what
    that left."""
    lora = {"max_lora_rank": 8, "max_loras": 2, "enable_mixed_moe_lora_format": mixed}
    with serving(base, lora_config=lora) as server:
        trainer = make(GRPOTrainer, base, tmp_path, of(server))
        assert trainer.vllm_generation.versions.is_3d == mixed
        trainer.train()
        assert 0 < max(logged_values(trainer)) < GAP and logged_values(trainer, "serving/divergence") == [0.0, 0.0]
        assert len(server.llm.loaded) == 2 and list(server.requests) == server.llm.loaded[1:]
        again = make(GRPOTrainer, base, tmp_path, of(server, max_steps=1))
        again.train()
        assert len(server.llm.loaded) == 3 and list(server.requests) == server.llm.loaded[2:]
        assert max(logged_values(again)) < GAP


ANSWERS = {
    "does not say how it was started": {"is_in_development": False},
    "takes no adapters": {"lora_config": None},
    "takes adapters up to rank 1, and this one needs 8": {"lora_config": {"max_lora_rank": 1}},
    "has room for one adapter": {"lora_config": {"max_loras": 1}},
    "does not return the experts": {"aux_output_config": {"enable_return_routed_experts": False}},
}


@pytest.mark.pinned
@pytest.mark.parametrize("reason", ANSWERS)
def test_a_server_that_lacks_something_is_named_with_the_whole_command_line(reason, base, engine, tmp_path):
    refused = pytest.raises(ValueError, match=f"the vLLM server at http://[0-9.:]+ {reason}.*; {COMMAND}")
    with serving(base, **ANSWERS[reason]) as server, refused:
        make(GRPOTrainer, base, tmp_path, of(server))


@pytest.mark.pinned
def test_replicas_runtime_loading_folders_and_dtypes_that_do_not_fit_are_named(base, engine, tmp_path, caplog):
    refused = pytest.raises(ValueError, match=r"several replicas .* --tensor-parallel-size")
    with serving(base, parallel_config={"data_parallel_size": 2}) as server, refused:
        make(GRPOTrainer, base, tmp_path, of(server))
    for options, message in (
        ({"has_runtime_loading": False}, f"loads no adapters while it runs; {COMMAND}"),
        ({"sees_folders": False}, "does not see .*adapters_for_vllm.*; give adapters_folder="),
    ):
        with serving(base, **options) as server:
            trainer = make(GRPOTrainer, base, tmp_path, of(server))
            with pytest.raises(ValueError, match=message):
                trainer.train()
    with serving(base) as server:
        trainer = make(GRPOTrainer, base, tmp_path, of(server))
        versions = trainer.vllm_generation.versions
        server.requests[f"{versions.prefix}-{versions.number + 1}"] = None
        with pytest.raises(RuntimeError, match=r"did not load .*: 400, .*has already been loaded"):
            trainer.train()
    answers = {
        "model_config": {"dtype": "torch.bfloat16"},
        "aux_output_config": {"enable_return_routed_experts": False},
    }
    with serving(base, **answers) as server:
        folder = tmp_path / "shared"
        class_ = vllm_adapters(TRLsGRPOTrainer, adapters_folder=folder, replay=False)
        trainer = make(class_, base, tmp_path, of(server, max_steps=1))
        trainer.train()
    assert max(logged_values(trainer)) < GAP and not logged_values(trainer, "serving/divergence"), (
        "nothing is replayed"
    )
    assert "computes in bfloat16 and the trainer in float32" in caplog.text and "--dtype float32" in caplog.text
    assert [path.name for path in folder.iterdir()] == server.llm.loaded
