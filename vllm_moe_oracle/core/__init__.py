"""The vocabulary of decisions: problems, devices, capabilities, shard arithmetic. No torch, no vLLM, no I/O."""
