import torch, inspect
from triton_mixers import gated_delta_inputs
from firstlight.ops.gated_delta import gated_delta, triton_chunked as c
for dtype in (torch.float16, torch.bfloat16):
    for counts in ([63, 65, 128, 2], [200, 64, 40, 0]):
        ex = ((0, 0, 7), (0, counts[0], 8), (0, counts[0] * 2 // 3, 9), (1, min(64, counts[1]), 10), (2, 1, 11), (1, 1, 0))
        args, kwargs = gated_delta_inputs(counts, [1, 0, 2, 2], [1, 3, 5, 6], exports=ex, dtype=dtype, device="cuda", key_heads=16, value_heads=32, key_dim=128, value_dim=128)
        a, b = [[x.clone() for x in args] for _ in "ab"]
        c.run(*a, **kwargs); gated_delta.reference(*b, **kwargs)
        print(counts, dtype, [f"{i}:{float((a[9][i] - b[9][i]).norm() / b[9][i].norm()):.1e}" for i in (1, 3, 5, 6, 7, 8, 9, 10, 11)], flush=True)
