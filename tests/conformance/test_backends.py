"""The conformance tests of `vllm_moe_oracle.testing` for this project's backends."""

from vllm_moe_oracle.testing.test_conversion import *  # noqa: F403
from vllm_moe_oracle.testing.test_declarations import *  # noqa: F403
from vllm_moe_oracle.testing.test_outputs import *  # noqa: F403
