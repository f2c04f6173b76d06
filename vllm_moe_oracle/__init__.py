"""An oracle for the kernels of vLLM's quantized mixture-of-experts layers.

Importing this package is free of side effects and imports neither torch nor vLLM: vLLM's engine core and workers
unpickle quantization configs that live here before they load any plugin.
"""

__version__ = "0.1.0"
