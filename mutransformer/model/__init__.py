"""The decoder: its shape and its arithmetic. Plain torch; knows neither Lightning nor torch_xla.

Tensor names end in their shape, with one legend for the whole package: B batch, L sequence (queries), M keys,
D d_model, H heads, K d_head, G key/value heads, F d_ff, V vocabulary, N layers; `x_BLD` is the residual stream.
"""
