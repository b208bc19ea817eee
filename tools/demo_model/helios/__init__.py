"""The demo model of the family Helios: moving digits in chunks, trained by the recipe beside it."""
