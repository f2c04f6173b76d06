"""Conformance tests of backends: ``pytest --pyargs vllm_moe_oracle.testing`` tests every registered backend.

Backends of installed packages (entry point ``vllm_moe_oracle.backends``) are included; ``-k NAME`` selects one. No test
needs a GPU or vLLM: machines are descriptions, and only conversion and functions for CPUs run. A failure names the
backend and the layer, says which rule is broken by how much, and what to look at.

- `test_declarations`: what a backend says of itself, and what it refuses.
- `test_conversion`: `convert` is pure, knows its shapes before weights are loaded, loses nothing, and makes the same
  bits as the backends that name the same layout.
- `test_outputs`: what a backend for CPUs computes, with bounds that see one wrong scale.
- `cases`: the layers, machines and experts.
- `bit_trace`: where the bits of a conversion's input are in its output.
- `loud_experts`: weights and tokens that hide no row, and the comparison.
"""
