"""What float16 holds of an MX row, rebased by the row's largest scale.

A stored weight is the code times its block's scale over the row's largest scale, times 2**1 (e2m1) or 2**7 (e4m3): as
large as float16 allows with scales that are float16's normal powers of two, 2**-14 to 2**15. e2m1 values are multiples
of 2**-1, e4m3 values of 2**-9, and float16 has multiples of 2**-24. So nothing is lost down to a scale that is 24
binades below the row's largest (e2m1), or 22 (e4m3), whatever the codes are. Below that a weight is rounded by at most
2**-26 (e2m1) or 2**-32 (e4m3) of the row's largest scale, and is 0 where its scale is 30 binades and more below.
"""

from __future__ import annotations

MAX_SPREAD = {"mxfp4": 24, "mxfp8": 22}
"""Binades below a row's largest scale in which float16 holds every weight exactly, by format."""
TOP = 30
"""What a row's largest scale is stored as (`wgmma_fragments.shuffle_mx_scales`): float16's exponent of 2**15."""
