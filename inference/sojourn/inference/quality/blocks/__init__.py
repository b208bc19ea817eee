"""The forwards of stock modules, line by line, with a fused operation at the marked places.

Each takes the module first and then what the stock forward takes. With the reference in place of the fused operation
they give the stock module's bits (tests/inference/quality/test_blocks.py), which is what tells when diffusers moves on.
"""
