"""Training with Lightning: the module, its optimizer and schedule, callbacks, checkpoints."""
