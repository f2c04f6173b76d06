"""Faults that the self-check of an MX layer must find, by the name that the self-check gives them."""

FAULTS = {
    "scales of rows moved",
    "rows of w2 moved",
    "scales of groups moved",
    "scales of w13 column by column",
    "scales of w2 column by column",
    "scales of w13 one exponent up",
    "scales of w2 one exponent down",
}
GATED_FAULTS = {"gate and up exchanged"}
BIAS_FAULTS = {"w13's biases left out", "w2's biases left out"}
PARAMETER_FAULTS = {"alpha ignored", "beta ignored", "limit ignored"}
