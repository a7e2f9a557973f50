"""Choose the tests that run with other versions of torch, Transformers, PEFT and the rest than those of constraints.txt.

Every test runs with constraints.txt (`make test`). The two other environments, with the oldest and with the newest
versions, show in CI that a change of ours works with them too; so a test need not run there whose like runs. Left out
are

- what carries the marker `pinned`, which other versions cannot change, or another test shows with them;
- of a test with several cases all but the first and a third, another third with each: other versions change what a
  function of theirs does, which one case shows, and hardly what it does at one value of a parameter and not at the next;
- in the folders `OURS`, whose tests call little but our own code, files and tensor operations, every other test of a file
  with the newest, and the ones between with the oldest.

The tests that read or compare what other packages have, one by one, run whole, those of every family with the newest:
what Transformers has of a model changes at first and then stays.

When versions change (.ci/*.txt, constraints.txt), every case has to be seen: `make test-newest ARGS=tests`.
"""

from collections import Counter

OURS = (
    "tests/adapters/",
    "tests/autopatch/",
    "tests/checking/",
    "tests/checkpoints/",
    "tests/cli/",
    "tests/demo/",
    "tests/expert_parallel/",
    "tests/kernels/",
    "tests/layer/",
    "tests/project/",
    "tests/quantization/",
    "tests/routing/",
    "tests/streaming/",
    "tests/trainer/test_expanded_memory.py",
)
EVERYWHERE = (
    "tests/patching/test_architectures.py",  # each class of experts of the installed Transformers
    "tests/patching/test_families.py",  # each family's logits and gradients
    "tests/project/test_facts.py",  # our tables of facts about the versions
    "tests/project/test_private.py",  # each private name of other packages that we use
)
OF_EVERY_FAMILY = (
    "tests/adapters/test_adapters_in_peft.py",
    "tests/adapters/test_merge_families.py",
    "tests/adapters/test_served_adapter.py",
    "tests/attention/test_boundaries.py",
    "tests/attention/test_indexers.py",
    "tests/attention/test_models.py",
    "tests/layer/test_activations.py",
    "tests/patching/test_liger.py",
    "tests/quantization/test_packed_families.py",
)
WHOLE = {"oldest": EVERYWHERE, "newest": EVERYWHERE + OF_EVERY_FAMILY}
TURN = {"oldest": 0, "newest": 1}


def runs_with(versions: str, items: list) -> list:
    """List those of the collected tests that run with `versions`, "oldest" or "newest"."""
    tests, cases, kept = Counter(), Counter(), []
    for item in items:
        test, file = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        if not cases[test]:
            tests[file] += 1
        position = cases[test]
        cases[test] += 1
        in_turn = not file.startswith(OURS) or tests[file] % 2 == TURN[versions]  # the first with the newest
        if file.startswith(WHOLE[versions]) or (in_turn and (position == 0 or position % 3 == TURN[versions])):
            kept.append(item)
    return kept
