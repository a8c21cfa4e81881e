"""NKI 0.1: the namespace `neuronxcc.nki`, whose instructions return tiles, take masks, and index with arrays."""
