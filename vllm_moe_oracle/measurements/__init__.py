"""Measured times as data: what a time belongs to, where it holds, and where it is kept. Imports neither torch nor vLLM.

`kernel_shape` and `environment` say which layers and which machines a time holds for; `store` (the user's cache) and
`profile` (JSON files) keep times; `lookup` finds those of a layer; `bench_records` are the lines of ``bench --jsonl``.
"""
