"""The mutations of `make mutants` fit the source; which of them the tests see takes minutes, and is asked there."""

import pytest
from mutants import REPOSITORY, Mutation, by_module, mutated

pytestmark = pytest.mark.pinned


@pytest.mark.parametrize("name", by_module())
def test_the_code_of_every_mutation_stands_in_the_source_once(name):
    for mutation in by_module(name)[name]:
        source = (REPOSITORY / mutation.path).read_text()
        assert mutated(mutation, source) != source
        compile(mutated(mutation, source), mutation.path, "exec")


def test_the_tests_of_every_mutation_are_there():
    for mutations in by_module().values():
        for mutation in mutations:
            for node in mutation.tests.split():
                file, *names = node.split("::")
                source = (REPOSITORY / file).read_text()
                assert all(f"def {name.split('[')[0]}(" in source for name in names), node


def test_a_mutation_whose_code_is_not_there_once_is_refused():
    mutation = Mutation("kernels/eager.py", "a = 1", "a = 2", "a is 2", "tests/layer/test_moe_experts.py")
    for source in ("b = 1", "a = 1\na = 1"):
        with pytest.raises(ValueError, match="a mutation names code that is there once"):
            mutated(mutation, source)


def test_a_mutation_is_found_at_another_indentation_and_in_other_lines():
    mutation = Mutation("a.py", "    if fits:\n        add(x, y)\n", "    if fits:\n        pass\n", "", "")
    source = "for x in xs:\n        if fits:\n            add(\n                x,\n                y,\n            )\n    end()\n"
    assert mutated(mutation, source) == "for x in xs:\n        if fits:\n            pass\n    end()\n"
    with pytest.raises(ValueError, match="0 times"):
        mutated(mutation, source.replace("fits", "it_fits"))
