"""How much attention suffers when tokens of a tag are coarsened: measured on a model, written as a profile."""
