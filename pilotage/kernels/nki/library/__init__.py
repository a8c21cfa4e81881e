"""Our own kernels for NeuronCores, written in NKI 0.3.

Each is one launch on one core. Limits are stated where they are registered (`pilotage.functional.nki`).
"""

from pilotage.kernels.nki.library.attention import attention_decode, flash_attention
from pilotage.kernels.nki.library.cache import write_kv
from pilotage.kernels.nki.library.mlp import mlp
from pilotage.kernels.nki.library.norm import rms_norm
from pilotage.kernels.nki.library.projection import linear
from pilotage.kernels.nki.library.rotary import rotary
from pilotage.kernels.nki.library.router import router

__all__ = ["attention_decode", "flash_attention", "linear", "mlp", "rms_norm", "rotary", "router", "write_kv"]
