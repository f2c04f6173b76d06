"""What holds for every test here, as for those of `vllm_moe_oracle.testing`."""

from vllm_moe_oracle.testing.conftest import one_thread  # noqa: F401  # a fixture
