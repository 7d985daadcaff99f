"""A speech head of a few thousand weights, caches full of NaN, and requests of all kinds."""

import numpy as np
import torch

from worker.nn.decoder import KvCache
from worker.nn.speech import CodeSampling, SpeechConfig, SpeechHead, SpeechRequest, speech_weights

CONFIG = SpeechConfig(
    llm_dim=12,
    hidden_size=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    n_codes=41,
    n_text_tokens=50,
    audio_bos_id=48,
    text_eos_id=49,
)
END = CONFIG.end_code
N_TOKENS = 160
UNIT = {"max_new": 26, "min_new": 26, "drops_last": True, "sampling": CONFIG.unit_sampling()}


def source(config=CONFIG, seed=0):
    """Random tensors under the checkpoint's names."""
    generator = torch.Generator().manual_seed(seed)
    d, f, w = config.hidden_size, config.ffn_size, config.n_heads * config.head_dim

    def tensor(*shape, scale=0.5):
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "emb_text.weight": tensor(config.n_text_tokens, d),
        "emb_code.0.weight": tensor(config.n_codes, d),
        "head_code.0.parametrizations.weight.original0": tensor(config.n_codes, 1, scale=2).abs(),
        "head_code.0.parametrizations.weight.original1": tensor(config.n_codes, d),
        "projector_semantic.linear1.weight": tensor(d, config.llm_dim),
        "projector_semantic.linear1.bias": tensor(d),
        "projector_semantic.linear2.weight": tensor(d, d),
        "projector_semantic.linear2.bias": tensor(d),
        "projector_spk.linear1.weight": tensor(d, config.llm_dim),
        "model.embed_tokens.weight": tensor(7, d),
        "model.norm.weight": 1 + tensor(d, scale=0.1),
    }
    for n in range(config.n_layers):
        layer = f"model.layers.{n}"
        tensors |= {
            f"{layer}.input_layernorm.weight": 1 + tensor(d, scale=0.1),
            f"{layer}.post_attention_layernorm.weight": 1 + tensor(d, scale=0.1),
            **{f"{layer}.self_attn.{name}_proj.weight": tensor(w, d) for name in "qkv"},
            f"{layer}.self_attn.o_proj.weight": tensor(d, w),
            f"{layer}.mlp.gate_proj.weight": tensor(f, d),
            f"{layer}.mlp.up_proj.weight": tensor(f, d),
            f"{layer}.mlp.down_proj.weight": tensor(d, f),
        }
    return tensors


def build(config=CONFIG, **changed):
    with torch.device("meta"):
        head = SpeechHead(config)
    head.load_state_dict(speech_weights(source(config) | changed, config), strict=True, assign=True)
    return head.eval().requires_grad_(False)


def ending(strength):
    """A head whose end code is likely."""
    name = "head_code.0.parametrizations.weight.original0"
    gain = source()[name]
    gain[END] *= strength
    return build(**{name: gain})


def poisoned(n_slots=4, n_tokens=N_TOKENS):
    cache = KvCache.allocate(CONFIG.decoder, n_slots, n_tokens)
    for slot in range(n_slots):
        cache.poison(slot)
    return cache


def hidden(n, seed=0):
    return torch.randn(n, CONFIG.llm_dim, generator=torch.Generator().manual_seed(100 + seed))


def uniforms(n, seed=0):
    return torch.rand(
        n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()


def asked(n_text=3, seed=0, slot=0, start=0, **fields):
    fields = UNIT | fields
    texts = np.random.default_rng(seed).integers(0, 48, size=n_text)
    return SpeechRequest(
        slot=slot,
        start=start,
        text_ids=tuple(texts.tolist()),
        hidden=hidden(n_text, seed) if n_text else None,
        draws=fields.pop("draws", uniforms(fields["max_new"], seed)),
        **fields,
    )


def ragged(start_of=lambda slot: 0):
    """Rows of all kinds: lengths, settings, ends."""
    return [
        asked(4, seed=1, slot=2, start=start_of(2)),
        asked(0, seed=2, slot=0, start=start_of(0), max_new=9, min_new=0),
        asked(
            11,
            seed=3,
            slot=3,
            start=start_of(3),
            is_closing=True,
            max_new=33,
            min_new=4,
            drops_last=False,
            sampling=CONFIG.text_sampling(),
            recent=(1, 2, 3, 3),
        ),
        asked(
            2,
            seed=4,
            slot=1,
            start=start_of(1),
            min_new=0,
            sampling=CodeSampling(is_greedy=True, window=3),
        ),
    ]


def n_live(request, outcome):
    codes, has_ended = outcome
    return request.n_inputs + len(codes) - int(not has_ended and not request.drops_last)
