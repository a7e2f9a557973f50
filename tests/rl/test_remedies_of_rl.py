"""Messages of reinforcement learning: each is raised, and then what it names is done."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.rl import load, make
from helpers.said import says, silent
from helpers.vllm_stand_in import serving
from peft import IA3Config, LoraConfig, get_peft_model
from trl import GRPOTrainer as TRLsGRPOTrainer

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer
from sonicmoe_hf.trl.adapter_versions import adapter_of
from sonicmoe_hf.trl.generation import AdapterGeneration
from sonicmoe_hf.trl.rollouts import GeneratedSequences

pytestmark = pytest.mark.pinned


def of(server):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 5, "max_steps": 1}


def test_adapters_that_vllm_serves(base, engine, tmp_path):
    with says("vLLM gets adapters, but the model has none; give peft_config=sonicmoe_hf.lora_config(model)"):
        make(GRPOTrainer, base, tmp_path, peft_config=None)
    with says("vLLM leaves out what use_dora=True trains; leave it out of the LoraConfig"):
        make(GRPOTrainer, base, tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    for config in (sonicmoe_hf.lora_config(load(base)), LoraConfig(r=4, target_modules=["q_proj"])):
        assert make(GRPOTrainer, base, tmp_path, peft_config=config).vllm_generation
    other = get_peft_model(load(base), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with says("vLLM serves LoRA, not", "; give peft_config=sonicmoe_hf.lora_config(model)"):
        adapter_of(other)
    model = load(base)
    assert adapter_of(get_peft_model(model, sonicmoe_hf.lora_config(model)))


def test_trainers_that_send_adapters(base, engine, tmp_path):
    model = load(base)
    adapter = sonicmoe_hf.lora_config(model)
    theirs = make(TRLsGRPOTrainer, base, tmp_path, model=model, peft_config=adapter)
    with says("have it send adapters alone: from sonicmoe_hf.trl import GRPOTrainer, or"):
        sonicmoe_hf.attach(theirs)
    with says("sends adapters already; give vllm_adapters TRL's own class, or yours"):
        sonicmoe_hf.vllm_adapters(GRPOTrainer)
    with says("divergence_every is -1; give a number of rollouts, or 0 for never"):
        sonicmoe_hf.vllm_adapters(TRLsGRPOTrainer, divergence_every=-1)
    for cls in (GRPOTrainer, sonicmoe_hf.vllm_adapters(TRLsGRPOTrainer, divergence_every=0)):
        trainer = make(cls, base, tmp_path, peft_config=adapter)
        sonicmoe_hf.attach(trainer)
        assert trainer.vllm_generation.versions


def test_experts_of_completions_come_from_an_engine_that_returns_them():
    answers = [torch.full((2, 1, 1), expert).numpy() for expert in range(2)]
    prompts, completions = [[0, 1], [0, 2]], [[3], [4]]
    generation = SimpleNamespace(mode="colocate", tensor_parallel_size=1, sequences=GeneratedSequences())
    generation.llm = SimpleNamespace(routed_experts=[answers[0], None])
    with says("returned no routed experts for some completion; start it with --enable-return-routed-experts"):
        AdapterGeneration._keep(generation, prompts, completions)
    generation.llm.routed_experts = answers
    AdapterGeneration._keep(generation, prompts, completions)
    found = [generation.sequences.experts_of([*prompt, *own]) for prompt, own in zip(prompts, completions)]
    assert [experts[0].item() for experts in found] == [0, 1]


def test_prompts_with_images_are_answered_by_a_server_without_replay(base, engine, tmp_path):
    without = sonicmoe_hf.vllm_adapters(TRLsGRPOTrainer, replay=False)
    with serving(base) as server:
        for cls in (GRPOTrainer, without):
            generation = make(cls, base, tmp_path, of(server)).vllm_generation
            generation.vllm_client.image_features = lambda images: images
            generation._place_features = lambda features, ids: features
            generation.sync_weights()
            generate = functools.partial(generation.generate, [[1, 2]] * 2, num_generations=2, profiler=nullcontext())
            generate(images=None)  # whose experts are not those of the next
            if cls is without:
                assert len(generate(images=[["an image"]] * 2)[1]) == 2
                continue
            with says("a request of which no routed experts are kept; give replay=False"):
                generate(images=[["an image"]] * 2)


def test_a_server_is_started_as_the_message_says(base, engine, tmp_path):
    """The stand-in answers as one that was."""
    with serving(base, lora_config=None) as server, says("takes no adapters", "; start it with: "):
        make(GRPOTrainer, base, tmp_path, of(server))
    with serving(base, sees_folders=False) as server:
        trainer = make(GRPOTrainer, base, tmp_path, of(server))
        with says("; give adapters_folder="):
            trainer.train()
    words = "so their log-probabilities differ by the rounding; start the server with --dtype"
    with serving(base, model_config={"dtype": "torch.bfloat16"}) as server, says(words):
        make(GRPOTrainer, base, tmp_path, of(server))
    with serving(base) as server, silent(words):
        with_folder = sonicmoe_hf.vllm_adapters(TRLsGRPOTrainer, adapters_folder=tmp_path / "shared")
        make(with_folder, base, tmp_path, of(server)).train()
        assert (tmp_path / "shared").is_dir() and list(server.requests)
