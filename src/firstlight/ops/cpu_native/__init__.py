"""Native CPU kernels for bfloat16 models: the ops of a decode step on AVX-512, compiled at first use.

`build` compiles and loads them, `layout` says how weights lie in memory, `providers` wraps the kernels in the signatures of
the ops. Nothing is compiled by importing this package.
"""
