"""The parametrization: roles, scaling rules, the plan they give, initialization. Only `init` imports torch."""
