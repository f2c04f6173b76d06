"""An oracle for the kernels of vLLM's quantized mixture-of-experts layers.

Importing this package is free of side effects and imports neither torch nor vLLM: vLLM's engine core and workers
unpickle quantization configs that live here before they load any plugin.
"""

import os

__version__ = "0.1.0"

if not os.path.isdir(_folder := os.path.dirname(__file__)):  # as in a zip archive on the path
    raise ImportError(
        f"{_folder} is no folder: vllm_moe_oracle reads devices, times and kernels from files. Install it (pip install "
        "vllm-moe-oracle), or unpack the archive",
        name=__name__,
        path=_folder,
    )
