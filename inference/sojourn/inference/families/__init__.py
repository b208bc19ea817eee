"""What Sojourn knows of each family of models.

Nothing else asks which family a model is of: whatever differs between families is a field of `Family`. A new family is
one module, one row of `table` and one of `projections`.
"""
