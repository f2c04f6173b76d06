"""An oracle for the kernels of vLLM's quantised mixture-of-experts layers.

Importing this package is free of side effects and imports neither torch nor vLLM: vLLM's engine core and workers
unpickle quantisation configs that live here before they load any plugin.
"""

__version__ = "0.1.0"
