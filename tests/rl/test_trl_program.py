"""`sonicmoe-hf run -- trl grpo ...`: TRL's own command sends adapters of experts, and replays, without a line of code."""

import pytest
from helpers.rl_programs import assert_sent_alone_and_replayed, train_by_trls_command

pytestmark = pytest.mark.slow
STAND_IN = """
import pytest
from helpers import vllm_stand_in
vllm_stand_in.install(pytest.MonkeyPatch())
"""


def test_trls_command_sends_adapters_alone_and_replays(base, tmp_path):
    history, said = train_by_trls_command(base, tmp_path, STAND_IN)
    assert_sent_alone_and_replayed(history, tmp_path)
    assert said.count("experts: frozen, with LoRA of rank 4") == 1
