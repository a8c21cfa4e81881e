"""pilotage: from a Hugging Face causal language model to a verified deployment on a new target.

Importing this package is cheap on purpose: neither torch nor vllm is imported until a part that needs it is used.
"""

__version__ = "0.1.0"
