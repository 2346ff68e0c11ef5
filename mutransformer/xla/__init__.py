"""The engine for TPU and other XLA devices: the only room that imports torch_xla.

Nothing is imported here: what needs torch_xla is in the modules, which are imported once an XLA device is asked for.
"""
