"""Nouns, errors, the tap and safe storage: what every other package may rely on."""
