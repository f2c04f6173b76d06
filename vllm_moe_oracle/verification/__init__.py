"""Verification: the reference, its inputs and tolerances, and the self-check that compares a kernel with it.

- `tolerances`: the error that the formats explain, and how errors are measured.
- `bounds`: the same element by element, for blocks of columns, columns and tokens.
- `inputs`: the experts and tokens that make every fault of a kernel visible.
- `routing`: reference routing, for kernels that route tokens themselves.
- `self_check`: one kernel against the reference, on one rank, in a small layer of some experts.
- `converted_layer`: a converted layer against the reference, with all of its experts.

When the check runs and what follows from it belongs to `methods.backend_check`.
"""
