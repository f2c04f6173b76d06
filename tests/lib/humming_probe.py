"""humming-kernels' configurations for sm_90; run with the package's folder.

    python tests/lib/humming_probe.py FOLDER             prints JSON: whether GEMMs with few columns are split along K,
                                                         by number of columns, with and without batch invariance
    python tests/lib/humming_probe.py FOLDER --tuning [LAYER...]
                                                         all configurations of both GEMMs of these `LAYERS`, or of all;
                                                         10 s of a core for each

The package's heuristics need only the number of SMs of a GPU; here it is an H200's.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

COLUMNS = (256, 768, 1024, 2048)
TOKENS = (1, 4, 16, 64, 256, 1024)
SMS = 132
LAYERS = {
    # Experts of this rank, hidden and intermediate size. The first product of the third has more than 4096 rows.
    "qwen3_ep2": (64, 2048, 768), "qwen3": (128, 2048, 768), "wide": (8, 4096, 4096), "wider": (8, 6144, 4096),
    "kimi_tp8": (384, 7168, 256), "narrow": (128, 2048, 128),
}  # fmt: skip
_UNUSED = (
    "cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.runtime", "pynvml", "jinja2", "elftools",
    "elftools.elf", "elftools.elf.elffile",
)  # fmt: skip
"""What the package imports to compile and to ask GPUs."""


def main(folder: str, tuning: bool = False, layers: Sequence[str] = ()) -> None:
    """Asks the configurations of MXFP8 and int4 experts."""
    for name in _UNUSED:
        sys.modules.setdefault(name, MagicMock())
    sys.path.insert(0, folder)
    import torch

    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.current_device = lambda: 0
    device = importlib.import_module("humming.utils.device")
    if hasattr(device, "_get_device_info_extension"):
        h200 = SimpleNamespace(index=0, name="NVIDIA H200", sm_count=SMS, sm_version=90, is_ppu=False)
        made = SimpleNamespace(_DeviceInfo=lambda *index: h200)
        device._get_device_info_extension = lambda: made  # type: ignore[attr-defined]
        importlib.import_module("humming.device")._get_device_info_extension = lambda: made  # type: ignore[attr-defined]
    dtypes, config = importlib.import_module("humming.dtypes"), importlib.import_module("humming.config")
    layer = getattr(importlib.import_module("humming.layer"), "HummingLayerMeta", config.LayerConfig)
    heuristics = importlib.import_module("humming.tune.sm90").Sm90Heuristics
    weights = {
        "mxfp8": {"b_dtype": dtypes.float8e4m3, "bs_dtype": dtypes.float8e8m0, "weight_scale_group_size": 32},
        "int4": {"b_dtype": dtypes.uint4, "bs_dtype": dtypes.bfloat16, "weight_scale_group_size": 128},
    }
    sixteen = {"a_dtype": dtypes.bfloat16, "c_dtype": dtypes.bfloat16}
    if tuning:
        print(json.dumps({
            f"{name} {kind}": {
                product: heuristics.get_configs(
                    layer(shape_n=rows, shape_k=columns, num_experts=experts, **sixteen, **weights[kind]),
                    gemm_type=config.GemmType.INDEXED,
                )
                for product, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner))
            }
            for kind in weights
            for name, (experts, hidden, inner) in LAYERS.items()
            if not layers or name in layers
        }))  # fmt: skip
        return
    found: dict[int, dict[str, bool]] = {}
    for columns in COLUMNS:
        asked: dict[str, Any] = {"shape_n": 2048, "shape_k": columns, "num_experts": 128, **sixteen}
        for invariant in (False, True):
            split = [
                heuristics.get_config(
                    layer(**asked, **kind),
                    tokens,
                    use_batch_invariant=invariant,
                    gemm_type=config.GemmType.INDEXED,
                )["use_stream_k"]
                for kind in weights.values()
                for tokens in TOKENS
            ]
            found.setdefault(columns, {})["invariant" if invariant else "free"] = any(split)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], "--tuning" in sys.argv[2:], sys.argv[3:])
