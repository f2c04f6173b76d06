"""The conformance tests of `vllm_moe_oracle.testing` for this project's backends."""

from vllm_moe_oracle.testing import *  # noqa: F403
