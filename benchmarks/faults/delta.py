"""Faults of Gated DeltaNet: gates, norms, convolution, recurrence, and the state kept between steps."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from faults import change_weight, delta, fault, grouped_delta, part_of, replace_parts, wrap


def _parts(module, **parts):
    """Change parts of both the decode and the prefill call."""
    for site in module.mix.values():
        replace_parts(site, **parts)


def _rule(module):
    return part_of(module.mix["prefill"], "gated_delta_rule")


def _conv(module):
    return part_of(module.mix["prefill"], "causal_conv")


@fault("A_log with the wrong sign", delta)
def _(model, module):
    module.A_log = -module.A_log


@fault("dt_bias left out", delta)
def _(model, module):
    module.dt_bias = torch.zeros_like(module.dt_bias)


@fault("beta without sigmoid", delta)
def _(model, module):
    gates = part_of(module.mix["prefill"], "delta_gates")
    _parts(module, delta_gates=lambda a, b, A_log, dt_bias: (gates(a, b, A_log, dt_bias)[0], b.float()))


@fault(
    "decay and strength swapped, in decode only", delta, wrong={"decode"}, right={"prefill", "second chunk", "quiet"}
)
def _(model, module):
    wrap(
        module.mix["decode"],
        lambda run, mixed, z, a, b, *args, **kwargs: run(mixed, z, b.contiguous(), a.contiguous(), *args, **kwargs),
    )


@fault("decay of the token before", delta)
def _(model, module):
    rule = _rule(module)
    _parts(module, gated_delta_rule=lambda q, k, v, g, *args, **kwargs: rule(q, k, v, g.roll(1, 0), *args, **kwargs))


@fault("no decay at the first token of each chunk of 64 but the first", delta, wrong={"prefill"})
def _(model, module):
    rule = _rule(module)

    def forgetful(q, k, v, g, *args, **kwargs):
        g = g.clone()
        g[64::64] = 0
        return rule(q, k, v, g, *args, **kwargs)

    replace_parts(module.mix["prefill"], gated_delta_rule=forgetful)


@fault("l2 norm: eps outside the root", delta, wrong={"quiet"})
def _(model, module):
    def outside(x, *, eps=1e-6, scale=1.0):
        return x / (x.square().sum(-1, keepdim=True).sqrt() + eps) * scale

    _parts(module, l2_norm=outside)


@fault("k isn't normalised", delta)
def _(model, module):
    norm = part_of(module.mix["prefill"], "l2_norm")
    _parts(module, l2_norm=lambda x, *, eps=1e-6, scale=1.0: x if scale == 1.0 else norm(x, eps=eps, scale=scale))


@fault("q isn't scaled", delta)
def _(model, module):
    norm = part_of(module.mix["prefill"], "l2_norm")
    _parts(module, l2_norm=lambda x, *, eps=1e-6, scale=1.0: norm(x, eps=eps))


@fault("key heads tiled over value heads instead of repeated", grouped_delta)
def _(model, module):
    rule, ratio = _rule(module), module.value_heads // module.key_heads
    _parts(
        module,
        gated_delta_rule=lambda q, k, *args, **kwargs: rule(
            q.repeat(1, ratio, 1), k.repeat(1, ratio, 1), *args, **kwargs
        ),
    )


@fault("taps of the convolution in the wrong order", delta)
def _(model, module):
    change_weight(module, "conv1d", lambda w: w.flip(1))


@fault("convolution without activation", delta)
def _(model, module):
    conv = _conv(module)
    _parts(module, causal_conv=lambda *args, **kwargs: conv(*args, **{**kwargs, "activation": "none"}))


@fault("two channels of q's convolution swapped", delta)
def _(model, module):
    change_weight(module, "conv1d", lambda w: w[[1, 0, *range(2, len(w))]])


@fault("window of the convolution off by one", delta, wrong={"second chunk", "decode"}, right={"prefill", "quiet"})
def _(model, module):
    conv = _conv(module)

    def shifted(x, weight, pool, query_start, state_in, *args, **kwargs):
        slots = state_in[state_in > 0].long()
        pool[slots] = pool[slots].roll(1, -1)
        return conv(x, weight, pool, query_start, state_in, *args, **kwargs)

    _parts(module, causal_conv=shifted)


@fault("second chunk: window of the convolution forgotten", delta, wrong={"second chunk"}, right={"prefill", "decode"})
def _(model, module):
    conv = _conv(module)
    replace_parts(
        module.mix["prefill"],
        causal_conv=lambda x, w, pool, start, state_in, *args, **kwargs: conv(
            x, w, pool, start, state_in * 0, *args, **kwargs
        ),
    )


@fault("second chunk: state isn't loaded", delta, wrong={"second chunk"}, right={"prefill", "decode"})
def _(model, module):
    rule = _rule(module)

    def fresh(q, k, v, g, beta, pool, query_start, state_in, *args, **kwargs):
        return rule(q, k, v, g, beta, pool, query_start, state_in * 0, *args, **kwargs)

    replace_parts(module.mix["prefill"], gated_delta_rule=fresh)


@fault("state read transposed", delta, wrong={"second chunk", "decode"}, right={"prefill", "quiet"})
def _(model, module):
    rule = _rule(module)

    def turned(q, k, v, g, beta, pool, query_start, state_in, *args, **kwargs):
        slots = state_in[state_in > 0].long()
        pool[slots] = pool[slots].transpose(-1, -2)
        return rule(q, k, v, g, beta, pool, query_start, state_in, *args, **kwargs)

    _parts(module, gated_delta_rule=turned)


@fault("state kept in bfloat16", delta, wrong={"second chunk", "decode"}, right={"prefill", "quiet"})
def _(model, module):
    rule = _rule(module)

    def rounded(q, k, v, g, beta, pool, query_start, state_in, *args, **kwargs):
        slots = state_in[state_in > 0].long()
        pool[slots] = pool[slots].bfloat16().float()
        return rule(q, k, v, g, beta, pool, query_start, state_in, *args, **kwargs)

    _parts(module, gated_delta_rule=rounded)


@fault("batch: a row reads its neighbour's state", delta, wrong={"batch"}, right={"prefill", "decode", "second chunk"})
def _(model, module):
    def neighbour(run, *args, **kwargs):
        state_in = args[11].clone()
        state_in[1:2] = state_in[:1]
        return run(*args[:11], state_in, *args[12:], **kwargs)

    for site in module.mix.values():
        wrap(site, neighbour)


@fault("exported state is a token too old", delta, wrong={"batch"}, right={"prefill", "decode", "second chunk"})
def _(model, module):
    def late(run, *args, **kwargs):
        exports = args[13].clone()
        exports[:, 1] -= 1
        return run(*args[:13], exports, *args[14:], **kwargs)

    wrap(module.mix["prefill"], late)


@fault("gate before the norm of the output", delta)
def _(model, module):
    norm = part_of(module.mix["prefill"], "gated_rms_norm")
    one = torch.ones(())

    def before(x, gate, weight, *, eps):
        # silu(1.2784645) is 1: the op's own gate is neutral.
        return norm(x * silu(gate), (one * 1.2784645427610738).expand_as(gate), weight, eps=eps)

    _parts(module, gated_rms_norm=before)


@fault("gate of the output is sigmoid", delta)
def _(model, module):
    norm = part_of(module.mix["prefill"], "gated_rms_norm")
    _parts(module, gated_rms_norm=lambda x, gate, w, *, eps: norm(x, gate, w, eps=eps) / gate)


@fault("norm of the output: eps ten times too large", delta, wrong={"quiet"})
def _(model, module):
    module.eps *= 10


@fault("norm of the output: weight applied as 1 + w", delta)
def _(model, module):
    module.norm = 1 + module.norm
