"""Compiled regions: which callables are compiled, how, and why.

A region is one layer, not a model: compiling a model whole takes ten times as long, grows with
its depth, and copies the caches. All layers of a decoder share one graph.
"""

from __future__ import annotations

import torch

from worker.nn.decoder import Decoder


def compile_decode(decoder: Decoder) -> int:
    """Replace the decode call site of every layer by a compiled one; return how many.

    Rows and span are dynamic: sessions come and go, and texts grow. The compiler itself runs at
    the first step, so a warm-up has to follow. A part that cannot be compiled is an error then,
    never a silent way back to eager.
    """
    decoder.decode_layers = [
        torch.compile(layer.forward, fullgraph=True, dynamic=True) for layer in decoder.layers
    ]
    return len(decoder.decode_layers)
