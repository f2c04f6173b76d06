"""The oracle: problems in, decisions with every reason out. Pure: no torch, no vLLM, no hardware, no environment."""
