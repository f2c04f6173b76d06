"""Model configs to `Problem`s: which layers have experts, their shapes and formats, and what one rank holds.

Only ``config.json`` is read (or Mistral's ``params.json``, and ``hf_quant_config.json``, where older ModelOpt releases
keep the quantization), and in a folder the headers of its tensors. In a folder of GPTQ or AWQ tensors the biases of
experts are read, too, which no config mentions. Nothing here needs torch or vLLM. Models name the same field
differently, so each field has a list of names; what a model's code decides stands in the tables of `layer_names`,
`layer_problem` and `model_fields`. Fields that a config leaves out are read as a server reads them (`missing_fields`).
Names of layers are vLLM's. `moe_layers` brings it together.
"""
