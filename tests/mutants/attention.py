"""Of attention with sinks."""

from . import Mutation

MUTATIONS = [
    Mutation(
        "sonicmoe_hf/attention/sinks.py",
        "    l = l.masked_fill_(l == torch.inf, -torch.inf)  # what",
        "    # what",
        "a query without keys has NaN",
        "tests/attention/test_sinks.py::test_a_query_that_sees_no_key_has_zeros_and_finite_gradients",
    ),
    Mutation(
        "sonicmoe_hf/attention/packing.py",
        ">= self.starts[-1]",
        "> self.starts[-1]",
        "the first token outside of all sequences keeps what lay in memory",
        "tests/attention/test_sinks.py::test_padding_on_either_side",
    ),
    Mutation(
        "sonicmoe_hf/attention/packing.py",
        "return None if starts.shape[0] == begins.shape[0] + 1 else starts",
        "return None if starts.shape[0] <= 2 else starts",
        "several rows of one sequence each are packed",
        "tests/attention/test_sinks.py::test_rows_that_hold_one_sequence_each_are_not_packed",
    ),
    Mutation(
        "sonicmoe_hf/attention/positions.py",
        "last[1:3] == (version, batch_size)",
        "last[2] == batch_size",
        "positions that changed in place are not looked at again",
        "tests/attention/test_sinks.py::test_positions_that_changed_in_place_or_are_of_another_batch_are_looked_at_again",
    ),
    Mutation(
        "sonicmoe_hf/attention/positions.py",
        "last[1:3] == (version, batch_size)",
        "last[1] == version",
        "positions broadcast to another batch are not looked at again",
        "tests/attention/test_sinks.py::test_positions_that_changed_in_place_or_are_of_another_batch_are_looked_at_again",
    ),
    Mutation(
        "sonicmoe_hf/attention/flash.py",
        "max(bounds.max_q, 2)",
        "bounds.max_q",
        "sequences of one query or none are taken for one query each",
        "tests/attention/test_sinks.py::test_packed_sequences_by_cu_seq_lens",
    ),
    Mutation(
        "sonicmoe_hf/attention/flash.py",
        "return -(-size // 8) * 8 if uses",
        "return size if uses",
        "heads of no multiple of 8 reach the CUDA kernels",
        "tests/attention/test_sinks.py::test_the_result_and_every_gradient_are_the_formula_s",
    ),
    Mutation(
        "sonicmoe_hf/attention/flash.py",
        "0 if visible.causal else distance}",
        "0}",
        "a window both ways looks back alone",
        "tests/attention/test_sinks.py::test_the_result_and_every_gradient_are_the_formula_s",
    ),
]
