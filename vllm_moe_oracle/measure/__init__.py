"""Measuring: timing of backends, tuning, and the store of what was measured.

`cells` says what makes two layers equally fast, `environment` where a measurement was taken and whether it holds
elsewhere, `store` and `profile` keep measurements, `lookup` finds those that hold for a layer.
"""
