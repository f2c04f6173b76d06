"""Devices: the catalog of known GPUs and CPUs, and the detection of this machine."""
