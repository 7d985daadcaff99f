"""Names and shapes of all tensors in the published token2wav files of a given configuration."""

from __future__ import annotations

from worker.models.minicpmo45.layout import Shapes, affine, below
from worker.nn.conformer import ConformerConfig
from worker.nn.dit import DitConfig
from worker.nn.flow import FlowConfig
from worker.nn.hift import F0Predictor, HiftConfig


def flow_shapes(config: FlowConfig) -> Shapes:
    """`flow.pt`."""
    return {
        "input_embedding.weight": (config.vocab_size, config.input_size),
        **affine("spk_embed_affine_layer", config.output_size, config.speaker_size),
        **affine("encoder_proj", config.output_size, config.encoder.width),
        **below("encoder.", encoder_shapes(config.encoder)),
        **below("decoder.estimator.", estimator_shapes(config.dit)),
    }


def encoder_shapes(config: ConformerConfig) -> Shapes:
    width, ffn, n_heads = config.width, config.ffn_size, config.n_heads
    block = {
        **affine("feed_forward.w_1", ffn, width),
        **affine("feed_forward.w_2", width, ffn),
        **affine("norm_mha", width),
        **affine("norm_ff", width),
        "self_attn.linear_pos.weight": (width, width),
        "self_attn.pos_bias_u": (n_heads, width // n_heads),
        "self_attn.pos_bias_v": (n_heads, width // n_heads),
    }
    for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
        block |= affine(f"self_attn.{name}", width, width)
    if not config.key_bias:
        del block["self_attn.linear_k.bias"]
    shapes = {
        **affine("embed.out.0", width, config.input_size),
        **affine("embed.out.1", width),
        **affine("pre_lookahead_layer.conv1", width, width, config.n_lookahead + 1),
        **affine("pre_lookahead_layer.conv2", width, width, 3),
        **affine("up_layer.conv", width, width, 2 * config.up_stride + 1),
        **affine("up_embed.out.0", width, width),
        **affine("up_embed.out.1", width),
        **affine("after_norm", width),
    }
    for stack, n_blocks in (("encoders", config.n_blocks), ("up_encoders", config.n_up_blocks)):
        for index in range(n_blocks):
            shapes |= below(f"{stack}.{index}.", block)
    return shapes


def estimator_shapes(config: DitConfig) -> Shapes:
    width, inner = config.width, config.n_heads * config.head_dim
    hidden = int(width * config.mlp_ratio)
    block = {
        **affine("attn.q_norm", config.head_dim),
        **affine("attn.k_norm", config.head_dim),
        **affine("attn.proj", width, inner),
        **affine("mlp.fc1", hidden, width),
        **affine("mlp.fc2", width, hidden),
        **affine("conv.block.1", width, width, 3),
        **affine("conv.block.3", width),
        **affine("conv.block.6", width, width, 3),
        **affine("adaLN_modulation.1", 9 * width, width),
    }
    for name in ("to_q", "to_k", "to_v"):
        block |= affine(f"attn.{name}", inner, width)
    shapes = {
        **affine("t_embedder.mlp.0", width, config.time_size),
        **affine("t_embedder.mlp.2", width, width),
        **affine("in_proj", width, config.in_size),
        **affine("final_layer.adaLN_modulation.1", 2 * width, width),
        **affine("final_layer.linear", config.out_size, width),
    }
    for index in range(config.depth):
        shapes |= below(f"blocks.{index}.", block)
    return shapes


def hift_shapes(config: HiftConfig) -> Shapes:
    """`hift.pt` without the prefix "generator." that some have."""
    causal, f0 = config.is_causal, config.f0_channels
    pre_kernel = config.look_right + 1 if causal else config.pre_kernel
    shapes = {
        **affine("m_source.l_linear", 1, config.n_harmonics),
        **normed_conv("conv_pre", config.channels(-1), config.n_mels, pre_kernel),
        **normed_conv(
            "conv_post", 2 * config.n_bins, config.channels(len(config.upsample_rates) - 1), 7
        ),
        **affine("f0_predictor.classifier", 1, f0),
    }
    for index in range(F0Predictor.N_LAYERS):
        n_in, kernel = (f0, 3)
        if index == 0:
            n_in, kernel = config.n_mels, (config.f0_look_right + 1 if causal else 3)
        shapes |= normed_conv(f"f0_predictor.condnet.{2 * index}", f0, n_in, kernel)
    for stage, kernel in enumerate(config.upsample_kernels):
        n_in, n_out = config.channels(stage - 1), config.channels(stage)
        up = normed_conv(f"ups.{stage}", n_out, n_in, kernel)
        if not causal:  # a transposed convolution: the norm is over each input's kernels
            up = {**normed_conv(f"ups.{stage}", n_in, n_out, kernel), f"ups.{stage}.bias": (n_out,)}
        stride = config.source_stride(stage)
        width = 1 if stride == 1 else 2 * stride
        shapes |= up
        shapes |= affine(f"source_downs.{stage}", n_out, 2 * config.n_bins, width)
        shapes |= block_shapes(
            f"source_resblocks.{stage}",
            n_out,
            config.source_kernels[stage],
            len(config.source_dilations[stage]),
        )
        n_blocks = len(config.block_kernels)
        for index, (block_kernel, dilations) in enumerate(
            zip(config.block_kernels, config.block_dilations, strict=True)
        ):
            name = f"resblocks.{stage * n_blocks + index}"
            shapes |= block_shapes(name, n_out, block_kernel, len(dilations))
    return shapes


def block_shapes(name: str, width: int, kernel: int, n_dilations: int) -> Shapes:
    shapes: Shapes = {}
    for side in "12":
        for index in range(n_dilations):
            shapes |= normed_conv(f"{name}.convs{side}.{index}", width, width, kernel)
            shapes[f"{name}.activations{side}.{index}.alpha"] = (width,)
    return shapes


def normed_conv(name: str, n_out: int, n_in: int, kernel: int) -> Shapes:
    """A convolution with weight norm: lengths and directions of its kernels."""
    weight = f"{name}.parametrizations.weight"
    return {
        f"{name}.bias": (n_out,),
        f"{weight}.original0": (n_out, 1, 1),
        f"{weight}.original1": (n_out, n_in, kernel),
    }
