"""The parametrization: roles of tensors, scaling rules, the plan they give, and initialization. Imports torch in `init` alone."""
