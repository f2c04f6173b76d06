"""The HTML report and its plots, made from data files; needs neither torch nor vLLM."""
