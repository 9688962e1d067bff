"""Bridges to other people's trainers, one module each; each needs its extra of this package.

`accelerate` has `LaminaAccelerator`, `transformers` has `LaminaTrainer`, and `lightning` has
`LaminaStrategy`. Nothing else in the package imports these modules.
"""
