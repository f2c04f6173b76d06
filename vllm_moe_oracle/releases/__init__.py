"""Facts about vLLM releases as data: the supported range, minimum versions, names. Imports no vLLM."""
